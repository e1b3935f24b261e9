"""HostMoments: what an optimizer keeps, in the parts in which it travels to a host. Knows nothing of windows.

One part for each of the parameters' parts and each thing that is kept of a number, and one for what is counted once for
a parameter. Values travel, by samples; their mean is every worker's.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.engine.buckets import Allocate
from potluck.engine.moments import Moments
from potluck.fleet.description import COUNTS, Part
from potluck.link.link import Link
from potluck.sharding.runs import FlatRun


class HostMoments(Moments):
    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[int, str],
        groups: Sequence[Sequence[Sequence[FlatRun]]],
        within: Link,
        allocate: Allocate,
    ) -> None:
        """`groups`: of each part, and each parameter in it, what this rank holds. `within`: the ranks that hold the
        rest of it."""
        super().__init__(optimizer, names, [[run for own in group for run in own] for group in groups], allocate)
        stepped = self._stepped()
        self._owners = [[next(stepped) for _ in runs] for group in groups for runs in group]
        """Of each parameter, what the optimizer steps of it here."""
        self._within = within
        self.counts = torch.zeros((1 + len(self._counters)) * len(self._owners), dtype=torch.float64)
        self._sent = torch.zeros(len(self.counts))

    def describe(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """`parts`: the parameters'."""
        each = [(first, part.sizes) for part in parts for first in self.blocks]
        of_numbers = tuple(Part(first + number, None, sizes) for number, (first, sizes) in enumerate(each))
        return (*of_numbers, Part(None, COUNTS, (len(self.counts),)))

    def send(self, weight: float, start: Callable[[int, Tensor], None]) -> None:
        """`start(number, numbers)`: of each part, in order."""
        self.fill(weight)
        self._sent.copy_(self.counts)
        for number, numbers in enumerate([*self.flats, self._sent]):
            start(number, numbers)

    def receive(self, means: Sequence[Tensor]) -> None:
        """The mean of each part becomes what this worker keeps."""
        for flat, mean in zip(self.flats, means, strict=False):
            flat.copy_(mean[: len(flat)])
        self.counts.copy_(means[len(self.flats)])
        self.take()

    def _count(self) -> list[list[float]]:
        """Count the steps of each parameter, on any rank that holds some of it."""
        nothing = [0.0] * (1 + len(self._counters))
        rows = [
            [max(column) for column in zip(nothing, *map(self._counts_of, own), strict=True)] for own in self._owners
        ]
        told = self._within.gather_rows([number for row in rows for number in row])
        found = [max(column) for column in zip(*told, strict=True)]
        return [found[at : at + len(nothing)] for at in range(0, len(found), len(nothing))]

    def _counted(self) -> Iterator[tuple[nn.Parameter, list[float]]]:
        rows = self.counts.view(-1, 1 + len(self._counters)).tolist()
        return ((each, row) for own, row in zip(self._owners, rows, strict=True) for each in own)
