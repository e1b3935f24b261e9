"""The engine of a worker of a host that is a node: several ranks of one machine hold its replica between them.

Every rank runs this engine, over a client that lets all of them hear the same (node_client.py). Within the node every
step is one that all ranks take together, each with its part of the batch; towards the host the node is one worker. What
a window changed leaves part by part (node_parts.py), and so do its means come back: no rank ever holds the whole
replica, nor its change. State for newcomers and checkpoints are written by all ranks, each its own part.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from potluck.engine.elastic_windows import Changes, ElasticWindowEngine
from potluck.engine.node_client import NodeClient
from potluck.engine.node_parts import NodeParts, Stretch
from potluck.engine.replica import Replica
from potluck.engine.slices import hash_sums, sums_of, sums_of_piece
from potluck.fleet.description import BUFFERS
from potluck.link.link import GroupLink, Link
from potluck.save.split_saves import agree_on_aside, take_part
from potluck.save.together import Share, write_share, write_together
from potluck.shard.blocks import find_blocks

if TYPE_CHECKING:
    from potluck.engine.sharded import ShardedReplica
    from potluck.shard.sharded import Sharded


class NodeChanges(Changes):
    """What a window changed in a replica that is split: each rank has what it holds, and the first sends the parts."""

    def __init__(self, replica: "ShardedReplica", link: Link, client: NodeClient) -> None:
        model, blocks = replica.model, find_blocks(replica.model)
        held = held_numbers(replica.sharded)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        super().__init__(model, blocks, own=lambda each: [numbers for _, numbers in held[names[id(each)]]])
        own = [_stretches([held[names[id(each)]] for each in part], part) for part in self.planned]
        own += [[(0, part.floats)] for part in self._buffers.parts]
        most = max(part.floats for part in self.described if part.component != BUFFERS)
        client.make_room(most)
        assert isinstance(link, GroupLink)
        self.parts = NodeParts(link, self.described, own, lambda floats: torch.from_numpy(client.allocate(floats)))
        self._link, self._client = link, client
        self._share = replica.on_parts_written

    def _whole(self, index: int, changed: Tensor) -> Tensor | None:
        self._client.flush()  # the part before lies where this one is put together
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


def _stretches(held: Sequence[list[tuple[int, Tensor]]], parameters: Sequence[nn.Parameter]) -> list[Stretch]:
    """Where in a part of these parameters, end to end, the held numbers are."""
    found, at = [], 0
    for parameter, pieces in zip(parameters, held, strict=True):
        found += [(at + start, at + start + numbers.numel()) for start, numbers in pieces]
        at += parameter.numel()
    return found


class NodeEngine(ElasticWindowEngine):
    client: NodeClient

    @property
    def _computers(self) -> int:
        return self.link.world

    def _make_changes(self, replica: Replica) -> Changes:
        assert hasattr(replica, "sharded")
        changes = NodeChanges(replica, self.link, self.client)  # type: ignore[arg-type]
        self.client.parts = changes.parts
        self.client.on_stop = self._on_stop
        return changes

    def request_stop(self) -> None:
        """All ranks hear of it with what they hear next."""
        self.client.wants_stop = True

    def _on_stop(self) -> None:
        super().request_stop()

    def hash_weights(self) -> tuple[str, Tensor]:
        """Of the whole replica, as of one that is not split: each rank adds what its numbers come to."""
        sharded = self._sharded()
        held, sums = held_numbers(sharded), []
        for name, _ in sharded.model.named_parameters():
            size = math.prod(sharded.split[name].shape)
            pieces = [sums_of_piece(numbers, start, size).cpu() for start, numbers in held[name]]
            sums.append(torch.stack(pieces).sum(dim=0))
        told = torch.cat(sums)
        self.link.start_sum(told).wait()
        told = torch.cat([told, *(sums_of(buffer).cpu() for buffer in self._changes.agreed_buffers)])
        return hash_sums([told]), told

    def glance(self) -> Tensor:
        # In the middle of a window what all began with is not laid out as the parameters are.
        return self.led.last_glance if self._changes.is_open else self.hash_weights()[1]

    def start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        """Each rank its own part, into a folder that all of them see."""
        with self._changes.as_agreed():
            aside, _ = agree_on_aside(self.link, folder, self.step_number)
            share = Share(self.link.rank, self.link.world, aside)
            standing, kept = self._take_standing()
            snapshot = take_part(self._sharded(), standing, [], share, kept)
            self.led.check_weights()
        if share.rank:
            return lambda: write_share(share, snapshot)
        return lambda: write_together(folder, share, snapshot, lambda: self._is_over)
