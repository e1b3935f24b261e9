"""What a window changed in a replica that several ranks of one machine hold between them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from potluck.engine.changes import Changes
from potluck.engine.node_client import NodeClient
from potluck.engine.node_parts import NodeParts, Stretch
from potluck.engine.slices import hash_sums, sums_of, sums_of_piece
from potluck.fleet.description import BUFFERS
from potluck.link.link import GroupLink
from potluck.shard.blocks import find_blocks

if TYPE_CHECKING:
    from potluck.engine.sharded import ShardedReplica
    from potluck.shard.sharded import Sharded


class NodeChanges(Changes):
    """What a window changed in a replica that is split: each rank has what it holds, and the first sends the parts."""

    def __init__(self, replica: "ShardedReplica", link: GroupLink, client: NodeClient) -> None:
        model, blocks = replica.model, find_blocks(replica.model)
        held = held_numbers(replica.sharded)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        super().__init__(model, blocks, own=lambda each: [numbers for _, numbers in held[names[id(each)]]])
        own = [_stretches([held[names[id(each)]] for each in part], part) for part in self.planned]
        own += [[(0, part.floats)] for part in self._buffers.parts]
        most = max(part.floats for part in self.described if part.component != BUFFERS)
        client.make_room(most)
        self.parts = NodeParts(link, self.described, own, lambda floats: torch.from_numpy(client.allocate(floats)))
        client.parts = self.parts
        self._link, self._client = link, client
        self._sharded, self._share = replica.sharded, replica.on_parts_written
        self._told = torch.zeros(0)
        """What a glance gave with the last digest."""

    def _whole(self, index: int, changed: Tensor) -> Tensor | None:
        self._client.flush()  # the part before lies where this one is put together
        return self.parts.collect(index, changed)

    def _of_replica(self, squares: list[float]) -> list[float]:
        return [sum(column) for column in zip(*self._link.gather_rows(squares), strict=True)]

    def _on_written(self) -> None:
        self._share()

    def hash_weights(self) -> tuple[str, Tensor]:
        """Of the whole replica, as of one that is not split: each rank adds what its numbers come to."""
        self._told = self._sums()
        return hash_sums([self._told]), self._told

    def glance(self) -> Tensor:
        # In the middle of a window what all began with is not laid out as the parameters are.
        return self._told if self.is_open else self._sums()

    def _sums(self) -> Tensor:
        sharded, sums = self._sharded, []
        held = held_numbers(sharded)
        for name, _ in sharded.model.named_parameters():
            size = math.prod(sharded.split[name].shape)
            pieces = [sums_of_piece(numbers, start, size).cpu() for start, numbers in held[name]]
            sums.append(torch.stack(pieces).sum(dim=0))
        told = torch.cat(sums)
        self._link.start_sum(told).wait()
        return torch.cat([told, *(sums_of(buffer).cpu() for buffer in self.agreed_buffers)])


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


def _stretches(held: Sequence[list[tuple[int, Tensor]]], parameters: Sequence[nn.Parameter]) -> list[Stretch]:
    """Where in a part of these parameters, end to end, the held numbers are."""
    found, at = [], 0
    for parameter, pieces in zip(parameters, held, strict=True):
        found += [(at + start, at + start + numbers.numel()) for start, numbers in pieces]
        at += parameter.numel()
    return found
