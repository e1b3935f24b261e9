"""The state that the coordinator's machines share: where the run stands, who is in, how a connection is closed. Pure.

Each machine has its own state beside this, and sees the others only through the calls that its constructor names.
A machine parts with a peer by close(), refuse() or shut(): through them the coordinator tells every other machine.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from potluck.agree.records import Position
from potluck.events import Stalled, WorkerCame
from potluck.fleet.description import Description
from potluck.fleet.effects import Close, Effect, Emit, Send
from potluck.fleet.membership import PAUSE, Membership, WorkerPhase, WorkerRecord, beat_s
from potluck.wire.messages import LET_GO, Refusal, Shutdown


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Knowledge that a coordinator takes over from the one that led this run before it."""

    standing: Position | None = None
    previous: Position | None = None
    """The position one step earlier."""
    description: Description | None = None
    next_id: int = 0
    """The id of the next worker: no id is used twice."""
    expected: int = 0
    """How many workers were in when it ended: they may come back."""
    agreed: dict[int, dict[str, str]] = field(default_factory=dict)
    """For each of the last steps, by kind, the digest of the right weights."""


class CoordinatorState:
    def __init__(self, patience_s: float, at_least: int, resumed: Resumed) -> None:
        described = resumed.description
        self.patience_s = patience_s
        self.at_least = at_least
        """The number of workers that the first step waits for."""
        self.clock = 0.0
        """The run's time at the last call from outside."""
        self._ran_at: float | None = None
        self._ticked_at: float | None = None
        self._stood_still_s = 0.0
        self._stood_from = 0.0, 0.0
        """When the host last stopped running, by this machine's clock and by the run's."""
        self.standing = resumed.standing or Position()
        """Where the run stands: what a restart resumes from."""
        self.previous = resumed.previous
        self.ahead: Position | None = None
        """After the step that is being computed again: it is on record, and somebody may have applied it."""
        self.skipped = 0
        """The last such step that counted as it is on record in the end, so that nobody sends its average; 0: none."""
        self.description = described
        self.membership = Membership(resumed.next_id)
        self.awake_since = -math.inf
        """When this host last came out of a pause: what its workers sent meanwhile may not have been read yet."""
        self.stopping = False
        self.paused = False
        """A person has paused the run: no other step begins."""
        self.finished: str | None = None
        self.refused: Counter[str] = Counter()
        """What was turned away, by kind."""
        self.rows_limit = described.rows_limit if described is not None else 0
        """Of all epochs, as the first who held the weights told it; 0: nobody knows."""
        self.expected = resumed.expected
        """How many may come back who hold the weights, while nobody here does."""
        self.leaders: dict[int, int] = {}
        """After each of the last steps, the worker that speaks for all."""
        self._speaker = -1
        """The worker that does so now."""
        self.steps: dict[int, int] = {}
        """After each of the last windows, how many batches of the run were done."""

    @property
    def described(self) -> Description:
        assert self.description is not None
        return self.description

    @property
    def latest(self) -> int:
        """The last step that anybody can have applied: also the one under way, if it is being computed again."""
        return self.ahead.version if self.ahead is not None else self.standing.version

    @property
    def is_complete(self) -> bool:
        """All rows of the run are in the weights, where it is known how many there are."""
        return 0 < self.rows_limit <= self.standing.rows_seen

    @property
    def steps_done(self) -> int:
        """Batches of the run. The standing's version counts agreements, and there may be several batches to one."""
        return self.standing.step

    def step_at(self, version: int) -> int:
        """The step, as people count them, at which the run stood after so many agreements. One that is under way is
        named for its first step."""
        if version >= self.standing.version:
            return self.steps_done + version - self.standing.version
        return self.steps.get(version, version)

    @property
    def steps_total(self) -> int:
        """Batches of the whole run; 0: nobody has said how long it is."""
        described = self.description
        return described.steps_at(*divmod(self.rows_limit, described.rows)) if described is not None else 0

    def name_speaker(self) -> int:
        """Return the id of the worker that speaks for all: the first who came, for as long as it is in; then another.
        0: nobody can."""
        ids = [member.worker_id for member in self.membership.holders]
        if ids and self._speaker not in ids:
            self._speaker = ids[0]
        return self._speaker if ids else 0

    def count_others(self, newcomer: WorkerRecord) -> int:
        """How many are in, or on their way, before this one; 0 where it is the one that will speak for all. So only
        one of those who come before the first step prints as if it were alone."""
        others = [m for m in self.membership.inside if not m.plain and m is not newcomer]
        if not self.membership.holders and self._speaker not in [m.worker_id for m in others]:
            self._speaker = newcomer.worker_id
        return len(others) if self._speaker != newcomer.worker_id else 0

    def is_silent(self, member: WorkerRecord) -> bool:
        """Longer than it has ever been: it may be gone, or asleep. A plain peer sends no heartbeats to tell that by."""
        limit_s = self.patience_s / 2 if member.plain else member.lateness.silence_limit_s(self.clock, self.patience_s)
        has_read = self.clock - self.awake_since > PAUSE * beat_s(self.patience_s)
        return has_read and member.silent_s(self.clock) > limit_s

    def pass_time(self, now: float) -> float:
        """Return the run's time. It stands still while this host does not run (a stopped process, a sleeping laptop, a
        hung disk): nobody could be heard meanwhile, and no deadline may be over for that. A host that runs calls this
        at every tick."""
        gap = now - self._ran_at if self._ran_at is not None else 0.0
        self._ran_at = now
        if gap > self.patience_s / 4:
            self._stood_from = now - gap, self.own_time(now - gap)
            self._stood_still_s += gap
        return self.own_time(now)

    def note_tick(self) -> None:
        """A tick that comes late says that this host did not run for a time. Nobody is judged by their silence before
        what has come meanwhile is read."""
        before, self._ticked_at = self._ticked_at, self._ran_at
        if (
            before is not None
            and self._ticked_at is not None
            and self._ticked_at - before > PAUSE * beat_s(self.patience_s)
        ):
            self.awake_since = self.clock

    def own_time(self, now: float) -> float:
        """Convert a time of this machine's clock to the run's; of before the host stopped last, too, when a worker may
        have been heard that was not asked about until now."""
        stopped, at = self._stood_from
        return max(now - self._stood_still_s, at - max(0.0, stopped - now))

    def skip_ahead(self) -> None:
        """The step that was being computed again counts as it is on record."""
        if self.ahead is not None:
            self.skipped = self.ahead.version
            self.previous, self.standing, self.ahead = self.standing, self.ahead, None

    def came(self, member: WorkerRecord) -> Emit:
        member.has_come = True
        return Emit(
            WorkerCame(
                worker=member.worker_id,
                name=member.name,
                kind=member.kind,
                step=self.step_at(member.applied),
                workers=len(self.membership.ready),
            )
        )

    # Parting with a peer

    def on_closed(self, peer: int, why: str) -> list[Effect]:
        """The connection is gone, whichever end closed it: the coordinator tells every machine."""
        raise NotImplementedError

    def close(self, peer: int, why: str, *, is_silent: bool = False) -> list[Effect]:
        if (member := self.membership.members.get(peer)) is not None:
            member.goodbye = ""  # it does not go for the reason that it gave
        return [Close(peer, why, is_silent), *self.on_closed(peer, why)]

    def refuse(self, peer: int, kind: str, sentence: str, code: int = 1) -> list[Effect]:
        """Refuses a peer. Without a sentence it hears nothing at all."""
        self.refused[kind] += 1
        if (member := self.membership.members.get(peer)) is not None:
            member.is_refused = bool(sentence)
        told: list[Effect] = [Send(peer, Refusal(code, sentence))] if sentence else []
        return [*told, *self.close(peer, sentence or kind)]

    def shut(self, member: WorkerRecord) -> list[Effect]:
        """Sends Shutdown: the run is over for this worker, which has `patience` to go.

        One that still builds its model has nothing to hand over, and may not listen for long: it is not waited for."""
        member.leaving = True
        member.shut_at = self.clock if member.shut_at is None else member.shut_at
        if member.let_go and not self.finished and not member.plain:
            sentence = "A person let this worker go. The run continues without it."
            return [Send(member.peer, Refusal(LET_GO, sentence))]
        told = [Send(member.peer, Shutdown()), *([Close(member.peer, "the run is over")] if member.plain else [])]
        if self.finished and not member.plain and member.phase is WorkerPhase.GREETED:
            return [*told, *self.close(member.peer, "the run was over before it had built its model")]
        return told


def stalled(member: WorkerRecord, doing: str, seconds: float = 0.0, *, then: str = "", stack: str = "") -> Emit:
    """Tell people that the others wait for this worker, or cannot use what it sent."""
    return Emit(
        Stalled(worker=member.worker_id, name=member.name, doing=doing, seconds=seconds, then=then, stack=stack)
    )


def exact_sum(figures: Iterable[float]) -> float:
    """The exact sum, independent of order; NaN where there is none."""
    try:
        return math.fsum(figures)
    except (OverflowError, ValueError):  # inf - inf
        return math.nan
