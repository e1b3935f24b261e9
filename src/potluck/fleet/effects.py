"""What the coordinator decides, as things to do: the server does them, in their order; a test looks at them. Pure."""

from dataclasses import dataclass
from typing import Any

from potluck.events import Event
from potluck.fleet.description import Description
from potluck.fleet.tree import Node
from potluck.wire.messages import Message


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step, as the journal keeps it."""

    step: int
    epoch: int
    row: int
    rows: int
    rows_seen: int
    """Of all epochs, this step included."""
    samples: float
    loss: float
    workers: tuple[dict[str, Any], ...]
    ranges: tuple[tuple[int, int, int], ...]
    """(first row, last + 1, worker id)"""


class Effect:
    """Each is one of the classes below."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Send(Effect):
    peer: int
    message: Message
    credit: tuple[int, int] | None = None
    """(peer, transfer) to be told StateMore once this has left."""


@dataclass(frozen=True, slots=True)
class Close(Effect):
    peer: int
    why: str


@dataclass(frozen=True, slots=True)
class Describe(Effect):
    """The run is known now: its gradients' sizes above all."""

    description: Description
    is_new: bool = True
    """False: it was known, and only what a worker must bring alike is known better."""


@dataclass(frozen=True, slots=True)
class BeginStep(Effect):
    step: int
    slices: int
    nodes: int
    several: bool


@dataclass(frozen=True, slots=True)
class Widen(Effect):
    """Somebody sends several nodes of the step under way after all."""

    step: int


@dataclass(frozen=True, slots=True)
class Expect(Effect):
    """The peer will send these nodes: for each part in turn, each of them."""

    peer: int
    step: int
    nodes: tuple[Node, ...]
    weights: tuple[float, ...]
    """For each node, what its gradients are multiplied by: 1 but for a plain peer, which sends means."""


@dataclass(frozen=True, slots=True)
class Discard(Effect):
    """Whatever the peer still sends of this node is of no use."""

    peer: int
    node: Node


@dataclass(frozen=True, slots=True)
class SetScale(Effect):
    step: int
    scale: float
    loss: float


@dataclass(frozen=True, slots=True)
class AbandonStep(Effect):
    pass


@dataclass(frozen=True, slots=True)
class Subscribe(Effect):
    """The peer gets every average from this step on."""

    peer: int
    since: int


@dataclass(frozen=True, slots=True)
class Record(Effect):
    """To be on the disk before anything that follows it is sent."""

    step: StepRecord


@dataclass(frozen=True, slots=True)
class Agreed(Effect):
    """The digest of the right weights after a step, of workers of a kind."""

    step: int
    kind: str
    digest: str


@dataclass(frozen=True, slots=True)
class Emit(Effect):
    event: Event


@dataclass(frozen=True, slots=True)
class StepApplied(Effect):
    """The first worker has applied a step: now all of it is known."""

    record: StepRecord
    lr: float
    norm: float
    fault: str


@dataclass(frozen=True, slots=True)
class SaveBegin(Effect):
    peer: int
    step: int
    header: str
    keep_last: int


@dataclass(frozen=True, slots=True)
class SaveChunk(Effect):
    peer: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SaveAbort(Effect):
    pass


@dataclass(frozen=True, slots=True)
class Restore(Effect):
    """Nobody holds the weights: go back to the newest checkpoint and tell by restored()."""


@dataclass(frozen=True, slots=True)
class SendCheckpoint(Effect):
    """The checkpoint that the run was restored from, to a newcomer."""

    peer: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """The run is over."""

    reason: str
    failed: bool = False
