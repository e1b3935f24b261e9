"""Sums of a node, whose ranks hold the replica between them: NodeParts, in which they travel, and SplitGradients."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import round_pieces
from potluck.errors import ConfigError, PotluckError
from potluck.fleet.description import Part
from potluck.link.link import GroupLink
from potluck.sharding.blocks import find_blocks
from potluck.sharding.runs import ROOM, FlatRun, norms_of
from potluck.sums.slices import PartSums, as_bits, check_float32, is_set, plan_parts

if TYPE_CHECKING:
    from potluck.replica.sharded import ShardedReplica

Stretch = tuple[int, int]
"""Numbers of a part, from the first up to and without the last."""


class NodeParts:
    """The parts in which a gradient or a change travels to a host, where several ranks hold the replica between them.

    On its way out a part is put together on the node's first rank; the mean that comes back is handed out from there,
    to each rank its own numbers. Only one part is whole at a time, in memory that the next one takes over. Knows no
    host.
    """

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


CollectParts = Callable[[Sequence[Part], Sequence[Sequence[FlatRun]], Sequence[Part]], NodeParts]
"""(parts, what this rank holds of each of them, parts that it has all of)."""


def ranges_in_part(runs: Sequence[FlatRun]) -> list[Stretch]:
    """Where in a part, its parameters end to end, these runs of each of them lie."""
    ranges, at = [], 0
    for index, run in enumerate(runs):
        span = run.span
        if index and runs[index - 1].span.name != span.name:
            at += math.prod(runs[index - 1].span.shape)
        ranges.append((at + span.start, at + span.end))
    return ranges


class SplitGradients:
    """The gradients of slices that several ranks of one machine compute together, each some of the rows.

    Each rank has the whole slice's gradient of what it holds of the replica, and adds that up. What is sent of a part
    is put together on the first rank, by NodeParts; the mean comes back to each rank for its own numbers alone. Parts
    leave once the backward of the last slice has ended: until then its sums over the ranks are under way.
    """

    is_idle = False

    def __init__(
        self,
        replica: "ShardedReplica",
        collect_parts: CollectParts,
        buffers: Sequence[Part],
        collected: NodeParts | None = None,
        coding: Coding | None = None,
    ) -> None:
        """`collect_parts`: how parts are put together; `collected`: where windows travel in the same ones, they are.
        `buffers`: what travels beside the gradients, and every rank has all of. `coding`: how parts travel; the ranks
        send each other floats, and round blocks that lie on several of them alike."""
        self._replica = replica
        model, sharded = replica.model, replica.sharded
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._trained = [names[id(parameter)] for parameter in model.parameters() if parameter.requires_grad]
        _check_optimizer(self._trained, sharded.group_names)
        check_float32([sharded.split[name] for name in self._trained if name in sharded.split])
        self._used: set[str] = set()
        planned = plan_parts(model, find_blocks(model))
        self._names = [[names[id(parameter)] for parameter in parameters] for _, parameters in planned]
        found = replica.held()
        held = [[run for name in part for run in found[name]] for part in self._names]
        numbers = {id(run): number for number, run in enumerate(sharded.runs)}
        self._runs = [[numbers.get(id(run)) for run in own] for own in held]
        """Of each part: which of this rank's runs are in it, one after the other; none for one that has no numbers."""
        self._sizes = [[run.span.size for run in own] for own in held]
        self.parts = [
            PartSums(
                part,
                torch.zeros(sum(run.span.size for run in own), device=replica.device),
                round_=partial(self._round, coding, part, ranges_in_part(own)) if coding is not None else None,
            )
            for (part, _), own in zip(planned, held, strict=True)
        ]
        self._collected = collected or collect_parts([part for part, _ in planned], held, buffers)
        self.on_part: Callable[[], None] = lambda: None

    def _round(self, coding: Coding, part: Part, stretches: Sequence[Stretch], sum_: Tensor) -> None:
        """Every rank of this worker rounds the same sums, in this order."""
        pieces = zip(stretches, torch.split(sum_, [end - start for start, end in stretches]), strict=True)
        own = [(start, piece) for (start, _), piece in pieces if len(piece)]
        round_pieces(coding, own, part.floats, self._replica.sharded.collectives.maximum)

    def start_work(self) -> None:
        self._used = set()

    def start_slice(self) -> None:
        """Add up what the slice before has left, and drop it."""

    def arm(self, *, communicate: bool) -> None:
        """The replica is armed itself."""

    def finish(self) -> None:
        sharded = self._replica.sharded
        self._replica.finish()
        self._used |= sharded.used
        gradients = sharded.run_gradients()
        for sums, runs, sizes in zip(self.parts, self._runs, self._sizes, strict=True):
            for place, number in zip(torch.split(sums.flat, sizes), runs, strict=True):
                found = gradients[number] if number is not None else None
                place.zero_() if found is None else place.copy_(found.view(-1))
        sharded.drop()
        for _ in self.parts:
            self.on_part()

    def used_bits(self) -> bytes:
        """A rank's rows may have used what those of the others have not."""
        used = torch.tensor([name in self._used for name in self._trained], dtype=torch.int32)
        self._replica.link.start_sum(used).wait()
        return as_bits(used.bool().tolist())

    def collect(self, index: int, numbers: Tensor) -> Tensor | None:
        return self._collected.collect(index, numbers)

    def load(self, means: Sequence[Tensor], used: bytes) -> float:
        steps_now = self._replica.adapter.steps_now
        was_used = {name for index, name in enumerate(self._trained) if is_set(used, index) and steps_now(name)}
        sharded = self._replica.sharded
        norms: dict[str, Tensor] = {}
        gradients: list[Tensor | None] = [None] * len(sharded.runs)
        for names, runs, sizes, mean in zip(self._names, self._runs, self._sizes, means, strict=False):
            *pieces, told = torch.split(mean, [*sizes, len(names)])
            norms |= dict(zip(names, told, strict=True))
            for number, piece in zip(runs, pieces, strict=True):
                if number is not None and sharded.runs[number].span.name in was_used:
                    gradients[number] = piece
        sharded.load(gradients)
        # From the norms of whole parameters, in the model's order: the bits of a replica that one process has.
        counted = [norms[name] for name in self._trained if name in was_used]
        norm = float(torch.linalg.vector_norm(torch.stack(counted).to(self._replica.device))) if counted else 0.0
        return norm if ROOM[0] < norm < ROOM[1] else float(self._replica.norm())


def _check_optimizer(trained: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
    held = {name for group in groups for name in group}
    if unheld := [name for name in trained if name not in held]:
        raise ConfigError(
            f"{unheld[0]} requires a gradient, and the optimizer does not hold it: of a replica that is split over"
            " ranks, only what is stepped is summed over them. Freeze it, or give it to the optimizer."
        )


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
