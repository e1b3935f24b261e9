"""What a Member decides, as things to do: whoever drives it does them, in their order. Pure."""

from dataclasses import dataclass

from potluck.errors import PotluckError
from potluck.wire.messages import Committed, Message, Work


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Say:
    """To the person who started this worker."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Fail:
    """This worker ends."""

    kind: type[PotluckError]
    sentence: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The connection is lost: what was computed is of no use. Connect again, then present()."""


@dataclass(frozen=True, slots=True)
class StandAt:
    """The run begins here, with the weights that this worker has built."""

    epoch: int
    row: int


@dataclass(frozen=True, slots=True)
class SkipAverages:
    """Up to this step they are in the weights."""

    step: int


@dataclass(frozen=True, slots=True)
class ReceiveState:
    """A state begins to arrive, in place of whatever has arrived of another."""

    step: int
    header: str


@dataclass(frozen=True, slots=True)
class TakeChunk:
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Load:
    """The state is here: put it into the model, then loaded()."""


@dataclass(frozen=True, slots=True)
class DropState:
    """The rest of it will not come."""


@dataclass(frozen=True, slots=True)
class ServeState:
    """Copy the state as it is now, and send it."""

    transfer: int


@dataclass(frozen=True, slots=True)
class TellApplied:
    """Hash the weights, and tell the host what they came to."""

    norm: float = 0.0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class LookAt:
    """Evaluate these rows, then looked()."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Compute:
    """These slices, or this window; then take() again."""

    work: Work


@dataclass(frozen=True, slots=True)
class DropAhead:
    """What was computed ahead is of no use: nothing of it has been sent, and nothing will be."""


@dataclass(frozen=True, slots=True)
class Apply:
    """The averages of this step, once all of them are here, after agree()."""

    committed: Committed


Effect = (
    Send
    | Say
    | Fail
    | Rejoin
    | StandAt
    | SkipAverages
    | ReceiveState
    | TakeChunk
    | Load
    | DropState
    | ServeState
    | TellApplied
    | LookAt
    | Compute
    | DropAhead
    | Apply
)
