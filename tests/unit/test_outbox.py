"""An outbox: whatever leaves at once and whatever waits in line, the host hears it in order, and whole."""

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from potluck.fleet.connection import Connection
from potluck.fleet.outbox import Outbox
from potluck.fleet.pipe import Pipe
from potluck.fleet.shared_memory import Receipts
from potluck.wire.messages import Applied, Heartbeat, Message, PartAt, SliceReport, StateBegin, StateMore

pytestmark = pytest.mark.timeout(30)


class Sender:
    """A worker's end, whose thread writes, and the host's end of it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.connection, self.host = Connection(Pipe(ours)), Connection(Pipe(theirs))
        self.connection.receipts, end = Receipts.pair()
        self.host_receipts = Receipts(socket.socket(fileno=end))
        lock = threading.RLock()
        self.change = threading.Condition(lock)
        self.is_over = False
        self.out = Outbox(self.connection, self.change, lock, lambda: Heartbeat("w", 0))
        self.thread = threading.Thread(target=self.out.run, args=(60.0, lambda: self.is_over))

    def put(self, *messages: Message) -> None:
        for message in messages:
            with self.change:
                self.out.put(message)

    def hear(self, count: int) -> list[Message]:
        frames = self.host.frames(lambda: 1 << 22)
        return [self.host.read_message(*next(frames)) for _ in range(count)]

    def close(self) -> None:
        with self.change:
            self.is_over = True
            self.out.wake()
        self.connection.close()
        if self.thread.ident is not None:
            self.thread.join()


def applied(step: int) -> Applied:
    return Applied(step, "digest", 0.0, 0.0, "")


def test_what_a_host_waits_for_leaves_without_a_thread() -> None:
    sender = Sender()
    sender.put(applied(1), SliceReport(2, np.zeros(0, "<u4"), np.zeros(0), np.zeros(0), 0.0, b""), applied(3))
    assert [getattr(message, "step", 0) for message in sender.hear(3)] == [1, 2, 3] and not sender.out.unsent
    sender.close()


def test_a_host_that_does_not_read_hears_all_in_order_once_it_does() -> None:
    """The system takes some, and a part of one; the rest of it, and what comes behind it, is for the thread."""
    sender = Sender()
    steps = range(2000)
    sender.put(*(Heartbeat("w", step) if step % 7 == 6 else applied(step) for step in steps))
    assert sender.out.unsent > 500
    sender.thread.start()
    heard = sender.hear(len(steps))
    assert [m.timestamp_ms if isinstance(m, Heartbeat) else getattr(m, "step", -1) for m in heard] == [*steps]
    with sender.change:
        assert sender.change.wait_for(lambda: not sender.out.unsent, 10)
    sender.close()


def test_what_is_sent_while_the_thread_has_something_in_hand_stands_behind_it() -> None:
    sender = Sender()
    begun, may_go = threading.Event(), threading.Event()

    def before() -> None:
        begun.set()
        may_go.wait(10)

    sender.thread.start()
    with sender.change:
        sender.out.put(applied(1), before)
    assert begun.wait(10)
    sender.put(applied(2))
    may_go.set()
    assert [getattr(message, "step", 0) for message in sender.hear(2)] == [1, 2]
    sender.close()


def test_nobody_waits_for_a_parcel_on_its_way() -> None:
    """On a slow link it takes minutes, and all of them something of it is about to leave."""
    sender = Sender()
    started, done = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        started.set()
        yield from [bytes(1 << 20)] * 2  # more than the system takes while the host reads nothing

    with sender.change:
        sender.out.put_parcel(1, StateBegin(1, 1, "[]"), chunks(), done.set)
        sender.out.on_more(StateMore(1, 2))
    sender.thread.start()
    assert started.wait(10)
    with sender.change:
        assert not sender.out.unsent  # what flush() waits for
        sender.out.put(applied(2))
        assert sender.out.unsent == 1  # it stands behind the chunk that is being written
    heard = [type(message).__name__ for message in sender.hear(4)]
    assert sorted(heard) == ["Applied", "StateBegin", "StateChunk", "StateChunk"] and done.wait(10)
    with sender.change:
        assert sender.change.wait_for(lambda: not sender.out.unsent, 10)
    sender.close()


@pytest.mark.parametrize("is_in_line", [False, True])
def test_a_part_in_shared_memory_has_left_when_the_host_has_taken_it(is_in_line: bool) -> None:
    sender = Sender()
    if is_in_line:
        sender.put(Heartbeat("w", 0))  # which is the thread's, and so is what comes behind it
    sender.put(PartAt(1, 0, 0), PartAt(1, 1, 0))
    sender.thread.start()
    sender.hear(2 + is_in_line)
    for left in (1, 0):
        with sender.change:
            assert not sender.change.wait_for(lambda left=left: sender.out.unsent <= left, 0.05)
        sender.host_receipts.give()
        deadline = time.monotonic() + 10
        while sender.out.unsent > left and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sender.out.unsent == left
    sender.connection.receipts and sender.connection.receipts.close()
    sender.close()
