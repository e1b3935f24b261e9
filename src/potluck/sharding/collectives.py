"""The collectives that sharding uses, each begun and waited for later. The one place that knows torch's versions.

Between ranks of Gloo, a reduce to each owner and a broadcast from each owner take less than half the time of
reduce_scatter and all_gather, and take uneven ranges as they come. `lend` gives them to torch's fully_shard.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode

MOST_ON_THEIR_WAY = 2
"""Reductions of fully_shard: further ones wait for the first of them, so that gradients take no more memory."""


class Pending(Protocol):
    def wait(self) -> object: ...


class Done:
    """Work that has ended already, with a result or without."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def is_here(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._result


class Collectives:
    """Collectives over a process group, or over nobody."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        is_alone = not dist.is_available() or not dist.is_initialized()
        self.group = group
        self.rank = 0 if is_alone else dist.get_rank(group)
        self.world = 1 if is_alone else dist.get_world_size(group)
        self.coding: Coding | None = None
        """How gradients travel to their owners; none: as they are."""

    def start_reduce(self, tensor: Tensor, to: int) -> Pending:
        """Begin to sum `tensor` on rank `to` of the group; on the others it is of no use afterwards."""
        if self.coding is not None and self.world > 1:
            return _CodedReduction(self, self.coding, tensor, to)
        return self._start(dist.reduce, tensor, group_dst=to)

    def start_broadcast(self, tensor: Tensor, of: int) -> Pending:
        return self._start(dist.broadcast, tensor, group_src=of)

    def start_sum(self, tensor: Tensor) -> Pending:
        return self._start(dist.all_reduce, tensor)

    def _start(self, collective: Callable[..., Any], tensor: Tensor, **options: int) -> Pending:
        work = collective(tensor, group=self.group, async_op=True, **options) if self.world > 1 else None
        return Done() if work is None else work

    def maximum(self, tensor: Tensor) -> None:
        """Each number becomes the largest of all ranks'."""
        if self.world > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)


class _CodedReduction:
    """Each rank sends its numbers to their owner, coded; the owner adds up all of them, its own rounded too."""

    def __init__(self, over: Collectives, coding: Coding, tensor: Tensor, to: int) -> None:
        self._coding, self._tensor = coding, tensor
        self._coded = encode(coding, tensor)
        if tensor.is_cuda and not is_nccl(over.group, tensor.device):
            self._coded = self._coded.cpu()
        self._heard = [torch.empty_like(self._coded) for _ in range(over.world)] if over.rank == to else []
        self._work = dist.gather(self._coded, self._heard or None, group=over.group, group_dst=to, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._heard:
                add_up(self._coding, self._heard, self._tensor)


def add_up(coding: Coding, heard: Sequence[Tensor], out: Tensor) -> Tensor:
    """Decode and add what each rank has sent, in order of rank, so that the sum has the same bits on every rank."""
    flat = out.view(-1)
    total = flat if flat.dtype is torch.float32 else torch.empty(len(flat), device=out.device)  # sums are of float32
    decode(coding, heard[0].to(out.device), total)
    term = torch.empty_like(total)
    for each in heard[1:]:
        total += decode(coding, each.to(out.device), term)
    return out if total is flat else out.copy_(total.view_as(out))


def is_nccl(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    whole = group or dist.group.WORLD
    return whole is not None and whole._get_backend(device).name() == "nccl"


# For fully_shard


class GlooCollectives:
    """Collectives that fully_shard uses instead of its own, between ranks of Gloo."""

    def __init__(self, over: Collectives) -> None:
        self.gather = _Gather()
        self.reduce = _Reduce(over)

    def arm(self, *, waits: bool) -> None:
        """Prepare for a backward. `waits`: a reduction is over when it returns, because what it gives is added to."""
        self.reduce.waits = waits

    def finish(self) -> None:
        self.reduce.finish()


def lend(module: FSDPModule, lent: GlooCollectives) -> None:
    module.set_custom_all_gather(lent.gather)
    module.set_custom_reduce_scatter(lent.reduce)


def local_part(tensor: Tensor) -> Tensor:
    """The memory of a split tensor that is here; to_local() would cost 30 microseconds for each."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sum_gradients(module: FSDPModule) -> None:
    """Sum gradients over the ranks, instead of taking their mean."""
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


class _Allocating:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Together(dist.Work):
    """Several pieces of work as one."""

    def __init__(self, parts: list[Pending]) -> None:
        super().__init__()
        self._parts = parts

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for part in self._parts:
            part.wait()
        self._parts = []
        return True


class _Gather(_Allocating, AllGather):
    """Gathers from each owner to all. Always under way when it returns: fully_shard waits where it needs the
    parameters."""

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
        return _Together([over.start_broadcast(piece, owner) for owner, piece in enumerate(pieces)])


def _through_host(over: Collectives, output: Tensor, own: Tensor) -> None:
    """Gather from each owner to all GPUs through host memory: Gloo's own way there is not safe on streams other than
    the default one."""
    pieces = torch.empty(output.shape, dtype=output.dtype).view(over.world, -1)
    pieces[over.rank].copy_(own)
    for work in [over.start_broadcast(piece, owner) for owner, piece in enumerate(pieces)]:
        work.wait()
    output.copy_(pieces.view(-1))


class _Reduce(_Allocating, ReduceScatter):
    """Reduces from all ranks to each owner."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self.waits = True
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
        works = [over.start_reduce(piece, owner) for owner, piece in enumerate(pieces)]
        is_mean = op == dist.ReduceOp.AVG

        def end() -> None:
            for work in works:
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


class CodedScatter(_Allocating, ReduceScatter):
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
