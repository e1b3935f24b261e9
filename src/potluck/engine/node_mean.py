"""NodeMean: the mean that a host forms of a replica which several ranks of one machine hold between them."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.engine.buffers import SavedBuffers
from potluck.engine.flats import Flat
from potluck.engine.means import HostMean
from potluck.engine.node_client import NodeClient
from potluck.engine.node_parts import NodeParts, Stretch
from potluck.engine.replica import Replica
from potluck.fleet.description import BUFFERS
from potluck.link.link import GroupLink
from potluck.shard.runs import Run


class NodeMean(HostMean):
    """Each rank has what it holds, and the first sends the parts, one at a time."""

    def __init__(
        self, send: Callable[[int, Tensor], None], clear: Callable[[], None], link: GroupLink, client: NodeClient
    ) -> None:
        super().__init__(send, clear)
        self._link, self._client = link, client

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[Flat]:
        flats, client = super().lay_out(replica, buffers), self._client
        own = [_stretches(flat.runs) for flat in flats] + [[(0, part.floats)] for part in buffers.parts]
        client.make_room(max(part.floats for part in self.described if part.component != BUFFERS))
        client.parts = self._parts = NodeParts(
            self._link, self.described, own, lambda floats: torch.from_numpy(client.allocate(floats))
        )
        return flats

    def start(self, index: int, numbers: Tensor) -> None:
        self._client.flush()  # the part before lies where this one is put together
        whole = self._parts.collect(index, numbers)
        if whole is not None:
            super().start(index, whole)


def _stretches(runs: Sequence[Run]) -> list[Stretch]:
    """Where in a part, its parameters end to end, the held numbers are."""
    found, at = [], 0
    for place, run in enumerate(runs):
        (span,) = run.spans
        if place and runs[place - 1].spans[0].name != span.name:
            at += math.prod(runs[place - 1].spans[0].shape)
        found.append((at + span.start, at + span.end))
    return found
