"""The collectives that sharding uses, each begun and waited for later. The one place that knows torch's versions.

Between ranks of Gloo, a reduce to each owner and a broadcast from each owner take less than half the time of
reduce_scatter and all_gather, and take uneven ranges as they come. fsdp_collectives.py has those of fully_shard.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode


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

    def start_reduces(self, parts: Iterable[tuple[int, Tensor]]) -> "_Together":
        """Begin to reduce several tensors, each to the rank that is with it."""
        return _Together([self.start_reduce(tensor, owner) for owner, tensor in parts])

    def start_broadcasts(self, parts: Iterable[tuple[int, Tensor]]) -> "_Together":
        """Begin to broadcast several tensors, each from the rank that is with it."""
        return _Together([self.start_broadcast(tensor, owner) for owner, tensor in parts])

    def sum(self, tensor: Tensor) -> None:
        self.start_sum(tensor).wait()

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
