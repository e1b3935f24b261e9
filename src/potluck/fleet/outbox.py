"""Outbox: what one end of a connection sends over it, in the order in which it was put there.

One thread writes. A short message that the other end waits for leaves at once, by the thread that has it, if nothing is
in line: to wake another thread for it costs more than to send it. Knows nothing of what is received.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from potluck.fleet.connection import Connection
from potluck.fleet.file_stream import Parcels
from potluck.fleet.phases import enter_phase
from potluck.wire.codec import encode_parts
from potluck.wire.messages import (
    Applied,
    AverageAt,
    Committed,
    Message,
    PartAt,
    SealKey,
    SliceReport,
    StateMore,
    Work,
)

SHOWN = (PartAt, AverageAt)
"""Messages that say where numbers lie in shared memory: these have left when the other end has taken them."""
AT_ONCE = (*SHOWN, SliceReport, Applied, Committed, Work)
"""Short messages that the other end waits for in each step."""
PIECE_BYTES = 4 << 20
"""A longer message leaves in pieces, so that one who reads slowly is told from one that does not read."""


@dataclass(eq=False)
class _Entry:
    message: Message | bytes
    """Or what is left of one that the system did not take at once."""
    before: Callable[[], None] | None = None
    descriptors: tuple[int, ...] = ()
    done: Callable[[], None] | None = None
    is_own: bool = False
    """It was not put here: a chunk of a parcel, or a beat. Nobody's memory waits for it to leave, and on a slow link a
    long parcel would keep those waiting who wait for theirs."""


_RECEIPTS = _Entry(b"")
"""In place of something to be sent."""


class Outbox:
    """A worker calls all but run() under the lock of `emptied`, which is notified once everything has left."""

    def __init__(
        self,
        connection: Connection,
        emptied: threading.Condition | None = None,
        lock: "threading.RLock | None" = None,
        beat: Callable[[], Message] | None = None,
    ) -> None:
        """`beat`: what is sent when nothing else has been for a while."""
        self.unsent = 0
        """How many that were put here have not left. What lies in shared memory has when the other end has taken it."""
        self.is_ending = False
        """Nothing more will be put here."""
        self.is_busy = False
        """Its thread writes, or waits for the other end to take what it was shown."""
        self.pieces = 0
        """Pieces that have left, and numbers that were taken from shared memory."""
        self._connection = connection
        self._emptied = emptied
        self._beat = beat
        self._change = threading.Condition(lock)
        self._queue: deque[_Entry] = deque()
        self._parcels = Parcels()
        self._is_sending = False
        """Its thread has something in hand: what is put here meanwhile stands behind that."""
        self._owed: deque[_Entry] = deque()
        """What the other end has been shown, and has not taken yet."""
        self._shown = 0
        """The step of the last of them."""
        self._is_dropped = False

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def owed(self) -> int:
        return len(self._owed)

    def put(
        self,
        message: Message | bytes,
        before: Callable[[], None] | None = None,
        descriptors: tuple[int, ...] = (),
        done: Callable[[], None] | None = None,
    ) -> None:
        """`before` is called by the thread that writes, first; open files may go with a short message. `done` is called
        once: when the message has left, or will never leave."""
        entry = _Entry(message, before, descriptors, done)
        with self._change:
            if not self._is_dropped:
                self._put(entry)
                return
        _end([entry])

    def _put(self, entry: _Entry) -> None:
        is_first = entry.before is None and not self._queue and not self._is_sending
        left = self._send_now(entry.message) if is_first else None
        if left is None:
            self._queue.append(entry)
        elif left:
            self._queue.append(_Entry(left))
        self.unsent += left != b""
        if left is not None and isinstance(entry.message, SHOWN):
            self._owe(entry)
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

    def end(self) -> None:
        """Nothing more will be put here: the thread ends once all has left."""
        with self._change:
            self.is_ending = True
            self.wake()

    def drop(self) -> None:
        """The connection is gone."""
        with self._change:
            self._parcels.drop()
            self._is_dropped = True
            left = [*self._queue, *self._owed]
            self._queue.clear()
            self._owed.clear()
            self.wake()
        _end(left)

    def wake(self) -> None:
        self._change.notify_all()

    def run(self, beat_s: float, is_over: Callable[[], bool]) -> None:
        """The thread that writes. Raises OSError if the connection breaks."""
        while (entry := self._next(beat_s, is_over)) is not None:
            try:
                took = self._wait_for_receipts() if entry is _RECEIPTS else self._write(entry)
            except OSError:
                with self._change:
                    self._queue.appendleft(entry)  # so that drop() ends it
                raise
            with self._change:
                self._is_sending = False
                left = [entry]
                if entry is _RECEIPTS:
                    left = [self._owed.popleft() for _ in range(min(took, len(self._owed)))]
                elif isinstance(entry.message, SHOWN):
                    self._owe(left.pop())
                self.unsent -= sum(not each.is_own for each in left)
                if not self.unsent and self._emptied is not None:
                    self._emptied.notify_all()
            _end(left)

    def _next(self, beat_s: float, is_over: Callable[[], bool]) -> _Entry | None:
        """Return what is in line; else receipts, if some are due; else a chunk of a parcel; else, after a while, a
        beat."""
        until = time.monotonic() + beat_s
        with self._change:
            while not is_over() and not self._is_dropped:
                self.is_busy = True
                if self._queue:
                    self._is_sending = True
                    return self._queue.popleft()
                if self._owed:
                    return _RECEIPTS
                left = until - time.monotonic()
                found = self._parcels.next() or (self._beat() if self._beat is not None and left <= 0 else None)
                if found is not None:
                    self._is_sending = True
                    return _Entry(found, is_own=True)
                self.is_busy = False
                if self.is_ending:
                    return None
                self._change.wait(left if self._beat is not None else None)
        return None

    def _wait_for_receipts(self) -> int:
        assert self._connection.receipts is not None
        enter_phase("shown", self._shown)
        took = self._connection.receipts.wait(len(self._owed))
        self.pieces += took
        return took

    def _owe(self, entry: _Entry) -> None:
        self._owed.append(entry)
        self._shown = getattr(entry.message, "step", 0)

    def _send_now(self, message: Message | bytes) -> bytes | None:
        """Send at once, and return what the system did not take without waiting; None: it is for the thread that
        writes."""
        if not (self._connection.pipe.can_send_now and isinstance(message, AT_ONCE)):
            return None
        return self._connection.pipe.send_now(self._encode(message))

    def _write(self, entry: _Entry) -> int:
        pipe, message = self._connection.pipe, entry.message
        if entry.before is not None:
            entry.before()
        if isinstance(message, bytes):
            self._send([message])
        elif entry.descriptors:
            pipe.send_descriptors(encode_parts(message, self._connection.codec), entry.descriptors)
        else:
            self._send(self._encode(message))
        if isinstance(message, SealKey):
            pipe.seal_sending(message.key)
        return 1

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        together: list[bytes | memoryview] = []
        for part in parts:
            rest = memoryview(part).cast("B")
            while len(rest) > PIECE_BYTES:
                self._connection.pipe.send([*together, rest[:PIECE_BYTES]])
                self.pieces += 1
                together, rest = [], rest[PIECE_BYTES:]
            together.append(rest)
        self._connection.pipe.send(together)
        self.pieces += 1

    def _encode(self, message: Message) -> list[bytes | memoryview]:
        parts = encode_parts(message, self._connection.codec)
        step = getattr(message, "step", 0)
        enter_phase("sending", step, message=message, pipe=self._connection.pipe, parts=parts)
        return parts


def _end(entries: Sequence[_Entry]) -> None:
    """Not under the lock: what is done then may take others."""
    for entry in entries:
        if entry.done is not None:
            entry.done()
