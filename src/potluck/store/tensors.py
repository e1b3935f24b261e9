"""Tensors as the bytes of an object, and what the object says of them."""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.errors import TheirProtocolError
from potluck.store.place import LIMIT_BYTES

MAX_DIMENSIONS = 16


def start_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begins to copy it to host memory, if it is not there; the result is for another thread to call."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))

    def ready() -> Tensor:
        copied.synchronize()
        return host

    return ready


def about_of(tensor: Tensor) -> bytes:
    """Encode a tensor's dtype and shape, as its object carries them."""
    header = Header.of(tensor)
    return struct.pack(f"<B{len(header.shape)}Q", header.code, *header.shape)


DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""Dtypes in the order in which headers count them: only ever add at the end."""


@dataclass(frozen=True, slots=True)
class Header:
    """Shape and dtype of a tensor that follows, checked before anything is allocated."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Header":
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot travel between stages")
        return Header(tensor.dtype, tuple(tensor.shape))

    @staticmethod
    def read(code: int, shape: Sequence[int], label: object) -> "Header":
        """Make a header from numbers that came from outside."""
        if not 0 <= code < len(DTYPES):
            raise TheirProtocolError(f"The {label} has a type of number {code}, which we do not know.")
        if len(shape) > MAX_DIMENSIONS or any(not 0 <= size <= LIMIT_BYTES for size in shape):
            raise TheirProtocolError(
                f"The {label} has a shape that no tensor has: {list(shape)[: MAX_DIMENSIONS + 1]}."
            )
        header = Header(DTYPES[code], tuple(shape))
        if header.nbytes > LIMIT_BYTES:
            raise TheirProtocolError(f"The {label} has {header.nbytes:,} bytes, and {LIMIT_BYTES:,} is the most.")
        return header

    @property
    def code(self) -> int:
        return DTYPES.index(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Allocate the tensor in host memory."""
        return torch.empty(self.shape, dtype=self.dtype)
