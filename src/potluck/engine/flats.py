"""FlatBuffer: some parameters' numbers end to end, in buffers of their own. Knows nothing of means or windows."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.engine.buckets import split_like
from potluck.sharding.runs import FlatRun

FLAT_BYTES = 32 << 20
"""The size of one buffer: while one of them travels, the next is filled."""


class FlatBuffer:
    """Holds some runs end to end between two agreements. Each buffer is [sum of the runs' sizes]."""

    def __init__(self, runs: Sequence[FlatRun], allocate: Callable[[int, Tensor], Tensor]) -> None:
        self.runs = runs
        self.tensors = [run.parameter.data for run in runs]
        self.sum = allocate(sum(tensor.numel() for tensor in self.tensors), self.tensors[0])
        """What leaves, weighted; over a link, the sum of all replicas' takes its place. Where changes travel, what all
        agreed on last lies here while the parameters are elsewhere."""

    def copy_to(self, flat: Tensor) -> Tensor:
        torch._foreach_copy_(split_like(flat, self.tensors), self.tensors)
        return flat

    def copy_from(self, flat: Tensor) -> None:
        torch._foreach_copy_(self.tensors, split_like(flat, self.tensors))

    def joined(self) -> Tensor:
        """The parameters as they are now; a copy."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors])


def pack(runs: Sequence[FlatRun]) -> list[FlatBuffer]:
    """Runs of one type after the other, in buffers of some size."""
    flats: list[FlatBuffer] = []
    for dtype in dict.fromkeys(run.parameter.dtype for run in runs):
        group: list[FlatRun] = []
        for run in (run for run in runs if run.parameter.dtype == dtype):
            if group and sum(other.parameter.nbytes for other in group) + run.parameter.nbytes > FLAT_BYTES:
                flats.append(FlatBuffer(group, _allocate))
                group = []
            group.append(run)
        flats.append(FlatBuffer(group, _allocate))
    return flats


def _allocate(total: int, like: Tensor) -> Tensor:
    half = like.dtype in (torch.float16, torch.bfloat16)  # their mean would lose digits
    return torch.empty(total, dtype=torch.float32 if half else like.dtype, device=like.device)
