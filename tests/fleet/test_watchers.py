"""What one who watches is told over a real socket: all of it, as it is written; and that it holds up nobody."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.errors import TheirProtocolError
from potluck.fleet.connection import Connection
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.invite import Invite
from potluck.fleet.journal import Journal
from potluck.fleet.pipe import Pipe
from potluck.fleet.server import Server
from potluck.fleet.watchers import EVENTS, NOW, STUCK_S, WatcherFeed
from potluck.page import remote
from potluck.save.checkpoint_receiver import CheckpointReceiver
from potluck.waiting import wait_until
from potluck.wire.codec import encode
from potluck.wire.messages import PROTOCOL, LookOn, Message, Watched


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def started(connection: socket.socket, folder: Path, whys: list[str]) -> WatcherFeed:
    feed = WatcherFeed(Pipe(connection), folder / "events", folder / "now", b"", whys.append)
    threading.Thread(target=feed.run, daemon=True).start()
    return feed


def heard(connection: socket.socket) -> Iterator[Message]:
    end = Connection(Pipe(connection))
    return (end.read_message(head, length) for head, length in end.frames(lambda: 1 << 20))


def test_all_is_told_from_the_beginning_and_the_last_of_it_before_the_end(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    whys: list[str] = []
    events = b"".join(b"line %d\n" % number for number in range(100_000))
    (tmp_path / "events").write_bytes(events)
    (tmp_path / "now").write_bytes(b"{}")
    feed, told, taken = started(ends[0], tmp_path, whys), heard(ends[1]), b""
    while len(taken) < len(events):
        message = next(told)
        assert isinstance(message, Watched) and message.what == EVENTS
        taken += bytes(message.data)
    assert taken == events and next(told) == Watched(NOW, b"{}")
    with (tmp_path / "events").open("ab") as file:
        file.write(b"the last line\n")
    feed.end()
    assert Watched(EVENTS, b"the last line\n") in list(told)
    assert wait_until(lambda: whys == ["it has seen all"], 10)


def test_a_watcher_keeps_no_more_of_a_hosts_events_than_it_has_room_for(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MOST_BYTES", 10_000)
    run = remote.RemoteRun(Invite("127.0.0.1", 1, "", None), tmp_path)
    for _ in range(4):
        ends[0].sendall(encode(Watched(EVENTS, b"x" * 3000)))
    with pytest.raises(TheirProtocolError, match="tells more than"):
        run._hear(Pipe(ends[1]))
    assert (tmp_path / "events.jsonl").stat().st_size == 9000


def test_one_that_reads_nothing_is_parted_with_and_one_that_reads_is_not(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    whys: list[str] = []
    (tmp_path / "events").write_bytes(bytes(32 << 20))
    feed = started(ends[0], tmp_path, whys)
    assert wait_until(lambda: feed.part_if_stuck(time.monotonic() + STUCK_S + 1), 10)
    assert not feed.part_if_stuck(time.monotonic() - STUCK_S)
    assert wait_until(lambda: whys == ["it closed the connection"], 10)


def test_one_that_goes_is_forgotten(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    whys: list[str] = []
    (tmp_path / "events").write_bytes(b"a line\n")
    started(ends[0], tmp_path, whys)
    assert next(heard(ends[1])) == Watched(EVENTS, b"a line\n")
    ends[1].shutdown(socket.SHUT_RDWR)
    ends[1].close()

    def is_forgotten() -> bool:
        with (tmp_path / "events").open("ab") as file:
            file.write(b"another\n")
        return whys == ["it closed the connection"]

    assert wait_until(is_forgotten, 10)


def test_those_who_read_nothing_do_not_hold_up_the_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "events").write_bytes(bytes(32 << 20))
    saver = CheckpointReceiver(tmp_path, lambda path, reason: None)
    core, journal = Coordinator(patience_s=60, secret="s"), Journal(Path(":memory:"))
    server = Server(core, host="127.0.0.1", port=0, tls=None, journal=journal, saver=saver)
    server.show_watchers(tmp_path / "events", tmp_path / "now")
    server.start()
    deaf = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    try:
        for one in deaf:
            one.sendall(encode(LookOn(PROTOCOL, "s")))
        assert wait_until(lambda: sum(feed._is_sending for feed in server._feeds.values()) == len(deaf), 30)
    finally:
        began = time.monotonic()
        server.stop()
        took = time.monotonic() - began
    assert not server._feeds and took < 10.0  # 2 s for all of them together, and not 16
    for one in deaf:
        one.close()
