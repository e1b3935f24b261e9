"""Tensors as their bytes, and bytes as tensors. Every type of number has bytes; many libraries know only some types."""

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Tensor:
    """Its bytes, flat, where it lies: its own memory, or a copy's where its numbers do not lie one after another."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def buffer(tensor: Tensor) -> memoryview:
    """The same of a tensor in host memory."""
    return raw(tensor).numpy().data


def from_bytes(data: bytes) -> Tensor:
    """A copy, which may be written to: [number of bytes]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """The reverse, of a tensor in host memory."""
    return bytes(buffer(tensor))
