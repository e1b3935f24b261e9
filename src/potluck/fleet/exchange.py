"""Gradients in, averages out: the mean of the step under way, and the connections that it comes from and goes to.

Its bytes pass outside of the server's lock. What is decided about them passes through `act`, one at a time.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from potluck.fleet import effects
from potluck.fleet.connection import Connection, Expected, Out
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import BUFFERS, Description
from potluck.fleet.effects import Effect
from potluck.fleet.mean import Mean
from potluck.fleet.shared import Memory
from potluck.wire.messages import AveragedBlockGradient, AveragedGradient, AveragedNonBlockGradient, Message

CONTROL_BYTES = 16 << 20
"""The longest message without gradients."""

Act = Callable[[Callable[[float], list[Effect]]], None]
"""Decides under the server's lock, given the time, and does what is decided."""


@dataclass(frozen=True)
class Layout:
    """How the gradients of a run lie in messages; of a run that nobody has described yet, there are none."""

    parts: dict[tuple[str, int], int] = field(default_factory=dict)
    """As a message names it -> its place in the order of the backward."""
    forward: list[int] = field(default_factory=list)
    """A whole gradient comes in the order of the model's parameters; parts come in the order of the backward."""
    tails: list[np.ndarray] = field(default_factory=list)
    """For each part, the sizes of its parameters."""
    limit_bytes: int = CONTROL_BYTES
    plain_limit_bytes: int = CONTROL_BYTES

    @classmethod
    def of(cls, description: Description) -> "Layout":
        largest = max(description.parts, key=lambda part: part.floats)
        limit = max(CONTROL_BYTES, 4 * largest.floats + 4 * len(largest.sizes) + 256)
        return cls(
            {part.key: index for index, part in enumerate(description.parts)},
            [i for i, part in reversed(list(enumerate(description.parts))) if part.component != BUFFERS],
            [np.array(part.sizes, "<u4") for part in description.parts],
            limit,
            max(limit, 4 * description.floats + 256),
        )


class Exchange:
    def __init__(self, core: Coordinator, act: Act, lock: threading.RLock, *, is_local: bool) -> None:
        """`is_local`: there may be workers of this machine, to share memory with."""
        self.core = core
        self.act = act
        self.lock = lock
        self.connections: dict[int, Connection] = {}
        self.mean: Mean | None = None
        self.memory: Memory | None = None
        """Where the averages are, if others may look."""
        self.layout = Layout()
        self._is_local = is_local
        self._loss = 0.0
        self._formed: tuple[int, list[int]] = (0, [])
        """The step under way, and which of its parts are averaged."""

    def describe(self, description: Description) -> None:
        total = sum(part.floats for part in description.parts)
        if self._is_local:
            self.memory = Memory(total)
        mean = self.mean = Mean(
            [part.floats for part in description.parts],
            flat=self.memory.floats[:total] if self.memory is not None else None,
            buffers=next((i for i, part in enumerate(description.parts) if part.component == BUFFERS), None),
        )
        mean.on_part = self._on_part
        mean.on_done = self._on_mean
        mean.on_bad = lambda peer, step, node, why: self.act(lambda now: self.core.on_bad(now, peer, step, node, why))
        self.layout = Layout.of(description)

    def do(self, effect: Effect) -> None:
        """What the coordinator decides of gradients. Under the lock, as all effects are."""
        match effect:
            case effects.Expect() if (connection := self.connections.get(effect.peer)) is not None:
                connection.expected.append(Expected(effect.step, effect.nodes, effect.weights))
            case effects.Discard() if (connection := self.connections.get(effect.peer)) is not None:
                connection.discard(effect.node)
        if self.mean is None:
            return
        match effect:
            case effects.BeginStep():
                for connection in self.connections.values():
                    connection.forget_all_but(effect.step)
                self._formed = effect.step, []
                self.mean.begin(effect.step, effect.slices, nodes=effect.nodes, several=effect.several)
            case effects.Widen():
                self.mean.widen(effect.step)
            case effects.SetScale():
                self._loss = effect.loss
                self.mean.set_scale(effect.step, effect.scale)
            case effects.AbandonStep():
                self.mean.abort()
                self._formed = 0, []

    def send_by_parts(self, connection: Connection) -> None:
        """From now on each average by itself; first those that the others have got already."""
        connection.blocks = True
        step, parts = self._formed
        for part in parts if connection.since <= step else ():
            self._send_average(connection, step, part)

    def _send_average(self, connection: Connection, step: int, part: int) -> None:
        assert self.mean is not None
        self.mean.hold(part, 1)
        connection.put(Out(None, step, part))

    def release(self, part: int) -> None:
        """One who was to be sent this average has it, or will never have it."""
        if self.mean is not None:
            self.mean.release(part)

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
                    connection.put(Out(self._whole(step)))
            self.act(lambda now: self.core.on_mean(now, step))

    def _whole(self, step: int) -> Message:
        assert self.mean is not None
        flat = np.concatenate([self.mean.results[part] for part in self.layout.forward])
        return AveragedGradient(step, flat, np.float32(self._loss))

    def average(self, step: int, index: int, *, plain: bool) -> Message | None:
        """Of one part, as a message; none: a plain peer knows none for it."""
        assert self.mean is not None and self.core.description is not None
        part = self.core.description.parts[index]
        if plain and part.component == BUFFERS:
            return None
        values = self.mean.results[index]
        if part.block is not None:
            return AveragedBlockGradient(step, part.block, values, self.layout.tails[index])
        return AveragedNonBlockGradient(step, part.component or 0, values)

    def lost(self, connection: Connection, why: str) -> None:
        with self.lock:
            if self.connections.pop(connection.peer, None) is None:
                return
            for out in connection.take_queue():
                if out.part >= 0:
                    self.release(out.part)
            connection.close()
            self.act(lambda now: self.core.on_closed(now, connection.peer, why))
