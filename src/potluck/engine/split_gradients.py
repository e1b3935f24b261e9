"""The gradients of slices that several ranks of one machine compute together, each some of the rows.

Each rank has the whole slice's gradient of what it holds of the replica, and adds that up. What is sent of a part is
put together on the first rank (node_parts.py); the mean comes back to each rank for its own numbers alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import round_pieces
from potluck.engine.node_client import NodeClient
from potluck.engine.node_parts import NodeParts, Stretch, ranges_in_part
from potluck.engine.slices import PartSums, as_bits, check_float32, is_set, plan_parts
from potluck.errors import ConfigError
from potluck.fleet.description import Part
from potluck.sharding.blocks import find_blocks
from potluck.sharding.runs import ROOM

if TYPE_CHECKING:
    from potluck.engine.sharded import ShardedReplica


class SplitGradients:
    """Parts leave once the backward of the last slice has ended: until then its sums over the ranks are under way."""

    is_idle = False

    def __init__(
        self,
        replica: "ShardedReplica",
        client: NodeClient,
        buffers: Sequence[Part],
        collected: NodeParts | None = None,
        coding: Coding | None = None,
    ) -> None:
        """`buffers`: what travels beside the gradients, and every rank has all of. `collected`: how parts are put
        together, where windows travel in the same ones. `coding`: how parts travel; the ranks send each other floats,
        and round blocks that lie on several of them alike."""
        self._client = client
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
        self._collected = collected or client.collect_parts(
            [part for part, _ in planned], held, buffers, norms_on=replica.device
        )
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
