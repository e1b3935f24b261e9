"""Effects of a Member: its decisions, as things that its driver does in their order. Pure."""

from potluck.agree.records import Position
from potluck.errors import PotluckError
from potluck.fleet import effects
from potluck.wire.messages import Committed, Message, Work


class MemberEffect(effects.Effect):
    """Each is one of the classes below."""


class SendToHost(MemberEffect):
    message: Message


class Say(MemberEffect):
    """To the person who started this worker."""

    sentence: str


class Fail(MemberEffect):
    """This worker ends."""

    kind: type[PotluckError]
    sentence: str


class Rejoin(MemberEffect):
    """The connection is lost: what was computed is of no use. Connect again, then present()."""


class StandAt(MemberEffect):
    """The run begins here, with the weights that this worker has built."""

    position: Position


class SkipAverages(MemberEffect):
    """Up to this step they are in the weights."""

    step: int


class ReceiveState(MemberEffect):
    """A state begins to arrive, in place of whatever has arrived of another."""

    step: int
    header: str


class TakeChunk(MemberEffect):
    data: bytes | memoryview


class Load(MemberEffect):
    """The state is here: put it into the model, then loaded()."""


class DropState(MemberEffect):
    """The rest of it will not come."""


class ServeState(MemberEffect):
    """Copy the state as it is now, and send it."""

    transfer: int


class TellApplied(MemberEffect):
    """Hash the weights, and tell the host what they came to."""

    norm: float = 0.0
    fault: str = ""


class LookAt(MemberEffect):
    """Evaluate these rows, then looked()."""

    start: int
    end: int


class Compute(MemberEffect):
    """These slices, or this window; then take() again."""

    work: Work


class Apply(MemberEffect):
    """The averages of this step, once all of them are here, after agree()."""

    committed: Committed
