"""Gradients in, averages out: the mean of the step under way, and the connections that it comes from and goes to.

Its bytes pass outside of the server's lock. What is decided about them passes through `act`, one at a time.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from potluck.fleet import effects
from potluck.fleet.connection import Connection, PayloadLayout
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import BUFFERS, Description
from potluck.fleet.effects import Effect
from potluck.fleet.mean import PayloadMean, Slot
from potluck.fleet.outbox import Outbox
from potluck.fleet.shared_memory import Receipts, SharedMemory, SharedView
from potluck.fleet.tree import Node
from potluck.wire.messages import (
    AverageAt,
    AveragedBlockGradient,
    AveragedGradient,
    AveragedNonBlockGradient,
    CodedAverage,
    Message,
    ShareMemory,
)
from potluck.words import plural

Act = Callable[..., None]
"""Feeds the coordinator one of its INPUTS, by its name, under the server's lock, and carries out the effects."""


@dataclass
class ExpectedPayloads:
    """Payloads that a peer was asked for: for each part in turn, each node."""

    step: int
    nodes: tuple[Node, ...]
    weight: float
    parts: tuple[int, ...]
    """Parts that travel in this step, in order."""
    at: int = 0
    """How many payloads have come."""
    came: set[int] = field(default_factory=set)
    useless: set[Node] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.at == len(self.nodes) * len(self.parts)


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
    out: Outbox = field(init=False)
    closing_at: float | None = None
    window: SharedView | None = None
    stuck: tuple[int, float] = (0, 0.0)
    """How many pieces had left when it was last looked at, and for how many seconds none has."""
    blamed: str = ""
    """Why it was closed here."""

    def __post_init__(self) -> None:
        self.out = Outbox(self)

    def tell_queues(self) -> str:
        asked = [f"{len(each.nodes)} of step {each.step:,}" for each in list(self.expected)]
        told = [f"{plural(self.out.queued, 'message')} to be sent", f"{plural(self.out.owed, 'average')} not taken"]
        told += [f"nodes expected: {', '.join(asked)}"] if asked else []
        told += ["its gradients wait for their turn"] if self.held else []
        return ", ".join(told + (["it does not read"] if self.stuck[1] else []))

    def write(self) -> None:
        """The thread that writes to it."""
        try:
            self.out.run(0.0, lambda: False)
        except OSError:
            pass  # the reader tells why
        finally:
            self.close()
            self.out.drop()

    def share(self, memory: SharedMemory) -> None:
        """Show it where averages will lie. Its receipts are there before it can answer."""
        self.receipts, theirs = Receipts.pair()
        self.out.put(ShareMemory(), descriptors=(memory.descriptor, theirs), done=partial(os.close, theirs))

    def end(self) -> None:
        """Closes the connection once everything queued has been sent."""
        self.closing_at = self.closing_at or time.monotonic()
        self.out.end()

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

    def expire_slow(self, tick_s: float, limit_s: float) -> None:
        """Closes a peer that reads nothing. Counted in ticks: while this process is stopped, nobody is late."""
        before, seconds = self.stuck
        pieces = self.out.pieces
        self.stuck = pieces, seconds + tick_s if self.out.is_busy and pieces == before else 0.0
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
        self._travelling: tuple[int, ...] = ()
        """Those of the step under way."""
        self._gone_bytes: tuple[int, ...] = (0, 0, 0)
        """Of those who are gone."""

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

    def do(self, effect: Effect) -> None:
        """Carry out an effect that concerns gradients. Call it under the lock, as for all effects."""
        if self.mean is None:  # nothing was described, and so nothing asked for
            return
        match effect:
            case effects.Expect() if (connection := self.connections.get(effect.peer)) is not None:
                connection.expected.append(ExpectedPayloads(effect.step, effect.nodes, effect.weight, self._travelling))
            case effects.Narrow() if (connection := self.connections.get(effect.peer)) is not None:
                connection.narrow(effect.step, effect.node, effect.done)
            case effects.Discard() if (connection := self.connections.get(effect.peer)) is not None:
                connection.discard(effect.node)
            case effects.BeginStep():
                for connection in self.connections.values():
                    connection.forget_all_but(effect.step)
                self._formed = effect.step, []
                without = frozenset[int]() if effect.is_window else self._moments
                self._travelling = tuple(part for part in range(len(self.layout.tails)) if part not in without)
                self.mean.begin(
                    effect.step,
                    effect.slices,
                    nodes=effect.nodes,
                    several=effect.several,
                    is_window=effect.is_window,
                    without=without,
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
        """It stays as it is until this receiver has it, or will never have it."""
        assert self.mean is not None
        message = AverageAt(step, part) if connection.receipts is not None else self._average(step, part, connection)
        if message is not None:
            self.mean.hold(part, connection.peer)  # first: it may leave at once, and would be held for ever
            connection.out.put(message, done=partial(self.mean.release, part, connection.peer))

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
                    connection.out.put(self._whole(step))
            self.act("mean", step)  # last: Committed leaves behind the averages that it is about

    def _whole(self, step: int) -> Message:
        assert self.mean is not None
        flat = np.concatenate([self.mean.results[part] for part in self.layout.forward])
        return AveragedGradient(step, flat, np.float32(self._loss))

    def _average(self, step: int, index: int, to: PeerConnection) -> Message | None:
        """The average of one part as a message; None where a plain peer knows no such message."""
        assert self.mean is not None and self.core.description is not None
        part, values = self.core.description.parts[index], self.mean.results[index]
        if to.plain and part.component == BUFFERS:
            return None
        if (coding := self.layout.codings[index]) is not None and not to.plain:
            coded = self.mean.coded[index]
            to.pipe.spared_sent_bytes += values.nbytes - coded.nbytes
            return CodedAverage(step, index, coding.number, coded)
        if part.block is not None:
            return AveragedBlockGradient(step, part.block, values, self.layout.tails[index])
        return AveragedNonBlockGradient(step, part.component or 0, values)

    def travelled_bytes(self) -> tuple[int, ...]:
        """Bytes of messages between the host and all who take part, or did, as a pipe counts them."""
        return _add(self._gone_bytes, *(connection.pipe.travelled_bytes for connection in self.connections.values()))

    def lost(self, connection: PeerConnection, why: str) -> None:
        with self.lock:
            if self.connections.pop(connection.peer, None) is None:
                return
            connection.close()  # first: from then on it cannot say that it took what is written over
            self._gone_bytes = _add(self._gone_bytes, connection.pipe.travelled_bytes)
            connection.revoke()
            connection.out.drop()
            self.act("closed", connection.peer, why)


def _add(*counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))
