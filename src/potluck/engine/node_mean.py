"""NodeMean: the mean that a host forms of a replica which several ranks of one machine hold between them."""

from collections.abc import Callable

from torch import Tensor

from potluck.engine.buffers import SavedBuffers
from potluck.engine.flats import FlatBuffer
from potluck.engine.means import HostMean
from potluck.engine.node_client import NodeClient
from potluck.engine.replica import Replica


class NodeMean(HostMean):
    """Each rank has what it holds, and the first sends the parts."""

    def __init__(
        self, send: Callable[[int, Tensor], None], clear: Callable[[], None], client: NodeClient, *, goes_ahead: bool
    ) -> None:
        """`goes_ahead`: the ranks compute while parts leave and their means come."""
        super().__init__(send, clear)
        self._client = client
        self._goes_ahead = goes_ahead

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[FlatBuffer]:
        flats = super().lay_out(replica, buffers)
        held = [flat.runs for flat in flats]
        described = self.described[: len(flats)]
        self._parts = self._client.collect_parts(described, held, buffers.parts, goes_ahead=self._goes_ahead)
        return flats

    def start(self, index: int, numbers: Tensor) -> None:
        whole = self._parts.collect(index, numbers)
        if whole is not None:
            super().start(index, whole)
