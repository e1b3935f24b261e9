"""A model of a few numbers, and what one machine would make of it. Knows nothing of a fleet."""

import functools
import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.fleet.description import MOMENTS, Description, Part
from potluck.fleet.tree import Node, children, slice_rows

Floats = npt.NDArray[np.float32]

PARTS = (5, 3, 4)
CHUNK = 2
"""Floats of the mean at a time: so few that even these parts arrive in several."""
ROWS, BATCH, SLICES, EPOCHS = 37, 16, 8, 2
STEPS = EPOCHS * -(-ROWS // BATCH)
"""An epoch's last step has five rows, and so only five slices."""
UNIT = 0.25
VALIDATION_ROWS, VALIDATION_SIZE = 10, 3
PATIENCE_S = 10.0
TICK_S = 0.25
SECRET = "the secret"


def described(**changes: Any) -> Description:
    values: dict[str, Any] = {
        "parts": tuple(Part(len(PARTS) - 1 - i, None, (floats,)) for i, floats in enumerate(PARTS)),
        "model": "a hash",
        "rows": ROWS,
        "batch": BATCH,
        "slices": SLICES,
        "seed": 1,
        "unit": UNIT,
        "samples_per_row": 1.0,
        "policy": "sync",
        "data": {"origin": "", "marks": {"0": ["a hash", []]}},
        "training": {"optimizer.lr": 0.1},
        "told": {},
    }
    found = Description(**(values | changes))
    policy = found.windowed
    return replace(found, parts=(*found.parts, MOMENTUM)) if policy is not None and policy.moments else found


MOMENTUM = Part(MOMENTS, None, (sum(PARTS),))
"""One part more, where windows average it."""


def fresh_weights() -> Floats:
    return np.linspace(-1, 1, sum(PARTS), dtype=np.float32)


@functools.cache
def noise(epoch: int, start: int, end: int) -> Floats:
    return np.random.default_rng((epoch, start, end)).standard_normal(sum(PARTS), np.float32)


def gradient_of(weights: Floats, epoch: int, start: int, end: int) -> Floats:
    """Of the sum over a slice's rows, times the unit. [floats]"""
    return (weights * np.float32(0.125) + noise(epoch, start, end)) * np.float32((end - start) * UNIT)


def loss_of(epoch: int, start: int, end: int) -> float:
    """Summed over a slice's rows."""
    return float(noise(epoch, start, end)[0]) * (end - start)


def validation_of(start: int, end: int) -> float:
    return math.fsum(0.1 * row for row in range(start, end))


def digest_of(weights: Floats) -> str:
    return hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()


@dataclass
class State:
    """What a checkpoint holds."""

    weights: Floats = field(default_factory=fresh_weights)
    momentum: Floats = field(default_factory=lambda: np.zeros(sum(PARTS), np.float32))
    step: int = 0
    epoch: int = 0
    row: int = 0
    best: int = 0
    """The last step that was called the best so far."""

    def apply(self, mean: Floats, rows: int) -> None:
        self.momentum = self.momentum * np.float32(0.5) + mean
        self.weights = self.weights - np.float32(0.1) * self.momentum
        self.step += 1
        self.row += rows

    def agree(self, mean: Floats, rows: int) -> None:
        """After a window: the momentum is each worker's own, unless it is averaged too."""
        self.weights = self.weights - mean
        self.step += 1
        self.row += rows

    def to_bytes(self) -> bytes:
        place = np.array([self.step, self.epoch, self.row, self.best], "<i8")
        return self.weights.tobytes() + self.momentum.tobytes() + place.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "State":
        size = 4 * sum(PARTS)
        step, epoch, row, best = (int(n) for n in np.frombuffer(data[2 * size :], "<i8"))
        weights, momentum = (np.frombuffer(data[at : at + size], np.float32).copy() for at in (0, size))
        return cls(weights, momentum, step, epoch, row, best)


@functools.cache
def undisturbed(step: int = STEPS) -> bytes:
    """The weights of one machine after so many steps. The tree is summed as it is defined, by no code of the fleet."""
    return _undisturbed(step).weights.tobytes()


def rows_after(step: int) -> int:
    """How many rows so many steps have."""
    state = _undisturbed(step)
    return state.epoch * ROWS + state.row


@functools.cache
def _undisturbed(step: int) -> State:
    if not step:
        return State()
    before = _undisturbed(step - 1)
    state = State(before.weights, before.momentum, before.step, before.epoch, before.row)
    if state.row >= ROWS:
        state.epoch, state.row = state.epoch + 1, 0
    rows = min(BATCH, ROWS - state.row)
    bounds = slice_rows(state.row, rows, min(SLICES, rows))

    def sum_of(node: Node) -> Floats:
        if node[1] - node[0] == 1:
            return gradient_of(state.weights, state.epoch, *bounds[node[0]])
        left, right = children(node)
        return sum_of(left) + sum_of(right)

    state.apply(sum_of((0, len(bounds))) * np.float32(1 / (rows * UNIT)), rows)
    return state
