"""Every message of the published protocol, in the order of its declaration, which is its number on the wire.

A field's annotation says how it travels; the codecs know nothing else of a message. Floats are numpy's, since Python's
own would lose the payload of a NaN.
"""

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np
import numpy.typing as npt


class Kind(Enum):
    """How a field travels. Integers are unsigned and little-endian."""

    U8 = auto()
    U32 = auto()
    U64 = auto()  # also Rust's usize
    F32 = auto()
    STRING = auto()
    F32S = auto()
    U32S = auto()


U8 = Annotated[int, Kind.U8]
U32 = Annotated[int, Kind.U32]
U64 = Annotated[int, Kind.U64]
F32 = Annotated[np.float32, Kind.F32]
String = Annotated[str, Kind.STRING]
F32s = Annotated[npt.NDArray[np.float32], Kind.F32S]
U32s = Annotated[npt.NDArray[np.uint32], Kind.U32S]


@dataclass(frozen=True, eq=False)
class Message:
    """Two messages are equal when all their bits are, NaNs included."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _bits(getattr(self, field.name)) == _bits(getattr(other, field.name)) for field in fields(self)
        )

    def __hash__(self) -> int:
        return hash((type(self), *(_bits(getattr(self, field.name)) for field in fields(self))))


@dataclass(frozen=True, eq=False)
class JoinRequest(Message):
    """worker -> coordinator"""

    node_id: String
    gpu_count: U32
    backend: String


@dataclass(frozen=True, eq=False)
class JoinAccepted(Message):
    """coordinator -> worker"""

    worker_id: U32
    total_workers: U32


@dataclass(frozen=True, eq=False)
class ShardAssignment(Message):
    """coordinator -> worker: compute rows [shard_start, shard_end) of this step."""

    step: U64
    shard_start: U64
    shard_end: U64


@dataclass(frozen=True, eq=False)
class GradientPayload(Message):
    """worker -> coordinator"""

    step: U64
    worker_id: U32
    gradients: F32s
    loss: F32
    correct: U64
    total: U64


@dataclass(frozen=True, eq=False)
class AveragedGradient(Message):
    """coordinator -> worker"""

    step: U64
    gradients: F32s
    global_loss: F32


@dataclass(frozen=True, eq=False)
class Heartbeat(Message):
    """both ways"""

    node_id: String
    timestamp_ms: U64


@dataclass(frozen=True, eq=False)
class Shutdown(Message):
    """coordinator -> worker"""


@dataclass(frozen=True, eq=False)
class BlockGradientPayload(Message):
    """worker -> coordinator, after the backward of one block: its nine components, end to end."""

    step: U64
    worker_id: U32
    block_idx: U32
    num_blocks: U32
    gradients: F32s
    component_sizes: U32s


@dataclass(frozen=True, eq=False)
class AveragedBlockGradient(Message):
    """coordinator -> worker"""

    step: U64
    block_idx: U32
    gradients: F32s
    component_sizes: U32s


@dataclass(frozen=True, eq=False)
class NonBlockGradientPayload(Message):
    """worker -> coordinator. Components: 0 lm_head, 1 final_norm, 2 embedding."""

    step: U64
    worker_id: U32
    component: U8
    gradients: F32s


@dataclass(frozen=True, eq=False)
class AveragedNonBlockGradient(Message):
    """coordinator -> worker"""

    step: U64
    component: U8
    gradients: F32s


MESSAGES: tuple[type[Message], ...] = (
    JoinRequest,
    JoinAccepted,
    ShardAssignment,
    GradientPayload,
    AveragedGradient,
    Heartbeat,
    Shutdown,
    BlockGradientPayload,
    AveragedBlockGradient,
    NonBlockGradientPayload,
    AveragedNonBlockGradient,
)


def layout(message: type[Message]) -> tuple[tuple[str, Kind], ...]:
    """A message's fields in order of declaration, and how each travels."""
    return _LAYOUTS[message]


def _read_layout(message: type[Message]) -> tuple[tuple[str, Kind], ...]:
    hints = get_type_hints(message, include_extras=True)
    return tuple((field.name, get_args(hints[field.name])[1]) for field in fields(message))


# Read once: annotations are slow to resolve, and a step sends many messages.
_LAYOUTS = {message: _read_layout(message) for message in MESSAGES}


def _bits(value: Any) -> object:
    return value.tobytes() if isinstance(value, np.ndarray | np.float32) else value
