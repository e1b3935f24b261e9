"""HostMoments: what an optimizer keeps, in the parts in which it travels to a host. Knows nothing of windows.

One part for each of the parameters' parts and each thing that is kept of a number, and one for what is counted once for
a parameter. Values travel, by samples; their mean is every worker's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from potluck.engine.buckets import Allocate
from potluck.engine.moments import Moments
from potluck.fleet.description import COUNTS, MOMENTS, Part
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
        self.counts = torch.zeros(len(self._counters) * len(self._owners), dtype=torch.float64)
        self._sent = torch.zeros(len(self.counts))

    def describe(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """`parts`: the parameters'."""
        sizes = [part.sizes for part in parts for _ in range(self.keys)]
        of_numbers = tuple(Part(MOMENTS + number, None, own) for number, own in enumerate(sizes))
        return of_numbers + ((Part(None, COUNTS, (len(self.counts),)),) if len(self.counts) else ())

    def send(self, weight: float, start: Callable[[int, Tensor], None]) -> None:
        """`start(number, numbers)`: of each part, in order."""
        self.fill(weight)
        self._sent.copy_(self.counts)
        for number, numbers in enumerate([*self.flats, *([self._sent] if len(self.counts) else [])]):
            start(number, numbers)

    def receive(self, means: Sequence[Tensor]) -> None:
        """The mean of each part becomes what this worker keeps."""
        for flat, mean in zip(self.flats, means, strict=False):
            flat.copy_(mean[: len(flat)])
        if len(self.counts):
            self.counts.copy_(means[len(self.flats)])
        self.take()

    def _count(self) -> list[float]:
        """Of each parameter, on any rank that holds some of it."""
        mine = [
            max((self._counter(each, key) for each in own), default=0.0)
            for own in self._owners
            for key in self._counters
        ]
        return [max(column) for column in zip(*self._within.gather_rows(mine), strict=True)] if mine else []

    def _counted(self) -> dict[int, dict[str, float]]:
        counts = iter(self.counts.tolist())
        told = [{key: next(counts) for key in self._counters} for _ in self._owners]
        return {id(each): counted for own, counted in zip(self._owners, told, strict=True) for each in own}
