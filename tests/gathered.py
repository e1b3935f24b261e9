"""Tensors that are split over ranks, as one process would have them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from potluck.sharding.sharded import Sharded


def home() -> torch.device:
    """Where engines train. Judges do too: dropout draws other numbers on a GPU than on a CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sharded_of(engine: Any) -> Sharded:
    """How this rank's part of a split model lies."""
    sharded = engine.run.prepared().sharded
    assert sharded is not None
    return sharded  # type: ignore[no-any-return]


def gathered(tensor: Tensor) -> Tensor:
    """On the CPU. All ranks that have a part of it call this.

    torch's own full_tensor() crashes between ranks of Gloo that share a GPU (2.11).
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().clone()
    mesh = tensor.device_mesh
    parts: list[Any] = [None] * mesh.size(mesh.ndim - 1)
    dist.all_gather_object(parts, tensor.to_local().detach().cpu(), group=mesh.get_group(mesh.ndim - 1))
    whole = torch.cat(parts)
    assert whole.shape == tensor.shape
    return whole
