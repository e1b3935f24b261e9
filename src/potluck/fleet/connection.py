"""One peer that takes part, as the server's threads share it: what it was asked for, and what it has yet to be sent."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from potluck.fleet.mean import Slot
from potluck.fleet.pipe import Pipe
from potluck.fleet.shared import Receipts, Window
from potluck.fleet.tree import Node
from potluck.wire.messages import Message

PIECE_BYTES = 4 << 20


@dataclass
class Expected:
    """Payloads that a peer was asked for: for each part in turn, each node."""

    step: int
    nodes: tuple[Node, ...]
    weights: tuple[float, ...]
    at: int = 0
    came: set[int] = field(default_factory=set)
    useless: set[Node] = field(default_factory=set)


@dataclass
class Out:
    """Something to be written: a message, or the average of a part."""

    message: Message | None
    step: int = 0
    part: int = -1
    credit: tuple[int, int] | None = None
    raw: bytes = b""
    """What the lobby had yet to send."""


@dataclass(eq=False)
class Connection:
    peer: int
    pipe: Pipe
    codec: str
    plain: bool
    since: int
    heard_at: float
    expected: deque[Expected] = field(default_factory=deque)
    held: bool = False
    """Its bytes are not being read, on purpose."""
    slot: Slot | None = None
    blocks: bool | None = None
    """Whether it is sent averages part by part, or in one. A plain peer is sent what it sends itself; none: not known
    yet."""
    queue: deque[Out] = field(default_factory=deque)
    change: threading.Condition = field(default_factory=threading.Condition)
    closing_at: float | None = None
    gone: bool = False
    receipts: Receipts | None = None
    """Of a process of this machine, with which memory is shared."""
    window: Window | None = None
    owed: deque[int] = field(default_factory=deque)
    """Averages that it was told of and has not taken yet."""
    is_writing: bool = False
    pieces: int = 0
    """That have left, or were taken."""
    stuck: tuple[int, float] = (0, 0.0)
    """How many pieces had left when it was last looked at, and for how many seconds none has."""
    blamed: str = ""
    """Why it was closed here."""

    def put(self, out: Out) -> None:
        with self.change:
            if not self.gone:
                self.queue.append(out)
                self.change.notify()

    def end(self) -> None:
        """It is closed once what is queued has left."""
        with self.change:
            self.closing_at = self.closing_at or time.monotonic()
            self.change.notify_all()

    def close(self) -> None:
        self.pipe.close()
        if self.receipts is not None:
            self.receipts.close()

    def revoke(self) -> None:
        """Under the server's lock, with the decision to part from it: what it was asked for, others are asked for now,
        and what it still sends must not reach the sums, where nobody would know what it weighs."""
        self.expected.clear()
        if self.slot is not None:
            self.slot.revoked = True

    def discard(self, node: Node) -> None:
        for expected in self.expected:
            expected.useless.add(node)
        if self.slot is not None and self.slot.node == node:
            self.slot.revoked = True

    def forget_all_but(self, step: int) -> None:
        """Of a step that is begun anew, what was asked for before may still come, and comes first."""
        self.expected = deque(asked for asked in self.expected if asked.step == step)
        for asked in self.expected:
            asked.useless.update(asked.nodes)

    def take_queue(self) -> list[Out]:
        """It is gone: what it can no longer be sent."""
        self.gone = True
        self.revoke()
        with self.change:
            unsent = list(self.queue)
            self.queue.clear()
            self.change.notify_all()
        return unsent

    def fill(self, space: memoryview) -> None:
        while space:
            count = self.pipe.receive(space)
            if not count:
                raise ConnectionResetError("it ended in the middle of a message")
            self.heard_at = time.monotonic()
            space = space[count:]

    def fill_after(self, have: memoryview, length: int) -> memoryview:
        """As many bytes, of which the first are there already."""
        whole = memoryview(bytearray(length))
        whole[: len(have)] = have
        self.fill(whole[len(have) :])
        return whole

    def send_pieces(self, parts: Sequence[bytes | memoryview]) -> None:
        """In pieces, so that a peer that reads slowly is told from one that does not read."""
        together: list[bytes | memoryview] = []
        for part in parts:
            rest = memoryview(part).cast("B")
            while len(rest) > PIECE_BYTES:
                self.pipe.send([*together, rest[:PIECE_BYTES]])
                self.pieces += 1
                together, rest = [], rest[PIECE_BYTES:]
            together.append(rest)
        self.pipe.send(together)
        self.pieces += 1

    def tire(self, tick_s: float, limit_s: float) -> None:
        """Counted in ticks, and not by the clock: while this process is stopped nobody is late."""
        before, seconds = self.stuck
        self.stuck = self.pieces, seconds + tick_s if self.is_writing and self.pieces == before else 0.0
        if self.stuck[1] > limit_s and not self.blamed:
            self.blamed = f"it has not read what it was sent for {limit_s:g} s"
            self.close()
