"""A connection between two threads and a peer: what is on the wire when it is closed, and when a link is given up."""

import contextlib
import errno
import math
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import testbed
from potluck.fleet import host_connector
from potluck.fleet import pipe as pipe_module
from potluck.fleet.client import Client
from potluck.fleet.invite import Identity, client_context
from potluck.fleet.pipe import Pipe
from potluck.wire.messages import Ready
from tests.fleet.fleet import Fleet, wait_until
from tests.quick import first_of
from tests.unit.test_journal import DESCRIBED

pytestmark = pytest.mark.timeout(60)
MARK = b"these are weights, and nobody's business. "


@pytest.fixture(scope="module")
def server_context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    return Identity.load_or_make(tmp_path_factory.mktemp("host") / "identity").server_context()


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Wire:
    """The other end of an encrypted connection, which keeps every byte as it came over the wire."""

    def __init__(self, context: ssl.SSLContext, connection: socket.socket) -> None:
        self.connection = connection
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.bytes = bytearray()

    def shake_hands(self) -> None:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                self.connection.sendall(self.outgoing.read())
                return
            self.connection.sendall(self.outgoing.read())
            self.hear(self.connection.recv(1 << 16))

    def hear(self, data: bytes) -> bytes:
        self.bytes += data
        self.incoming.write(data)
        return data

    def hear_all(self) -> None:
        with contextlib.suppress(OSError):
            while self.hear(self.connection.recv(1 << 20)):
                pass

    def is_all_tls(self) -> bool:
        """Whether the bytes are records of TLS, one after the other; the last may be cut."""
        rest = memoryview(self.bytes)
        while len(rest) >= 5:
            if rest[0] not in (20, 21, 22, 23) or rest[1] != 3:
                return False
            rest = rest[5 + int.from_bytes(rest[3:5], "big") :]
        return True


def encrypted_pair(context: ssl.SSLContext) -> tuple[Pipe, Wire]:
    ours, theirs = socket.socketpair()
    wire = Wire(context, theirs)
    shaking = threading.Thread(target=wire.shake_hands)
    shaking.start()
    pipe = Pipe(client_context().wrap_socket(ours))
    shaking.join()
    return pipe, wire


def race_to_close(context: ssl.SSLContext) -> Wire:
    """One thread sends without a rest, and another closes."""
    pipe, wire = encrypted_pair(context)
    begun = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                pipe.send([MARK * 20])
                begun.set()

    threads = [threading.Thread(target=send), threading.Thread(target=wire.hear_all)]
    for thread in threads:
        thread.start()
    begun.wait()
    pipe.close()
    for thread in threads:
        thread.join()
    wire.connection.close()
    return wire


@pytest.mark.parametrize("races", [600, pytest.param(4000, marks=pytest.mark.slow)])
def test_nothing_leaves_in_the_clear_when_a_connection_is_closed_under_a_sender(
    races: int, server_context: ssl.SSLContext
) -> None:
    with switching_often():
        for race in range(races):
            wire = race_to_close(server_context)
            assert MARK[:12] not in wire.bytes, f"plain text on the wire in race {race}"
            assert wire.is_all_tls(), f"bytes that are no TLS on the wire in race {race}"


def test_what_is_sent_in_the_very_moment_of_closing_is_encrypted(
    server_context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own shutdown() of an encrypted socket first forgets the encryption, and then ends the connection."""
    pipe, wire = encrypted_pair(server_context)
    shut_down, fired = socket.socket.shutdown, []

    def send_first(connection: socket.socket, how: int) -> None:
        fired.append(how)
        pipe.send([MARK])
        shut_down(connection, how)

    monkeypatch.setattr(socket.socket, "shutdown", send_first)
    pipe.close()
    wire.hear_all()
    assert fired and wire.is_all_tls() and MARK not in wire.bytes
    assert wire.tls.read(1000) == MARK


def test_what_arrives_after_closing_is_not_taken_for_a_message(server_context: ssl.SSLContext) -> None:
    """Somebody in between could add plain text: without its encryption a socket would read it."""
    pipe, wire = encrypted_pair(server_context)
    wire.connection.sendall(MARK)
    pipe.close()
    with pytest.raises(OSError, match=r"(?i)wrong version|packet length|record"):
        pipe.receive(memoryview(bytearray(100)))


def options(pipe: Pipe) -> dict[str, int]:
    found = {"alive": pipe._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}
    for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT"):
        found[name] = pipe._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="these options are Linux's")
@pytest.mark.parametrize(
    ("patience_s", "link_s"), first_of([(0.5, 10), (30.0, 60), (600.0, 1200), (math.inf, 4 * 32_767)])
)
def test_a_link_is_given_up_after_a_time_that_follows_from_patience(patience_s: float, link_s: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe = Pipe(socket.create_connection(listener.getsockname()))
        pipe.give_up_link(patience_s)
        found = options(pipe)
        pipe.close()
    assert found["alive"] and found["USER_TIMEOUT"] == 1000 * link_s
    assert found["KEEPIDLE"] + found["KEEPCNT"] * found["KEEPINTVL"] <= link_s


@pytest.mark.skipif(sys.platform != "linux", reason="these options are Linux's")
def test_a_worker_and_its_host_give_up_their_link_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connector, "connect_local", lambda port: None)  # as on another machine
    fleet = Fleet(tmp_path, encrypted=True, patience_s=15.0)
    client = Client(fleet.invite, name="w", kind="cpu", say=lambda sentence: None)
    client.connect()
    client.description = DESCRIBED
    client.send(Ready(DESCRIBED.to_json(), 0, "digest", 0))
    wait_until(lambda: bool(fleet.server.connections))
    (seat,) = fleet.server.connections.values()
    assert client._session is not None
    assert options(client._session.pipe)["USER_TIMEOUT"] == options(seat.pipe)["USER_TIMEOUT"] == 30_000
    client.close()
    fleet.close()


def test_a_worker_that_joins_again_of_itself_leaves_its_last_connection(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    client = Client(fleet.invite, name="w", kind="cpu", say=lambda sentence: None)
    client.connect()
    before = client._session
    client.connect(again=True)
    assert before is not None and before.lost is not None and client._session is not before
    wait_until(lambda: len(fleet.server.core.membership.members) == 1)
    client.close()
    fleet.close()


SERVE = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
kept = [server.accept()[0] for _ in range(2)]
print("both", flush=True)
kept[0].recv(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_both_a_waiting_and_a_sending_end_notice_that_the_link_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real link between two machines goes down, and nothing says so."""
    if (lack := testbed.Testbed.lacks([testbed.Machine()], network=True)) is not None:
        pytest.skip(lack)
    monkeypatch.setattr(pipe_module, "LEAST_LINK_S", 4.0)
    noticed: dict[str, OSError] = {}

    def run(name: str, work: Callable[[], object]) -> threading.Thread:
        def until_it_ends() -> None:
            try:
                while True:
                    work()
            except OSError as error:
                noticed[name] = error

        thread = threading.Thread(target=until_it_ends)
        thread.start()
        return thread

    with testbed.Testbed([testbed.Machine()], network=True) as bed:
        command = [sys.executable, "-S", "-c", SERVE]
        server = bed.start(0, command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        waiting, sending = (Pipe(socket.create_connection((bed.address(0), port), timeout=20)) for _ in range(2))
        assert server.stdout.readline() == "both\n"
        for pipe in (waiting, sending):
            pipe.give_up_link(0.1)
        bed.unplug(0)
        threads = [
            run("waiting", lambda: waiting.receive(memoryview(bytearray(1)))),
            run("sending", lambda: sending.send([bytes(1 << 16)])),
        ]
        for thread in threads:
            thread.join(30)
        waiting.close()
        sending.close()
    assert {noticed[name].errno for name in ("waiting", "sending")} <= {errno.ETIMEDOUT, errno.EHOSTUNREACH}
