"""Every message, in the order of its declaration, which is its number on the wire: the published eleven, then ours.

A field's annotation says how it travels, and codecs know nothing else. Floats are numpy's: a NaN keeps its payload.
"""

import struct
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Annotated, Any, NamedTuple, dataclass_transform, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

PROTOCOL = 5
"""Version of our own messages: a Hello says which one its sender speaks."""
DIVERGED = 4
"""The code of a Refusal that ends the run: the loss or the weights are no numbers any more."""
TOO_SOON = 5
"""The code of a Refusal after which a worker waits, and comes again."""
LET_GO = 6
"""The code of a Refusal in place of Shutdown: the run continues without this worker, which a person let go."""
STEPPED = 2
"""Ready.holds of a worker whose optimizer has stepped by itself since the step whose weights it holds."""
FOR_ALL = 2
"""Leave.finished of a worker whose run ends where it is, though rows are left."""
SAVE = 0
"""The transfer that is a checkpoint for the host's disk; all others are for newcomers."""


class Kind(Enum):
    """How a field travels. Integers are unsigned and little-endian."""

    U8 = auto()
    U32 = auto()
    U64 = auto()  # also Rust's usize
    F32 = auto()
    STRING = auto()
    F32S = auto()
    U32S = auto()
    # Only in our own messages:
    F64 = auto()
    F64S = auto()
    BYTES = auto()
    CODED = auto()  # bytes too; they are read as they come, as gradients are

    __hash__ = object.__hash__  # Enum's own is a function of Python, and tables are asked for each field of a message


NAME, SENTENCE = 100, 1000
"""The most letters of each that people see."""
MOST_NAME = 255


class Letters(NamedTuple):
    """Bounds of a text."""

    most: int
    """A host refuses a longer one before anything of it is kept."""
    shown: int = 0
    """Letters that people see, of a text that is for people; 0: programs read it."""


U8 = Annotated[int, Kind.U8]
U32 = Annotated[int, Kind.U32]
U64 = Annotated[int, Kind.U64]
F32 = Annotated[np.float32, Kind.F32]
String = Annotated[str, Kind.STRING]
Name = Annotated[str, Kind.STRING, Letters(MOST_NAME, shown=NAME)]
Hash = Annotated[str, Kind.STRING, Letters(MOST_NAME)]
Sentence = Annotated[str, Kind.STRING, Letters(4096, shown=SENTENCE)]
F32s = Annotated[npt.NDArray[np.float32], Kind.F32S]
U32s = Annotated[npt.NDArray[np.uint32], Kind.U32S]
F64 = Annotated[float, Kind.F64]
F64s = Annotated[npt.NDArray[np.float64], Kind.F64S]
Bytes = Annotated[bytes | memoryview, Kind.BYTES]
Coded = Annotated[npt.NDArray[np.uint8], Kind.CODED]


@dataclass_transform(frozen_default=True, eq_default=False)
@dataclass(frozen=True, eq=False)
class Message:
    """Each class below it is a frozen dataclass. Two messages are equal when all their bits are, NaNs included."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _bits(getattr(self, field.name)) == _bits(getattr(other, field.name)) for field in fields(self)
        )

    def __hash__(self) -> int:
        return hash((type(self), *(_bits(getattr(self, field.name)) for field in fields(self))))


def later(default: Any) -> Any:
    """A last field that an older version does not know: it travels only where it is not its default."""
    return field(default=default, metadata={"later": True})


class JoinRequest(Message):
    """worker -> coordinator"""

    node_id: Name
    gpu_count: U32
    backend: Name


class JoinAccepted(Message):
    """coordinator -> worker"""

    worker_id: U32
    total_workers: U32


class ShardAssignment(Message):
    """coordinator -> worker: compute rows [shard_start, shard_end) of this step."""

    step: U64
    shard_start: U64
    shard_end: U64


class GradientPayload(Message):
    """worker -> coordinator"""

    step: U64
    worker_id: U32
    gradients: F32s
    loss: F32
    correct: U64
    total: U64


class AveragedGradient(Message):
    """coordinator -> worker"""

    step: U64
    gradients: F32s
    global_loss: F32


class Heartbeat(Message):
    """both ways"""

    node_id: Annotated[str, Kind.STRING, Letters(4096)]
    timestamp_ms: U64


class Shutdown(Message):
    """coordinator -> worker"""


class BlockGradientPayload(Message):
    """worker -> coordinator, after the backward of one block: its nine components, end to end."""

    step: U64
    worker_id: U32
    block_idx: U32
    num_blocks: U32
    gradients: F32s
    component_sizes: U32s


class AveragedBlockGradient(Message):
    """coordinator -> worker"""

    step: U64
    block_idx: U32
    gradients: F32s
    component_sizes: U32s


class NonBlockGradientPayload(Message):
    """worker -> coordinator. Components: 0 lm_head, 1 final_norm, 2 embedding."""

    step: U64
    worker_id: U32
    component: U8
    gradients: F32s


class AveragedNonBlockGradient(Message):
    """coordinator -> worker"""

    step: U64
    component: U8
    gradients: F32s


PUBLISHED: tuple[type[Message], ...] = tuple(Message.__subclasses__())

# Our own, from variant 11 on. They travel as bincode, and only to a peer that opened with Hello.


class Hello(Message):
    """worker -> coordinator, the first of all: who I am, and the secret of the invite."""

    protocol: U32
    secret: String
    name: Name
    kind: Annotated[str, Kind.STRING, Letters(MOST_NAME, shown=SENTENCE)]
    """Workers of one kind compute the same bits: device, processor, torch and threads."""


class Welcome(Message):
    """coordinator -> worker"""

    worker_id: U32
    patience_ms: U64
    recipe: String
    """Recipe that the host trains, as TOML; empty: bring your own script."""


class Refusal(Message):
    """coordinator -> worker, the last before the connection closes: why, as a sentence."""

    code: U32
    sentence: Sentence


class Ready(Message):
    """worker -> coordinator: I have built this model and this data, and hold the weights of this step."""

    description: String
    step: U64
    digest: Hash
    holds: U8
    """0: weights of my own making; 1: weights of this run; 2: those, and see STEPPED."""


class Admitted(Message):
    """coordinator -> worker: your weights are the run's (wait 0), or the run's will be sent to you (wait 1)."""

    step: U64
    wait: U8
    position: String
    """Where the run stands, as JSON."""


class Work(Message):
    """coordinator -> worker: compute these nodes of this step's tree of slices."""

    step: U64
    epoch: U64
    row: U64
    rows: U64
    """The whole step's: positions [row, row + rows) of the epoch's shuffled order."""
    slices: U32
    nodes: U32s
    """first, last + 1, first, last + 1, ..."""
    sizes: U32s = field(default_factory=lambda: np.zeros(0, "<u4"))
    """Rows of each slice, in order; empty: as even as can be."""
    batch: U32 = 0
    """Rows of each step that a worker takes by itself before it sends what they changed; 0: gradients are wanted."""


class SliceReport(Message):
    """worker -> coordinator, before the payloads of its nodes: what each slice came to."""

    step: U64
    slices: U32s
    samples: F64s
    loss_sums: F64s
    busy_s: F64
    used: Bytes
    """One bit per parameter: whether it got a gradient."""
    batches: U32 = 0
    """Steps that the worker took by itself."""
    buffers: Bytes = b""
    """In the first slice: what it changed in buffers that have no mean."""
    overflowed: U8 = 0
    """Whether a gradient had no room in fp16; zeros are sent in its place, and everybody skips the step."""
    stopped: U64 = 0
    """In a window of a worker that leaves: the row before which it has stopped; 0: all rows are done."""
    figures: Annotated[str, Kind.STRING, Letters(4096)] = later("")
    """In a window: what the policy asks for beside all this, as JSON; empty: nothing."""
    skipped: U32 = later(0)
    """In a window: steps of the worker's own that were not finite, and so were skipped."""


class Committed(Message):
    """coordinator -> worker, after the last average of the step: it is on record; apply it."""

    step: U64
    rows: U64
    samples: F64
    loss: F64
    used: Bytes
    leader: U32
    stop: U8
    workers: String
    """Who computed what, and the epoch's proof if it ends here, as JSON."""
    buffers: Bytes = b""
    """Changes of the first slice to buffers that have no mean: everybody has them after this step."""


class Applied(Message):
    """worker -> coordinator: my optimizer has stepped, and this is the hash of my parameters."""

    step: U64
    digest: Hash
    lr: F64
    norm: F64
    fault: Sentence
    """Why every worker skipped the step, if it did."""
    divergence: F64 = 0.0
    """How far its own parameters were from those that were agreed on, as a part of their norm."""


class Leave(Message):
    """worker -> coordinator. `finished` 1: I have done all I was to do; 2: so have all, though rows are left."""

    finished: U8
    reason: Sentence


class EvaluateNext(Message):
    """worker -> coordinator: a range of the validation rows, please; and what the one before it came to."""

    step: U64
    rows: U64
    size: U64
    start: U64
    end: U64
    """The range that was done; start == end: none yet."""
    loss_sum: F64
    samples: F64
    names: Annotated[str, Kind.STRING, Letters(1 << 13)] = ""
    """Names of all figures, the loss first, as JSON; empty: there is only the loss."""
    sums: F64s = field(default_factory=lambda: np.zeros(0, "<f8"))
    """Sums of the other figures, in the order of their names."""


class EvaluateRange(Message):
    """coordinator -> worker"""

    step: U64
    start: U64
    end: U64


class Evaluated(Message):
    """coordinator -> worker: every range is done."""

    step: U64
    loss_sum: F64
    samples: F64
    names: String = ""
    sums: F64s = field(default_factory=lambda: np.zeros(0, "<f8"))


class SaveDue(Message):
    """worker -> coordinator: the state after this step is to be kept."""

    step: U64
    keep_last: U32
    is_best: U8 = 0
    """The worker's loop has called it the best so far, perhaps after it was kept: its state says so since."""


class Saved(Message):
    """coordinator -> worker: it is on the host's disk, or `error` says why not."""

    step: U64
    folder: Sentence
    error: Sentence
    is_best: U8 = 0
    """It says that it is the best so far."""


class StateRequest(Message):
    """coordinator -> worker: send me your state as of the end of this step, or of a later one."""

    transfer: U64
    step: U64


class StateBegin(Message):
    """both ways: a parcel of files follows; header lists them as JSON. Transfer 0 is a save that nobody asked for."""

    transfer: U64
    step: U64
    header: Annotated[str, Kind.STRING, Letters(1 << 16)]
    """64 names and sizes are far shorter than a host takes."""
    is_best: U8 = 0
    """A save says that it is the best so far."""


class StateChunk(Message):
    """both ways"""

    transfer: U64
    data: Bytes


class StateMore(Message):
    """coordinator -> worker: this many more chunks may be on their way."""

    transfer: U64
    chunks: U32


class ShareMemory(Message):
    """both ways, between processes of one machine: a descriptor of memory comes with it, where numbers will lie."""


class PartAt(Message):
    """worker -> coordinator: a payload that lies in the worker's shared memory, from this byte on."""

    step: U64
    part: U32
    offset: U64


class AverageAt(Message):
    """coordinator -> worker: an average that lies in its place in the coordinator's shared memory."""

    step: U64
    part: U32


class CodedPart(Message):
    """worker -> coordinator, in place of a payload of floats: a part of a gradient, or of what a window changed."""

    step: U64
    part: U32
    coding: U8
    """1 bf16, 2 int8, 3 int4: the one that the run was described with."""
    numbers: Coded


class CodedAverage(Message):
    """coordinator -> worker"""

    step: U64
    part: U32
    coding: U8
    numbers: Coded


class SealKey(Message):
    """both ways, if both ends can: the sender's last message inside TLS. What it sends next is sealed with this key."""

    key: Bytes


class Gather(Message):
    """worker -> coordinator: a value of this worker's own, for all who are at this step."""

    step: U64
    call: U32
    """How many this worker gave at this step before."""
    first_id: U64
    """The first id that this worker was given: its last connection may not be known to be gone."""
    data: Bytes


class Gathered(Message):
    """coordinator -> worker: everybody's, in the order of their ids."""

    step: U64
    call: U32
    sizes: U32s
    """Size of each, in bytes; none: only your own."""
    data: Bytes
    fault: String
    """Why there is none, as a sentence."""


class BaseFiles(Message):
    """both ways, before Ready: which files has the base model? And name, bytes and SHA-256 of each, as JSON."""

    header: Annotated[str, Kind.STRING, Letters(0)]
    """A worker only asks."""


class BaseWanted(Message):
    """worker -> coordinator, before Ready: a piece of one of them, please."""

    file: U32
    """Its place in the list."""
    start: U64


class BasePiece(Message):
    """coordinator -> worker"""

    file: U32
    start: U64
    data: Bytes


class LookOn(Message):
    """watcher -> coordinator, the first of all: let me see the run, in which I take no part."""

    protocol: U32
    secret: Hash


class Watched(Message):
    """coordinator -> watcher: a piece of the run's events (`what` 0), or how things stand (1)."""

    what: U8
    data: Bytes


class Wrote(Message):
    """worker -> coordinator: what the model writes now, for people to read."""

    step: U64
    prompt: Annotated[str, Kind.STRING, Letters(1000)]
    text: Annotated[str, Kind.STRING, Letters(1000)]


class Using(Message):
    """worker -> coordinator: how much of its machine it uses now, for people to look at."""

    cores: F64
    of_cores: U32
    memory_bytes: U64
    of_memory_bytes: U64
    gpu: F64
    """Share of the time in which its cards were busy."""
    gpu_bytes: U64
    of_gpu_bytes: U64
    """0: it uses no GPU, or nobody can tell."""


class EndRun(Message):
    """both ways: the run ends for all with the step under way. `finished` 1: as if it were done; 0: to be resumed."""

    finished: U8


MESSAGES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
OURS = MESSAGES[len(PUBLISHED) :]


def layout(message: type[Message]) -> tuple[tuple[str, Kind], ...]:
    """A message's fields in order of declaration, and how each travels."""
    return _LAYOUTS[message]


# Read once: annotations are slow to resolve, and a step sends many messages.
_HINTS = {message: get_type_hints(message, include_extras=True) for message in MESSAGES}
_LAYOUTS = {
    message: tuple((each.name, get_args(_HINTS[message][each.name])[1]) for each in fields(message))
    for message in MESSAGES
}
LATER: dict[type[Message], dict[str, Any]] = {
    message: {each.name: each.default for each in fields(message) if each.metadata.get("later")} for message in MESSAGES
}
"""The fields of each message that may be left out at its end, each with its default."""
TEXTS = {
    message: {name: letters for name, hint in hints.items() for letters in get_args(hint)[2:]}
    for message, hints in _HINTS.items()
}
"""The bounded texts of each message."""


def _bits(value: Any) -> object:
    if isinstance(value, np.ndarray | np.float32):
        return value.tobytes()
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return struct.pack("<d", value) if isinstance(value, float) else value
