"""Effects: the coordinator's decisions, as things that the server does in their order, and that a test looks at.
Pure."""

from dataclasses import dataclass
from typing import Any, dataclass_transform

from potluck.events import Event
from potluck.fleet.description import Description
from potluck.fleet.tree import Node
from potluck.wire.messages import BaseFiles, BaseWanted, Message


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step, as the journal keeps it."""

    step: int
    epoch: int
    row: int
    rows: int
    rows_seen: int
    """Rows of all epochs, this step included."""
    samples: float
    loss: float
    workers: tuple[dict[str, Any], ...]
    ranges: tuple[tuple[int, int, int], ...]
    """(first row, last + 1, worker id)"""


@dataclass_transform(frozen_default=True)
class Effect:
    """Each is one of the classes below, a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Send(Effect):
    peer: int
    message: Message
    credit: tuple[int, int] | None = None
    """(peer, transfer) to be told StateMore once this has left."""


class Close(Effect):
    peer: int
    why: str
    is_silent: bool = False
    """It would not hear what is still to be sent."""


class Describe(Effect):
    """The run has been described: the sizes of its gradients above all."""

    description: Description
    is_new: bool = True
    """False: it was known, and only what a worker must bring alike is known better."""


class BeginStep(Effect):
    step: int
    slices: int
    nodes: int
    several: bool
    is_window: bool = False


class Widen(Effect):
    """Some worker will send several nodes of the step under way after all."""

    step: int


class Expect(Effect):
    """The peer will send these nodes: for each part in turn, each of them."""

    peer: int
    step: int
    nodes: tuple[Node, ...]
    weight: float = 1.0
    """The factor for its gradients: 1 but for a plain peer, which sends means."""


class Narrow(Effect):
    """The peer sends less than was asked for: of this node only its first part."""

    peer: int
    step: int
    node: Node
    done: Node


class Discard(Effect):
    """Drop whatever the peer still sends of this node."""

    peer: int
    node: Node


class SetScale(Effect):
    step: int
    scale: float
    loss: float


class AbandonStep(Effect): ...


class Subscribe(Effect):
    """The peer gets every average from this step on."""

    peer: int
    since: int


class Record(Effect):
    """Write a step to the disk before anything that follows is sent."""

    step: StepRecord


class Agreed(Effect):
    """The digest of the right weights after a step, of workers of a kind."""

    step: int
    kind: str
    digest: str


class Emit(Effect):
    event: Event


class StepApplied(Effect):
    """The first worker has applied a step: now all of it is known."""

    record: StepRecord
    lr: float
    norm: float
    fault: str


class SaveBegin(Effect):
    peer: int
    step: int
    header: str
    keep_last: int


class SaveChunk(Effect):
    peer: int
    data: bytes | memoryview


class SaveAbort(Effect): ...


class Restore(Effect):
    """Nobody holds the weights: go back to the newest checkpoint, then call restored()."""


class SendCheckpoint(Effect):
    """Send a newcomer the checkpoint that the run was restored from."""

    peer: int
    transfer: int


class SendBase(Effect):
    """Answer a worker that lacks the base model."""

    peer: int
    asked: BaseFiles | BaseWanted


class ShowTo(Effect):
    """The peer only watches: it is told all that happens, from the beginning."""

    peer: int


class Finish(Effect):
    """The run is over."""

    reason: str
    failed: bool = False
