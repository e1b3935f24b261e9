"""The parts in which a replica's change travels to a host, where the ranks of a node hold it between them.

On its way out a part is put together on the node's first rank; the mean that comes back is handed out from there, to
each rank its own numbers. Only one part is whole at a time, in memory that the next one takes over. Knows no host.
"""

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.errors import PotluckError
from potluck.fleet.description import BUFFERS, Part
from potluck.link.link import GroupLink

Stretch = tuple[int, int]
"""Numbers of a part, from the first up to and without the last."""


class NodeParts:
    def __init__(
        self,
        link: GroupLink,
        parts: Sequence[Part],
        own: Sequence[Sequence[Stretch]],
        allocate: Callable[[int], Tensor] = torch.empty,
    ) -> None:
        """`own`: of each part, what this rank holds. `allocate`: where a part is put together, on the first rank."""
        self._link = link
        self._sizes = [part.floats for part in parts]
        told = [json.loads(data) for data in link.gather_bytes(json.dumps(own).encode())]
        self._held: list[list[list[Stretch]]] = [list(ranks) for ranks in zip(*told, strict=True)]
        """Of each part and each rank."""
        for part, held in zip(parts, self._held, strict=True):
            if part.component != BUFFERS:  # those are whole on every rank
                _insist_on_whole(part, held)
        self._whole = allocate(max(self._sizes)) if link.rank == 0 else None

    def collect(self, index: int, own: Tensor) -> Tensor | None:
        """A part from all ranks' numbers, on the first rank; none on the others. It is there until the next one is."""
        own = own.to("cpu")
        if self._whole is None:
            self._link.start_send(own, 0).wait()
            return None
        whole = self._whole[: self._sizes[index]]
        for rank, stretches in enumerate(self._held[index]):
            if rank:
                own = torch.empty(_length(stretches))
                self._link.start_receive(own, rank).wait()
            for (start, end), numbers in zip(stretches, _cut(own, stretches), strict=True):
                whole[start:end] = numbers
        return whole

    def hand_out(self, index: int, whole: Tensor | None) -> Tensor:
        """This rank's numbers of a part that is whole on the first rank, in host memory."""
        mine = self._held[index][self._link.rank]
        if self._link.rank:
            own = torch.empty(_length(mine))
            self._link.start_receive(own, 0).wait()
            return own
        assert whole is not None
        for rank, stretches in enumerate(self._held[index]):
            if rank:
                self._link.start_send(_join(whole, stretches), rank).wait()
        return _join(whole, mine)


def _length(stretches: Sequence[Stretch]) -> int:
    return sum(end - start for start, end in stretches)


def _cut(flat: Tensor, stretches: Sequence[Stretch]) -> tuple[Tensor, ...]:
    return torch.split(flat, [end - start for start, end in stretches]) if stretches else ()


def _join(whole: Tensor, stretches: Sequence[Stretch]) -> Tensor:
    """A copy: the memory of the whole is soon another part's."""
    return torch.cat([whole[start:end] for start, end in stretches]) if stretches else torch.empty(0)


def _insist_on_whole(part: Part, held: Sequence[Sequence[Stretch]]) -> None:
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
