"""The collectives that torch's fully_shard is given: GlooGather, GlooReduce, and CodedScatter.

Beside collectives.py, since fully_shard takes long to load, and most runs do without it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import DTensor

from potluck.coded_tensors import encode
from potluck.sharding.collectives import Collectives, add_up

MOST_ON_THEIR_WAY = 2
"""Reductions of fully_shard: further ones wait for the first of them, so that gradients take no more memory."""


def local_part(tensor: Tensor) -> Tensor:
    """The memory of a split tensor that is here; to_local() would cost 30 microseconds for each."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sum_gradients(module: FSDPModule) -> None:
    """Sum gradients over the ranks, instead of taking their mean."""
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


class GlooGather(DefaultAllocMixin, AllGather):
    """Gathers from each owner to all, between ranks of Gloo. Always under way when it returns: fully_shard waits where
    it needs the parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        over = Collectives(group)
        if output_tensor.is_cuda:
            _through_host(over, output_tensor, input_tensor)
            return None
        pieces = output_tensor.view(over.world, -1)
        if input_tensor.data_ptr() != pieces[over.rank].data_ptr():
            pieces[over.rank].copy_(input_tensor)
        return over.start_broadcasts(enumerate(pieces))


def _through_host(over: Collectives, output: Tensor, own: Tensor) -> None:
    """Gather from each owner to all GPUs through host memory: Gloo's own way there is not safe on streams other than
    the default one."""
    pieces = torch.empty(output.shape, dtype=output.dtype).view(over.world, -1)
    pieces[over.rank].copy_(own)
    over.start_broadcasts(enumerate(pieces)).wait()
    output.copy_(pieces.view(-1))


class GlooReduce(DefaultAllocMixin, ReduceScatter):
    """Reduces from all ranks to each owner, between ranks of Gloo."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self.waits = True
        """Whether a reduction is over when it returns, because what it gives is added to."""
        self._pending: list[Callable[[], None]] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        over = Collectives(group)
        over.coding = self._ranks.coding
        pieces = input_tensor.cpu().view(over.world, -1)
        work = over.start_reduces(enumerate(pieces))
        is_mean = op == dist.ReduceOp.AVG

        def end() -> None:
            work.wait()
            output_tensor.copy_(pieces[over.rank])
            if is_mean:
                output_tensor.div_(over.world)

        self._pending.append(end)
        while len(self._pending) > (0 if self.waits else MOST_ON_THEIR_WAY):
            self._pending.pop(0)()
        return None

    def finish(self) -> None:
        while self._pending:
            self._pending.pop(0)()


class CodedScatter(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatter coded gradients where torch's own collectives run: they are put on a stream, in an order that all
    ranks share."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        coding, world = self._ranks.coding, dist.get_world_size(group)
        if coding is None:
            work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
            return work
        coded = torch.stack([encode(coding, piece) for piece in input_tensor.view(world, -1)])
        heard = torch.empty_like(coded)
        dist.all_to_all_single(heard.view(-1), coded.view(-1), group=group)
        add_up(coding, list(heard), output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(world)
        return None
