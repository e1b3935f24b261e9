"""What a Member decides, as things to do: whoever drives it does them, in their order. Pure."""

from potluck.errors import PotluckError
from potluck.fleet import effects
from potluck.wire.messages import Committed, Message, Work


class Effect(effects.Effect):
    """Each is one of the classes below."""


class Send(Effect):
    message: Message


class Say(Effect):
    """To the person who started this worker."""

    sentence: str


class Fail(Effect):
    """This worker ends."""

    kind: type[PotluckError]
    sentence: str


class Rejoin(Effect):
    """The connection is lost: what was computed is of no use. Connect again, then present()."""


class StandAt(Effect):
    """The run begins here, with the weights that this worker has built."""

    epoch: int
    row: int


class SkipAverages(Effect):
    """Up to this step they are in the weights."""

    step: int


class ReceiveState(Effect):
    """A state begins to arrive, in place of whatever has arrived of another."""

    step: int
    header: str


class TakeChunk(Effect):
    data: bytes | memoryview


class Load(Effect):
    """The state is here: put it into the model, then loaded()."""


class DropState(Effect):
    """The rest of it will not come."""


class ServeState(Effect):
    """Copy the state as it is now, and send it."""

    transfer: int


class TellApplied(Effect):
    """Hash the weights, and tell the host what they came to."""

    norm: float = 0.0
    fault: str = ""


class LookAt(Effect):
    """Evaluate these rows, then looked()."""

    start: int
    end: int


class Compute(Effect):
    """These slices, or this window; then take() again."""

    work: Work


class DropAhead(Effect):
    """What was computed ahead is of no use: nothing of it has been sent, and nothing will be."""


class Apply(Effect):
    """The averages of this step, once all of them are here, after agree()."""

    committed: Committed
