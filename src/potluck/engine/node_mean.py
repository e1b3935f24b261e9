"""NodeMean: the mean that a host forms of a replica which several ranks of one machine hold between them."""

from collections.abc import Callable

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.engine.buffers import SavedBuffers
from potluck.engine.flats import FlatBuffer
from potluck.engine.means import HostMean
from potluck.engine.node_client import NodeClient
from potluck.engine.replica import Replica


class NodeMean(HostMean):
    """Each rank has what it holds, and the first sends the parts."""

    def __init__(
        self,
        send: Callable[[int, Tensor], None],
        clear: Callable[[], None],
        client: NodeClient,
        *,
        coding: Coding | None = None,
        has_moments: bool = False,
        norms_on: torch.device | None = None,
    ) -> None:
        """`coding`: how changes travel; what that leaves out is kept by the first rank. `norms_on`: where gradients
        travel in the same parts, whose norms come with them."""
        super().__init__(send, clear, coding=coding, has_moments=has_moments)
        self._client = client
        self._norms_on = norms_on

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[FlatBuffer]:
        flats = super().lay_out(replica, buffers)
        each = len(self.moments.blocks) if self.moments is not None else 0
        held = [flat.runs for flat in flats] + [flat.runs for flat in flats for _ in range(each)]
        described, wholes = self.described[: len(held)], self.described[len(held) :]
        self.collected = self._client.collect_parts(described, held, wholes, self._norms_on)
        return flats

    def start(self, index: int, numbers: Tensor) -> None:
        assert self.collected is not None
        whole = self.collected.collect(index, numbers)
        if whole is not None:
            super().start(index, whole)
