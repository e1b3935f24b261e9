"""What a window changed in a replica that several ranks of one machine hold between them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from potluck.engine.changes import Changes
from potluck.engine.node_client import NodeClient
from potluck.link.link import Link
from potluck.shard.blocks import find_blocks

if TYPE_CHECKING:
    from potluck.engine.sharded import ShardedReplica
    from potluck.shard.sharded import Sharded


class NodeChanges(Changes):
    """What a window changed in a replica that is split: each rank has what it holds, and the first sends the parts."""

    def __init__(self, replica: "ShardedReplica", link: Link, client: NodeClient) -> None:
        model, sharded = replica.model, replica.sharded
        # Of one of which this rank has nothing, no numbers: a part has a device all the same.
        nothing = torch.empty(0, device=replica.device)
        super().__init__(
            model,
            find_blocks(model),
            own=lambda each: [run.parameter.data.view(-1) for _, run in sharded.held_of([each])] or [nothing],
        )
        held = [sharded.held_of(part) for part in self.planned]
        self.parts = client.collect_parts(self.described[: len(held)], held, self.described[len(held) :])
        self._link = link
        self._share = replica.on_parts_written

    def _whole(self, index: int, changed: Tensor) -> Tensor | None:
        return self.parts.collect(index, changed)

    def _of_replica(self, squares: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self._link.gather_rows(squares), strict=True)]

    def _on_written(self) -> None:
        self._share()


def held_numbers(sharded: "Sharded") -> dict[str, list[tuple[int, Tensor]]]:
    """By a parameter's name: what this rank holds of it, and where that begins. Of which it holds none, nothing."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for run in (*sharded.runs, *sharded.rest):
        for span, numbers in run.cut(run.parameter.data):
            found.setdefault(span.name, []).append((span.start, numbers))
    where = next((numbers.device for pieces in found.values() for _, numbers in pieces), torch.device("cpu"))
    for name, spec in sharded.split.items():
        found.setdefault(name, [(0, torch.empty(0, dtype=spec.dtype, device=where))])
    return found
