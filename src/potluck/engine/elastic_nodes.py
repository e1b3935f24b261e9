"""The engine of a worker of a host that is a node: several ranks of one machine hold its replica between them.

Every rank runs this engine, over a client that lets all of them hear the same (node_client.py). Within the node every
step is one that all ranks take together, each with its part of the batch; towards the host the node is one worker. What
a window changed leaves part by part (node_parts.py), and so do its means come back: no rank ever holds the whole
replica, nor its change. State for newcomers and checkpoints are written by all ranks, each its own part.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from potluck.engine.elastic_windows import ElasticWindowEngine
from potluck.engine.means import HostMean
from potluck.engine.node_client import NodeClient
from potluck.engine.node_mean import NodeMean
from potluck.engine.replica import Replica
from potluck.engine.slices import hash_sums, sums_of, sums_of_piece
from potluck.link.link import GroupLink
from potluck.save.split_saves import agree_on_aside, take_part
from potluck.save.together import Share, write_share, write_together


class NodeEngine(ElasticWindowEngine):
    client: NodeClient

    @property
    def _computers(self) -> int:
        return self.link.world

    def _make_mean(self, replica: Replica) -> HostMean:
        assert isinstance(self.link, GroupLink)
        self.client.on_stop = self._on_stop
        return NodeMean(self._send_part, self._sender.begin, self.link, self.client)

    def request_stop(self) -> None:
        """All ranks hear of it with what they hear next."""
        self.client.wants_stop = True

    def _on_stop(self) -> None:
        super().request_stop()

    def hash_weights(self) -> tuple[str, Tensor]:
        """Of the whole replica, as of one that is not split: each rank adds what its numbers come to."""
        sharded = self._sharded()
        held, agreed, sums = self._prepared().held(), self._delta.agreed(), []
        for name, _ in sharded.model.named_parameters():
            size = math.prod(sharded.split[name].shape)
            pieces = [
                sums_of_piece(agreed.get(id(run.parameter), run.parameter.data), run.spans[0].start, size).cpu()
                for run in held[name]
            ]
            sums.append(torch.stack(pieces).sum(dim=0))
        told = torch.cat(sums)
        self.link.start_sum(told).wait()
        told = torch.cat([told, *(sums_of(buffer).cpu() for buffer in self._delta.agreed_buffers)])
        return hash_sums([told]), told

    def glance(self) -> Tensor:
        # In the middle of a window what all began with is not laid out as the parameters are.
        return self.led.last_glance if not self._delta.is_agreed else self.hash_weights()[1]

    def start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        """Each rank its own part, into a folder that all of them see."""
        with self._delta.as_agreed():
            aside, _ = agree_on_aside(self.link, folder, self.step_number)
            share = Share(self.link.rank, self.link.world, aside)
            standing, kept = self._take_standing()
            snapshot = take_part(self._sharded(), standing, [], share, kept)
            self.led.check_weights()
        if share.rank:
            return lambda: write_share(share, snapshot)
        return lambda: write_together(folder, share, snapshot, lambda: self._is_over)
