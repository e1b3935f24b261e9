"""Channel: what the stages of one replica say to each other. Named tensors, whichever way they travel.

Every tensor is announced by a Header, which the receiver checks before it takes any memory. Knows no way to travel:
direct.py and datastore.py do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from potluck.errors import TheirProtocolError

LIMIT_BYTES = 1 << 34
"""No tensor between stages is larger; a header that says so is wrong."""
MAX_DIMENSIONS = 16

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
)
"""In the order in which headers count them: only ever add at the end."""

WHAT = ("activation", "gradient", "tied", "told")
"""An activation goes to the next stage and its gradient back; tied: a gradient that stages add up; told: bytes."""


@dataclass(frozen=True, slots=True)
class Label:
    """The name of one tensor of a run: equal on both sides, and used once."""

    step: int
    what: str
    source: int
    """The stage that sends it."""
    target: int
    micro: int = 0
    part: int = 0

    def __post_init__(self) -> None:
        assert self.what in WHAT, self.what
        assert min(self.step, self.source, self.target, self.micro, self.part) >= 0, self

    def __str__(self) -> str:
        return f"{self.what} {self.micro} of step {self.step} from stage {self.source} for stage {self.target}"


@dataclass(frozen=True, slots=True)
class Header:
    """What follows: shape and type, checked before anything is allocated."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Header":
        if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot travel between stages")
        return Header(tensor.dtype, tuple(tensor.shape))

    @staticmethod
    def read(code: int, shape: Sequence[int], label: Label) -> "Header":
        """From numbers that came from outside."""
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
        """In host memory."""
        return torch.empty(self.shape, dtype=self.dtype)


class Channel(Protocol):
    """One stage's end. Stages of one replica are numbered from 0; both sides use the same labels."""

    def expect(self, labels: Sequence[Label]) -> None:
        """What will be received, those of each source in the order in which it sends them: they may come early."""
        ...

    def send(self, label: Label, tensor: Tensor) -> None:
        """Begins to send. Nobody changes the tensor until flush() has returned."""
        ...

    def receive(self, label: Label) -> Tensor:
        """On the channel's device. Waits for it; WorkerLost names what is awaited, and from whom."""
        ...

    def flush(self) -> None:
        """Until all that was sent is out of our hands."""
        ...

    def close(self) -> None: ...
