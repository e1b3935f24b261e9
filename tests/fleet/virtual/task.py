"""What a worker of a virtual fleet was given of a step, or of a window, and what it comes to."""

from collections.abc import Callable

import numpy as np

from potluck.fleet.tree import Node, merges, sized_rows, slice_rows
from potluck.wire.messages import Work
from tests.fleet.virtual.toy import PARTS, UNIT, Floats, State, gradient_of, noise


class Task:
    def __init__(self, work: Work, state: State) -> None:
        self.work = work
        self._state = state
        self.change = np.zeros_like(state.weights)
        """What a window has changed."""
        self.nodes: list[Node] = [(int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True)]
        self.numbers = [number for node in self.nodes for number in range(*node)]
        self.bounds = (
            sized_rows(work.row, map(int, work.sizes)) if work.batch else slice_rows(work.row, work.rows, work.slices)
        )
        self.batches = 0
        """Steps of its own, in a window."""
        if work.batch:
            start, end = self.bounds[self.numbers[0]]
            self.batches = -(-(end - start) // work.batch)
        self.stopped = 0

    def stop(self, batches: int) -> None:
        """Of a window: after so many batches, which are not all."""
        first = self.numbers[0]
        start, end = self.bounds[first]
        self.stopped, self.batches = start + batches * self.work.batch, batches
        self.bounds[first], self.bounds[first + 1] = (start, self.stopped), (self.stopped, end)
        self.nodes, self.numbers = [(first, first + 1)], [first]

    def sums(self, is_bad: Callable[[int], bool], *, has_momentum: bool = False) -> list[list[Floats]]:
        """For each node, and each part. `is_bad`: one number of what this slice gives is none. `has_momentum`: that of
        a window is one part more."""
        if not self.work.batch:
            return [in_parts(self._sum(node, is_bad)) for node in self.nodes]
        change, (start, end) = in_parts(self._change(is_bad)), self.bounds[self.numbers[0]]
        momentum: Floats = self._state.momentum * np.float32((end - start) * UNIT)
        return [[*change, momentum] if has_momentum else change]

    def _sum(self, node: Node, is_bad: Callable[[int], bool]) -> Floats:
        """As SliceSums adds them: each slice into the sums that are waiting for it."""
        stack: list[Floats] = []
        for number, count in zip(range(*node), merges(node), strict=True):
            value = gradient_of(self._state.weights, self.work.epoch, *self.bounds[number])
            _spoil(value, is_bad(number))
            for _ in range(count):
                value = stack.pop() + value
            stack.append(value)
        (total,) = stack
        return total

    def _change(self, is_bad: Callable[[int], bool]) -> Floats:
        """Of a window: what steps of its own have changed. The momentum is its own, too."""
        state, number = self._state, self.numbers[0]
        start, end = self.bounds[number]
        state.momentum = state.momentum * np.float32(0.5) + noise(self.work.epoch, start, end)
        self.change = (state.weights + state.momentum) * np.float32(0.01)
        weighted: Floats = self.change * np.float32((end - start) * UNIT)
        _spoil(weighted, is_bad(number))
        return weighted


def _spoil(values: Floats, is_bad: bool) -> None:
    if is_bad:
        values[PARTS[0] + 1] = np.nan


def in_parts(values: Floats) -> list[Floats]:
    edges = np.cumsum([0, *PARTS])
    return [values[edges[part] : edges[part + 1]] for part in range(len(PARTS))]
