"""Outbox: what a worker sends over one connection, in the order in which it was put there.

One thread writes. A short message that the host waits for leaves at once, by the thread that has it, if nothing is in
line: to wake another thread for it costs more than to send it. Knows nothing of what is received.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from potluck.fleet.connection import Connection
from potluck.fleet.file_stream import Parcels
from potluck.fleet.phases import enter_phase
from potluck.wire.codec import encode_parts
from potluck.wire.messages import Applied, Message, PartAt, SealKey, SliceReport, StateMore

AT_ONCE = (SliceReport, PartAt, Applied)
"""Short messages that the host waits for in each step."""


@dataclass
class _Entry:
    message: Message | bytes
    """Or what is left of one that the system did not take at once."""
    before: Callable[[], None] | None = None
    descriptors: tuple[int, ...] = ()
    is_own: bool = False
    """It was not put here: a chunk of a parcel, or a beat. Nobody's memory waits for it to leave, and on a slow link a
    long parcel would keep those waiting who wait for theirs."""


_RECEIPTS = _Entry(b"")
"""In place of something to be sent."""


class Outbox:
    """All but run() is called under the lock of `emptied`, which is notified once everything has left."""

    def __init__(
        self, connection: Connection, emptied: threading.Condition, lock: threading.RLock, beat: Callable[[], Message]
    ) -> None:
        """`beat`: what is sent when nothing else has been for a while."""
        self.unsent = 0
        """How many that were put here have not left. What lies in shared memory has when the host has taken it."""
        self.is_ending = False
        """Nothing more will be put here."""
        self._connection = connection
        self._emptied = emptied
        self._beat = beat
        self._change = threading.Condition(lock)
        self._queue: deque[_Entry] = deque()
        self._parcels = Parcels()
        self._is_sending = False
        """Its thread has something in hand: what is put here meanwhile stands behind that."""
        self._owed = 0
        """How many parts the host has been told of, and has not taken yet."""
        self._shown = 0
        """The step of the last of them."""

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def put(
        self, message: Message, before: Callable[[], None] | None = None, descriptors: tuple[int, ...] = ()
    ) -> None:
        """`before` is called by the thread that writes, first; open files may go with a short message."""
        left = None if before is not None or self._queue or self._is_sending else self._send_now(message)
        if left != b"":
            self._queue.append(_Entry(message if left is None else left, before, descriptors))
            self.unsent += 1
        if left is not None and isinstance(message, PartAt):
            self._owe(message)
            self.unsent += 1
        if self.unsent:
            self._change.notify()

    def put_parcel(self, transfer: int, begin: Message, chunks: Iterator[bytes], done: Callable[[], None]) -> None:
        """Leaves chunk by chunk, as the other end takes them, and only while nothing else is in line."""
        self._parcels.add(transfer, begin, chunks, done)
        self._change.notify()

    def on_more(self, more: StateMore) -> None:
        self._parcels.on_more(more)
        self._change.notify()

    def drop(self) -> None:
        """The connection is gone."""
        self._parcels.drop()
        self.wake()

    def wake(self) -> None:
        self._change.notify_all()

    def run(self, beat_s: float, is_over: Callable[[], bool]) -> None:
        """The thread that writes. Raises OSError if the connection breaks."""
        while (entry := self._next(beat_s, is_over)) is not None:
            took = 0
            if entry is _RECEIPTS:
                assert self._connection.receipts is not None
                enter_phase("shown", self._shown)
                took = self._connection.receipts.wait(self._owed)
            else:
                self._write(entry)
            with self._change:
                self._is_sending = False
                self._owed -= took
                if entry is not _RECEIPTS and isinstance(entry.message, PartAt):
                    self._owe(entry.message)
                elif not entry.is_own:
                    self.unsent -= took or 1
                if not self.unsent:
                    self._emptied.notify_all()

    def _next(self, beat_s: float, is_over: Callable[[], bool]) -> _Entry | None:
        """Return what is in line; else receipts, if some are due; else a chunk of a parcel; else, after a while, a
        beat."""
        until = time.monotonic() + beat_s
        with self._change:
            while not is_over():
                if self._queue:
                    self._is_sending = True
                    return self._queue.popleft()
                if self._owed:
                    return _RECEIPTS
                left = until - time.monotonic()
                found = self._parcels.next() or (self._beat() if left <= 0 else None)
                if found is not None:
                    self._is_sending = True
                    return _Entry(found, is_own=True)
                if self.is_ending:
                    return None
                self._change.wait(left)
        return None

    def _owe(self, shown: PartAt) -> None:
        self._owed += 1
        self._shown = shown.step

    def _send_now(self, message: Message) -> bytes | None:
        """Send at once, and return what the system did not take without waiting; None: it is for the thread that
        writes."""
        if not (self._connection.pipe.can_send_now and isinstance(message, AT_ONCE)):
            return None
        return self._connection.pipe.send_now(self._encode(message))

    def _write(self, entry: _Entry) -> None:
        pipe, message = self._connection.pipe, entry.message
        if entry.before is not None:
            entry.before()
        if isinstance(message, bytes):
            pipe.send([message])
        elif entry.descriptors:
            pipe.send_descriptors(encode_parts(message), entry.descriptors)
        else:
            pipe.send(self._encode(message))
        if isinstance(message, SealKey):
            pipe.seal_sending(message.key)

    def _encode(self, message: Message) -> list[bytes | memoryview]:
        parts = encode_parts(message)
        step = getattr(message, "step", 0)
        enter_phase("sending", step, message=message, pipe=self._connection.pipe, parts=parts)
        return parts
