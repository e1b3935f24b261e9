"""The parts in which a gradient or a change travels to a host, where several ranks hold the replica between them.

On its way out a part is put together on the node's first rank; the mean that comes back is handed out from there, to
each rank its own numbers. Only one part is whole at a time, in memory that the next one takes over. Knows no host.
"""

import json
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.errors import PotluckError
from potluck.fleet.description import Part
from potluck.link.link import GroupLink
from potluck.sharding.runs import FlatRun, norms_of

Stretch = tuple[int, int]
"""Numbers of a part, from the first up to and without the last."""


class NodeParts:
    def __init__(
        self,
        link: GroupLink,
        parts: Sequence[Part],
        own: Sequence[Sequence[Stretch]],
        allocate: Callable[[int], Tensor] = torch.empty,
        *,
        before_next: Callable[[], None],
        norms_on: torch.device | None = None,
    ) -> None:
        """`own`: of each part, what this rank holds. `allocate`: where a part is put together, on the first rank.

        `before_next`: until a part that was put together has left. `norms_on`: with its own numbers each rank is handed
        the norm of each whole parameter of the part, computed there.
        """
        self._link = link
        self._parts = list(parts)
        self._before_next = before_next
        self._norms_on = norms_on
        told = [json.loads(data) for data in link.gather_bytes(json.dumps(own).encode())]
        self._held: list[list[list[Stretch]]] = [list(ranks) for ranks in zip(*told, strict=True)]
        """Of each part and each rank."""
        for part, held in zip(parts, self._held, strict=True):
            if part.is_of_parameters:  # others are whole on every rank
                _check_whole(part, held)
        sizes = [part.floats for part in parts]
        self._wholes: list[Tensor] = []
        """On the first rank: where each part is put together."""
        if link.rank == 0:
            one = allocate(max(sizes))
            self._wholes = [one[:size] for size in sizes]

    def collect(self, index: int, own: Tensor) -> Tensor | None:
        """A part from all ranks' numbers, on the first rank; none on the others. It is there until the next one is."""
        own = own.to("cpu")
        if not self._wholes:
            self._link.start_send(own, 0).wait()
            return None
        self._before_next()
        whole = self._wholes[index]
        for rank, stretches in enumerate(self._held[index]):
            if rank:
                own = torch.empty(_length(stretches))
                self._link.start_receive(own, rank).wait()
            for (start, end), numbers in zip(stretches, _cut(own, stretches), strict=True):
                whole[start:end] = numbers
        return whole

    def hand_out(self, index: int, whole: Tensor | None) -> Tensor:
        """This rank's numbers of a part that is whole on the first rank, in host memory; and perhaps its norms."""
        part, held = self._parts[index], self._held[index]
        has_norms = self._norms_on is not None and part.is_of_parameters and not part.is_moments
        if whole is None:
            own = torch.empty(_length(held[self._link.rank]) + has_norms * len(part.sizes))
            self._link.start_receive(own, 0).wait()
            return own
        norms = norms_of(torch.split(whole.to(self._norms_on), list(part.sizes))).cpu() if has_norms else torch.empty(0)
        for rank, stretches in enumerate(held):
            if rank:
                self._link.start_send(_join(whole, stretches, norms), rank).wait()
        return _join(whole, held[0], norms)


def ranges_in_part(runs: Sequence[FlatRun]) -> list[Stretch]:
    """Where in a part, its parameters end to end, these runs of each of them lie."""
    ranges, at = [], 0
    for index, run in enumerate(runs):
        span = run.span
        if index and runs[index - 1].span.name != span.name:
            at += math.prod(runs[index - 1].span.shape)
        ranges.append((at + span.start, at + span.end))
    return ranges


def _length(stretches: Sequence[Stretch]) -> int:
    return sum(end - start for start, end in stretches)


def _cut(flat: Tensor, stretches: Sequence[Stretch]) -> tuple[Tensor, ...]:
    return torch.split(flat, [end - start for start, end in stretches]) if stretches else ()


def _join(whole: Tensor, stretches: Sequence[Stretch], norms: Tensor) -> Tensor:
    """A copy: the memory of the whole is soon another part's."""
    return torch.cat([*(whole[start:end] for start, end in stretches), norms])


def _check_whole(part: Part, held: Sequence[Sequence[Stretch]]) -> None:
    reached = 0
    for start, end in sorted((start, end) for stretches in held for start, end in stretches if start < end):
        if start != reached:
            break
        reached = end
    if reached != part.floats:
        raise PotluckError(
            f"The ranks of this node do not hold each number of {part.key[0]} {part.key[1]} once: after {reached:,} of"
            f" {part.floats:,} there is another. That is a fault in Potluck; please report it."
        )
