"""Gradients in, averages out: the mean of the step under way, and the connections that it comes from and goes to.

Its bytes pass outside of the server's lock. What is decided about them passes through `act`, one at a time.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from potluck.fleet import effects
from potluck.fleet.connection import Connection, PayloadLayout
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import BUFFERS, Description
from potluck.fleet.effects import Effect
from potluck.fleet.mean import PayloadMean, Slot
from potluck.fleet.phases import enter_phase
from potluck.fleet.shared_memory import Receipts, SharedMemory, SharedView
from potluck.fleet.tree import Node
from potluck.wire.codec import encode_parts
from potluck.wire.messages import (
    AverageAt,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    CodedAverage,
    Committed,
    Message,
    SealKey,
    ShareMemory,
    Work,
)
from potluck.words import plural

PIECE_BYTES = 4 << 20
AT_ONCE = (Committed, Work)
"""Short messages that workers wait for in each step."""

Act = Callable[..., None]
"""Feeds the coordinator an input of inputs.py, by its name, under the server's lock, and carries out the effects."""


@dataclass
class ExpectedPayloads:
    """Payloads that a peer was asked for: for each part in turn, each node."""

    step: int
    nodes: tuple[Node, ...]
    weights: tuple[float, ...]
    parts: tuple[int, ...]
    """Parts that travel in this step, in order."""
    at: int = 0
    came: set[int] = field(default_factory=set)
    useless: set[Node] = field(default_factory=set)


@dataclass
class Outgoing:
    """Something to be written: a message, or the average of a part."""

    message: Message | None
    step: int = 0
    part: int = -1
    credit: tuple[int, int] | None = None
    raw: bytes = b""
    """Bytes that the lobby had yet to send."""


@dataclass(eq=False, kw_only=True)
class PeerConnection(Connection):
    """To one peer that takes part, as the server's threads share it."""

    peer: int
    plain: bool
    since: int
    """The first step whose average it gets."""
    expected: deque[ExpectedPayloads] = field(default_factory=deque)
    held: bool = False
    """Its bytes are not being read, on purpose."""
    slot: Slot | None = None
    blocks: bool | None = None
    """Whether it is sent averages part by part, or in one. A plain peer is sent what it sends itself; none: not known
    yet."""
    queue: deque[Outgoing] = field(default_factory=deque)
    change: threading.Condition = field(default_factory=threading.Condition)
    is_sending: bool = False
    """Its own thread has something in hand: what is put meanwhile stands behind that."""
    closing_at: float | None = None
    gone: bool = False
    window: SharedView | None = None
    owed: deque[int] = field(default_factory=deque)
    """Averages that it was told of and has not taken yet."""
    is_writing: bool = False
    pieces: int = 0
    """Pieces that have been sent, or taken from shared memory."""
    stuck: tuple[int, float] = (0, 0.0)
    """How many pieces had left when it was last looked at, and for how many seconds none has."""
    blamed: str = ""
    """Why it was closed here."""

    @property
    def is_over(self) -> bool:
        return self.gone or self.closing_at is not None

    def tell_queues(self) -> str:
        asked = [f"{len(each.nodes)} of step {each.step:,}" for each in list(self.expected)]
        told = [f"{plural(len(self.queue), 'message')} to be sent", f"{plural(len(self.owed), 'average')} not taken"]
        told += [f"nodes expected: {', '.join(asked)}"] if asked else []
        told += ["its gradients wait for their turn"] if self.held else []
        return ", ".join(told + (["it does not read"] if self.stuck[1] else []))

    def put(self, out: Outgoing) -> None:
        with self.change:
            if self.gone:
                return
            left = None if self.queue or self.is_sending else self._send_now(out)
            if left == b"":
                return
            self.queue.append(out if left is None else Outgoing(None, raw=left))
            self.change.notify()

    def _send_now(self, out: Outgoing) -> bytes | None:
        """Send what a worker waits for at once, without a turn of the thread that writes.

        Returns what the system did not take; none: all of it is for that thread.
        """
        if not self.pipe.can_send_now:
            return None
        if out.part >= 0 and self.receipts is not None:
            enter_phase("average leaves", out.step, part=out.part)
            self.owed.append(out.part)
            self.change.notify()  # its receipt is that thread's to take
            return self.pipe.send_now(encode_parts(AverageAt(out.step, out.part), self.codec))
        if isinstance(out.message, AT_ONCE):
            return self.pipe.send_now(encode_parts(out.message, self.codec))
        return None

    def end(self) -> None:
        """Closes the connection once everything queued has been sent."""
        with self.change:
            self.closing_at = self.closing_at or time.monotonic()
            self.change.notify_all()

    def revoke(self) -> None:
        """Under the server's lock, with the decision to part from it: what it was asked for, others are asked for now,
        and what it still sends must not reach the sums, where nobody would know what it weighs."""
        self.expected.clear()
        if self.slot is not None:
            self.slot.revoked = True

    def narrow(self, step: int, node: Node, done: Node) -> None:
        for asked in self.expected:
            if asked.step == step:
                asked.nodes = tuple(done if each == node else each for each in asked.nodes)

    def discard(self, node: Node) -> None:
        for expected in self.expected:
            expected.useless.add(node)
        if self.slot is not None and self.slot.node == node:
            self.slot.revoked = True

    def forget_all_but(self, step: int) -> None:
        """Forget payloads of other steps; what was asked for of this one, which is begun again, may still come, and
        comes first."""
        self.expected = deque(asked for asked in self.expected if asked.step == step)
        for asked in self.expected:
            asked.useless.update(asked.nodes)

    def take_queue(self) -> list[Outgoing]:
        """It is gone: what it can no longer be sent."""
        self.gone = True
        self.revoke()
        with self.change:
            unsent = list(self.queue)
            self.queue.clear()
            self.change.notify_all()
        return unsent

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

    def expire_slow(self, tick_s: float, limit_s: float) -> None:
        """Closes a peer that reads nothing. Counted in ticks: while this process is stopped, nobody is late."""
        before, seconds = self.stuck
        self.stuck = self.pieces, seconds + tick_s if self.is_writing and self.pieces == before else 0.0
        if self.stuck[1] > limit_s and not self.blamed:
            self.blamed = f"it has not read what it was sent for {limit_s:g} s"
            self.close()


class Exchange:
    def __init__(self, core: Coordinator, act: Act, lock: threading.RLock, *, is_local: bool) -> None:
        """`is_local`: there may be workers of this machine, to share memory with."""
        self.core = core
        self.act = act
        self.lock = lock
        self.connections: dict[int, PeerConnection] = {}
        self.mean: PayloadMean | None = None
        self.memory: SharedMemory | None = None
        """The memory that holds the averages, where other processes may read it."""
        self.layout = PayloadLayout()
        self._is_local = is_local
        self._loss = 0.0
        self._formed: tuple[int, list[int]] = (0, [])
        """The step under way, and which of its parts are averaged."""
        self._moments: frozenset[int] = frozenset()
        """Parts that travel with windows alone."""
        self._parts: dict[bool, tuple[int, ...]] = {}
        """Those of a step that all take together, and of a window."""
        self._travelling: tuple[int, ...] = ()
        """Those of the step under way."""

    def describe(self, description: Description) -> None:
        total = sum(part.floats for part in description.parts)
        if self._is_local:
            self.memory = SharedMemory(total)
        mean = self.mean = PayloadMean(
            [part.floats for part in description.parts],
            flat=self.memory.floats[:total] if self.memory is not None else None,
            buffers=next((i for i, part in enumerate(description.parts) if part.component == BUFFERS), None),
            codings=description.codings,
        )
        mean.on_part = self._on_part
        mean.on_done = self._on_mean
        mean.on_bad = lambda *what: self.act("bad", *what)
        self.layout, self._moments = PayloadLayout.of(description), description.moments
        whole = tuple(range(len(description.parts)))
        self._parts = {True: whole, False: tuple(part for part in whole if part not in self._moments)}

    def do(self, effect: Effect) -> None:
        """Carry out an effect that concerns gradients. Call it under the lock, as for all effects."""
        match effect:
            case effects.Expect() if (connection := self.connections.get(effect.peer)) is not None:
                connection.expected.append(
                    ExpectedPayloads(effect.step, effect.nodes, effect.weights, self._travelling)
                )
            case effects.Narrow() if (connection := self.connections.get(effect.peer)) is not None:
                connection.narrow(effect.step, effect.node, effect.done)
            case effects.Discard() if (connection := self.connections.get(effect.peer)) is not None:
                connection.discard(effect.node)
        if self.mean is None:
            return
        match effect:
            case effects.BeginStep():
                for connection in self.connections.values():
                    connection.forget_all_but(effect.step)
                self._formed = effect.step, []
                self._travelling = self._parts[effect.is_window]
                self.mean.begin(
                    effect.step,
                    effect.slices,
                    nodes=effect.nodes,
                    several=effect.several,
                    is_window=effect.is_window,
                    without=frozenset() if effect.is_window else self._moments,
                )
            case effects.Widen():
                self.mean.widen(effect.step)
            case effects.SetScale():
                self._loss = effect.loss
                self.mean.set_scale(effect.step, effect.scale)
            case effects.AbandonStep():
                self.mean.abort()
                self._formed = 0, []

    def send_by_parts(self, connection: PeerConnection) -> None:
        """From now on each average by itself; first those that the others have got already."""
        connection.blocks = True
        step, parts = self._formed
        for part in parts if connection.since <= step else ():
            self._send_average(connection, step, part)

    def _send_average(self, connection: PeerConnection, step: int, part: int) -> None:
        assert self.mean is not None
        self.mean.hold(part, connection.peer)
        connection.put(Outgoing(None, step, part))

    def release(self, connection: PeerConnection, part: int) -> None:
        """This receiver of the average has it, or will never have it."""
        if self.mean is not None:
            self.mean.release(part, connection.peer)

    def release_owed(self, connection: PeerConnection) -> None:
        """It will give no receipts any more. Both of its threads end by this, each average is released once."""
        with contextlib.suppress(IndexError):
            while True:
                self.release(connection, connection.owed.popleft())

    def _on_part(self, step: int, part: int) -> None:
        """An average is formed: to everybody who takes part, while others are still arriving."""
        with self.lock:
            if step == self._formed[0]:  # else another thread has already begun the next one
                self._formed[1].append(part)
            for connection in self.connections.values():
                if connection.since <= step and connection.blocks:
                    self._send_average(connection, step, part)

    def _on_mean(self, step: int) -> None:
        with self.lock:
            for connection in self.connections.values():
                if connection.since <= step and not connection.blocks:
                    connection.put(Outgoing(self._whole(step)))
            self.act("mean", step)

    def _whole(self, step: int) -> Message:
        assert self.mean is not None
        flat = np.concatenate([self.mean.results[part] for part in self.layout.forward])
        return AveragedGradient(step, flat, np.float32(self._loss))

    def average(self, step: int, index: int, *, plain: bool) -> Message | None:
        """The average of one part as a message; None where a plain peer knows no such message."""
        assert self.mean is not None and self.core.description is not None
        part = self.core.description.parts[index]
        if plain and part.component == BUFFERS:
            return None
        if (coding := self.layout.codings[index]) is not None and not plain:
            return CodedAverage(step, index, coding.number, self.mean.coded[index])
        values = self.mean.results[index]
        if part.block is not None:
            return AveragedBlockGradient(step, part.block, values, self.layout.tails[index])
        return AveragedNonBlockGradient(step, part.component or 0, values)

    def taken(self, peer: int, transfer: int) -> None:
        """A chunk of a state that came from this peer has been written, or has left."""
        self.act("taken", peer, transfer)

    def lost(self, connection: PeerConnection, why: str) -> None:
        with self.lock:
            if self.connections.pop(connection.peer, None) is None:
                return
            connection.close()  # first: from then on it cannot say that it took what is written over
            for out in connection.take_queue():
                if out.part >= 0:
                    self.release(connection, out.part)
            self.release_owed(connection)
            self.act("closed", connection.peer, why)


@dataclass
class PeerWriter:
    """The thread that writes to one peer: messages, and averages from where they were formed."""

    connection: PeerConnection
    exchange: Exchange

    def run(self) -> None:
        connection = self.connection
        try:
            while True:
                while connection.owed and not connection.queue:
                    connection.is_writing = True
                    self._settle()
                connection.is_writing = False
                with connection.change:
                    while not (connection.queue or connection.owed or connection.is_over):
                        connection.change.wait()
                    if not connection.queue:
                        if connection.owed:
                            continue
                        break
                    out = connection.queue.popleft()
                    connection.is_writing = connection.is_sending = True
                self.write(out)
                connection.is_sending = False
        except (OSError, IndexError):  # the latter: what was owed has been released meanwhile
            pass  # the reader tells why
        finally:
            connection.close()
            self.exchange.release_owed(connection)

    def _settle(self) -> None:
        """Allows averages that the peer has taken to be overwritten."""
        connection = self.connection
        assert connection.receipts is not None
        for _ in range(connection.receipts.wait(len(connection.owed))):
            connection.pieces += 1
            self.exchange.release(connection, connection.owed.popleft())

    def write(self, out: Outgoing) -> None:
        connection = self.connection
        if out.raw:
            connection.pipe.send([out.raw])
        elif out.part >= 0:
            self._write_average(out)
        elif isinstance(out.message, ShareMemory):
            self._share(out.message)
        else:
            assert out.message is not None
            connection.send_pieces(encode_parts(out.message, connection.codec))
            if isinstance(out.message, SealKey):
                connection.pipe.seal_sending(out.message.key)
            if out.credit is not None:
                self.exchange.taken(*out.credit)

    def _write_average(self, out: Outgoing) -> None:
        connection = self.connection
        enter_phase("average leaves", out.step, part=out.part)
        if connection.receipts is not None:
            connection.owed.append(out.part)
            connection.pipe.send(encode_parts(AverageAt(out.step, out.part), connection.codec))
            return
        try:
            message = self.exchange.average(out.step, out.part, plain=connection.plain)
            if message is not None:
                if isinstance(message, CodedAverage):
                    floats = int(self.exchange.layout.tails[out.part].sum(dtype=np.uint64))
                    connection.pipe.spared_sent_bytes += 4 * floats - message.numbers.nbytes
                connection.send_pieces(encode_parts(message, connection.codec))
        finally:
            self.exchange.release(connection, out.part)

    def _share(self, message: ShareMemory) -> None:
        connection, memory = self.connection, self.exchange.memory
        assert memory is not None
        connection.receipts, theirs = Receipts.pair()  # there before the peer can answer
        try:
            connection.pipe.send_descriptors(encode_parts(message, connection.codec), [memory.descriptor, theirs])
        finally:
            os.close(theirs)
        if connection.gone:
            connection.receipts.close()
