"""Tensors as their bytes, and bytes as tensors. Every type of number has bytes; many libraries know only some types."""

import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor


def raw(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, flat, where it lies: its own memory, or a copy's where its numbers do not lie one after
    another."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, without a copy where its numbers lie one after another."""
    return raw(tensor).numpy().data


def from_bytes(data: bytes) -> Tensor:
    """A copy, which may be written to: [number of bytes]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def join_bytes(parts: Sequence[bytes]) -> bytes:
    """Several as one, with how long each is before them."""
    return struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def split_bytes(data: bytes) -> list[bytes]:
    """The reverse. From outside: how many there are is checked against the bytes that there are."""
    count = struct.unpack_from("<I", data)[0] if len(data) >= 4 else -1
    if not 0 <= 4 * count <= len(data) - 4:
        raise ValueError(f"{len(data):,} bytes are not {count:,} parts")
    sizes = struct.unpack_from(f"<{count}I", data, 4)
    ends = list(itertools.accumulate(sizes, initial=4 + 4 * count))
    if ends[-1] != len(data):
        raise ValueError(f"{len(data):,} bytes are not parts of {ends[-1]:,}")
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def to_bytes(tensor: Tensor) -> bytes:
    """The reverse, of a tensor in host memory."""
    return bytes(buffer(tensor))
