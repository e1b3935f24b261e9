"""The norm of a gradient, right to its type: where float32 has no room for the squares, they are summed in float64."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROOM = (1e-15, 1e18)
"""Between these, squares of float32 neither overflow nor vanish, however many are added up."""
AT_ONCE = 1 << 22
"""Numbers that are in float64 at a time."""


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """In host memory. As torch.nn.utils.get_total_norm has it, at the same cost; and finite where every number is.

    Above 1.8e19 torch's own, and so clip_grad_norm_, is inf in float32, and a gradient of which each number is finite
    would count as one that is not. Of float64 it is what torch says: inf where squares have no room in float64.
    """
    norm = torch.nn.utils.get_total_norm(tensors).cpu()  # read off a GPU once: all who ask want it here
    if not tensors or ROOM[0] < norm.item() < ROOM[1]:
        return norm
    return torch.tensor(_norm_in_float64(tensors), dtype=torch.float64)


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Of each by itself, to the bit as total_norm() has them before it takes them together."""
    is_foreach = tensors[0].is_cuda
    found = torch._foreach_norm(list(tensors)) if is_foreach else [torch.linalg.vector_norm(t) for t in tensors]
    return torch.stack(list(found))


def _norm_in_float64(tensors: Sequence[Tensor]) -> float:
    pieces = [piece for tensor in tensors for piece in torch.split(tensor.detach().reshape(-1), AT_ONCE)]
    return math.sqrt(sum(float(piece.double().square().sum()) for piece in pieces))
