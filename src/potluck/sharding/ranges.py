"""Ranges: any numbers of any tensor that is kept in files, read straight to where they belong.

    with Ranges(files) as source:
        source.read_into(run_of_mine, "embed.weight", start=4096)

It reads what is asked for and nothing else, however the tensors were split when they were written.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.errors import CheckpointError
from potluck.sharding.stored import TensorFiles
from potluck.tensor_bytes import buffer

BLOCK_BYTES = 16 << 20
"""Bytes that are in host memory at once on their way to a device."""
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "C128": torch.complex128,  # ours: safetensors has no name for it
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Ranges(TensorFiles):
    def spec(self, name: str) -> Spec:
        return Spec(self.tensors[name].shape, TYPES[self.tensors[name].dtype])

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: self.spec(name) for name in self.tensors}

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Numbers of a tensor as it would lie flat: [end - start], in host memory."""
        stop = self.tensors[name].size if end is None else end
        found = torch.empty(stop - start, dtype=self.spec(name).dtype)
        self.read_into(found, name, start)
        return found

    def tensor(self, name: str) -> Tensor:
        """A whole one, in its shape."""
        return self.read(name).reshape(self.spec(name).shape)

    __getitem__ = tensor

    @torch.no_grad()
    def read_into(self, out: Tensor, name: str, start: int = 0) -> None:
        """Fills `out`, flat and of the tensor's own type, with its numbers from `start` on; on any device."""
        dtype = self.spec(name).dtype
        if out.device.type == "cpu" and out.is_contiguous() and out.dtype == dtype:
            self.read_bytes(buffer(out), name, start)
            return
        step = max(1, BLOCK_BYTES // dtype.itemsize)
        for at in range(0, out.numel(), step):
            block = out[at : at + step]
            numbers = torch.empty(block.numel(), dtype=dtype)
            self.read_bytes(buffer(numbers), name, start + at)
            block.copy_(numbers)

    @torch.no_grad()
    def fill(self, tensor: Tensor, name: str) -> None:
        """A whole tensor of the same shape, wherever and however it lies."""
        if tensor.is_contiguous():
            self.read_into(tensor.detach().view(-1), name)
        else:
            tensor.copy_(self.tensor(name))


def type_name(tensor: Tensor) -> str:
    """Return the safetensors name of a tensor's dtype."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"Tensors of {tensor.dtype} have no place in a checkpoint.")
    return _NAMES[tensor.dtype]
