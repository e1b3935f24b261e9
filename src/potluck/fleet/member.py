"""Member: a worker's side of the protocol, the mirror of the coordinator. A message or a local event in, effects out.

It knows where this worker stands with its host: whether it is in, what it was asked for, what the host still owes it.
What a step computes, where weights lie, how bytes travel and what time it is are up to its driver, member_driver.py.
Several ranks that are one worker each drive a Member of their own with the same messages, so nothing here may depend on
`now` but how long to wait.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from potluck.agree.records import Position
from potluck.errors import ConfigError, Diverged, PotluckError
from potluck.fleet.file_stream import stream_files
from potluck.fleet.member_asks import MemberEvaluation, MemberGathering
from potluck.fleet.member_effects import (
    Apply,
    Compute,
    DropState,
    Fail,
    Load,
    LookAt,
    MemberEffect,
    ReceiveState,
    Rejoin,
    Say,
    SendToHost,
    ServeState,
    SkipAverages,
    StandAt,
    TakeChunk,
    TellApplied,
)
from potluck.wire.messages import (
    FOR_ALL,
    LET_GO,
    SAVE,
    STEPPED,
    Admitted,
    Committed,
    Evaluated,
    EvaluateRange,
    Gathered,
    Leave,
    Message,
    Ready,
    Refusal,
    Saved,
    SaveDue,
    Shutdown,
    StateBegin,
    StateChunk,
    StateRequest,
    Welcome,
    Work,
)
from potluck.wire.words import clean

BEAT_S = 0.2
"""How long to wait for a message before this worker looks whether somebody wants it to stop."""
DIVERGED = 4
"""A refusal's code: the loss or the weights are no numbers any more."""
DRIFTS, DRIFT_STEPS = 4, 40
"""A worker whose weights had to be replaced more often than DRIFTS times within DRIFT_STEPS steps ends."""
KEEP_FIRST_S, KEEP_EVERY_S = 10.0, 60.0
"""A loop of one's own has its run saved on the host after this long, and then about this often."""
KEEP_SHARE = 20
"""And not before this many times as long as the last save took."""


@dataclass
class ConnectionLost:
    """In place of a message: the connection is gone, and why."""

    why: str


class MemberPhase(Enum):
    AWAY = auto()
    """Nothing has been said over this connection, or there is none."""
    PRESENTING = auto()
    """The host was told what this worker has built and holds."""
    CATCHING_UP = auto()
    """The run's weights are on their way here."""
    IN = auto()
    LEAVING = auto()
    """The host knows that this worker goes, and may want its weights first."""
    OVER = auto()


class Member:
    def __init__(self) -> None:
        self.phase = MemberPhase.AWAY
        self.worker_id, self._first_id = 0, -1
        self.patience_s = 10.0
        self.version = 0
        """Agreements so far, which is what the host calls a step."""
        self.committed: Committed | None = None
        """The last one that was agreed on here."""
        self.work: Work | None = None
        """The work that the loop has to compute next."""
        self.turn = 0
        """Changes whenever what a loop waits for may never come: it has to look where the run stands now."""
        self.wants_stop = ""  # or why it is to leave
        self.left = False
        """This worker has left the run, which continues."""
        self.ends_for_all = False
        """The loop has found that the run ends where it is, though rows are left; all loops find so."""
        self.is_in = False
        """Since it joined, or joined again: the host has said that its weights are the run's, or has sent it those."""
        self.is_replaying = False
        """It has others' weights, and has computed nothing since."""
        self.evaluation: MemberEvaluation | None = None
        self.gathering: MemberGathering | None = None
        self._call = -1, -1
        """The last one: the step, and how many there were at that step before it."""
        self._loaded_at = -1
        """The version that this worker was given: the others were there at another time."""
        self.save_due = 0
        self.saved = self.unsaved = Saved(0, "", "")
        """The last checkpoint on the host's disk; the last that it could not write, and why."""
        self._later: deque[Work | Committed] = deque()
        """In the order in which they came, until the loop asks for them."""
        self._asked: list[StateRequest] = []
        self._transfer, self._left_bytes = -1, 0
        self._deadline, self._was_asked = 0.0, False
        self._due_at = self._kept_at = self._keeping_s = 0.0
        """When a save was asked for, when the host last had one, and how long that took."""
        self._drifts: list[int] = []
        """The steps at which this worker's weights were not the others'."""
        self._changed_at = -1
        """The version whose weights were last found changed. At two in a row, the loop itself changes them."""
        self._changes_itself = False
        self._is_damaged = False
        """They changed while no code of the loop ran, or are of a step that the run went back to before."""
        self._rows_seen = 0
        self._has_stepped = False
        """Its optimizer has stepped in a window that it has not seen agreed on."""

    @property
    def is_over(self) -> bool:
        return self.phase is MemberPhase.OVER

    @property
    def is_settled(self) -> bool:
        """Not on its way into the run, nor out of it: a loop may continue, or end."""
        return self.phase in (MemberPhase.IN, MemberPhase.OVER)

    @property
    def leads(self) -> bool:
        """Whether this worker is the one who speaks for all of them."""
        return self.committed is None or self.committed.leader == self.worker_id

    @property
    def has_more(self) -> bool:
        """Whether something has come that the loop has not asked for yet."""
        return bool(self._later)

    def wait_s(self, now: float) -> float:
        """How long to wait for the next message before nothing() is told."""
        return max(0.0, self._deadline - now) if self.phase is MemberPhase.LEAVING else BEAT_S

    # Joining

    def present(
        self, welcome: Welcome, description: str, digest: str, *, rows_seen: int, is_same: bool
    ) -> list[MemberEffect]:
        """Connected: says what this worker has built and holds. `rows_seen`: how many of the run are in its weights.
        `is_same`: they are those it last told of."""
        self.phase, self.is_in, self._rows_seen = MemberPhase.PRESENTING, False, rows_seen
        self.worker_id, self.patience_s = welcome.worker_id, welcome.patience_ms / 1000
        self._first_id = self.worker_id if self._first_id < 0 else self._first_id
        holds, said = self.version > 0, list[MemberEffect]()
        is_changed = self._is_damaged or (self._changed_at == self.version and not self._changes_itself)
        if holds and (is_changed or not is_same):
            digest = ""  # this host may not have heard the one that was told before
            said.append(Say("This worker's weights are not those of their last step any more; it gets them anew."))
        ready = Ready(description, self.version, digest, STEPPED if holds and self._has_stepped else int(holds))
        return [SkipAverages(self.version), *said, SendToHost(ready)]

    def lost(self, why: str) -> list[MemberEffect]:
        """The connection is gone: joins again, and continues from wherever the run stands then."""
        if self.phase in (MemberPhase.LEAVING, MemberPhase.OVER):
            self.end()
            return []
        dropped: list[MemberEffect] = [DropState()] if self.phase is MemberPhase.CATCHING_UP else []
        self.phase = MemberPhase.AWAY
        self._forget_work()
        self._asked.clear()
        self.turn += 1
        return [*dropped, Say(f"Lost the host ({why}); joining again."), Rejoin()]

    def _on_admitted(self, message: Admitted) -> list[MemberEffect]:
        match self.phase:
            case MemberPhase.CATCHING_UP:  # from somebody else, or from the disk, and maybe of an earlier step
                self._later.clear()
            case MemberPhase.IN if message.wait:
                return self._on_drift() or self._catch_up()
            case MemberPhase.PRESENTING if message.wait:
                return self._catch_up()
            case MemberPhase.PRESENTING:
                return self._come_in(message)
        return []

    def _come_in(self, admitted: Admitted) -> list[MemberEffect]:
        where = Position.from_wire(admitted.position)
        if 0 < self.version == where.version and where.rows_seen != self._rows_seen:
            return self._come_again()
        self.phase, self.is_in = MemberPhase.IN, True
        begins = not self.version and admitted.step == where.version
        effects: list[MemberEffect] = [StandAt(where)] if begins else []
        if self.saved.step < self.save_due:  # the answer may have been lost with the connection
            effects.append(SendToHost(SaveDue(self.save_due, 2)))
        return effects + self._ask_again()

    def _come_again(self) -> list[MemberEffect]:
        """The run went back while this worker was away, and a window that took this one's number is over other rows.
        Nobody has told the host its digest yet."""
        self._is_damaged = True
        return self.lost("its run has other rows in its weights by now")

    def _ask_again(self) -> list[MemberEffect]:
        """An evaluation or a gathering that was under way begins anew, or is of weights that are no more."""
        again: list[MemberEffect] = []
        if (look := self.evaluation) is not None and look.is_under_way:
            if look.step == self.version:
                again.append(look.ask())
            else:
                look.end()
        if (values := self.gathering) is not None and values.found is None:
            if values.step == self.version != self._loaded_at:
                again.append(values.ask())
            else:
                values.end()
        return again

    def _on_drift(self) -> list[MemberEffect]:
        """Weights that have drifted are sent anew; where they do so again and again, that mends nothing."""
        self._drifts = [step for step in self._drifts if step > self.version - DRIFT_STEPS] + [self.version]
        if len(self._drifts) <= DRIFTS:
            return []
        sentence = (
            f"This worker's weights have differed from the others' {len(self._drifts)} times in"
            f" {self.version - self._drifts[0] + 1} steps, so its loop does something else than theirs. Often it is"
            " a learning-rate scheduler that starts anew here: give it to prepare(..., scheduler=scheduler), which"
            " sends it to newcomers."
        )
        return [Fail(ConfigError, sentence)]

    def _catch_up(self) -> list[MemberEffect]:
        """The run's weights come from a worker that has them, or from the host's disk; the averages since then wait."""
        self.phase, self.is_in = MemberPhase.CATCHING_UP, False
        self._transfer = -1
        self._forget_work()
        return []

    def _forget_work(self) -> None:
        self.work = None
        self._later.clear()

    def _on_state(self, message: StateBegin | StateChunk) -> list[MemberEffect]:
        effects: list[MemberEffect]
        if isinstance(message, StateBegin):
            self._transfer = message.transfer
            self._left_bytes = sum(size for _, size in stream_files(message.header))
            effects = [ReceiveState(message.step, message.header)]
        elif message.transfer != self._transfer:
            return []
        else:
            self._left_bytes -= len(message.data)
            effects = [TakeChunk(message.data)]
        return effects if self._left_bytes > 0 else [*effects, Load()]

    def loaded(self, version: int, step: int) -> list[MemberEffect]:
        """The state is in the model. `step`: what a person calls it."""
        self.version = self._loaded_at = version
        self.saved = self.saved if self.saved.step <= version else Saved(0, "", "")  # the run may have gone back
        self.save_due = self.saved.step  # what was due before is of a state that this worker no longer has
        self._changed_at, self._is_damaged, self._has_stepped = -1, False, False
        self._later = deque(message for message in self._later if message.step > version)
        self.phase, self.is_in, self.is_replaying = MemberPhase.IN, True, True
        self.turn += 1
        told: list[MemberEffect] = [SkipAverages(version), Say(f"Got the weights of step {step}."), TellApplied()]
        return told + self._ask_again()

    # Messages

    def hear(self, now: float, message: Message) -> list[MemberEffect]:
        if self.phase is MemberPhase.LEAVING:
            return self._hear_at_the_end(now, message)
        match message:
            case Shutdown() | Refusal() if getattr(message, "code", LET_GO) == LET_GO:
                self.left |= isinstance(message, Refusal)
                dropped = self._drop_state()
                self.end()
                return dropped
            case Refusal():
                kind = Diverged if message.code == DIVERGED else PotluckError
                return [
                    *self._drop_state(),
                    Fail(ConfigError if self.phase is MemberPhase.PRESENTING else kind, message.sentence),
                ]
            case Admitted():
                self._kept_at = self._kept_at or now
                return self._on_admitted(message)
            case StateBegin() | StateChunk() if self.phase is MemberPhase.CATCHING_UP:
                return self._on_state(message)
            case Work() | Committed():
                self._later.append(message)
            case StateRequest() if self.phase is not MemberPhase.CATCHING_UP:
                self._asked.append(message)
                return self._serve() if self.phase is MemberPhase.IN else []
            case Saved():
                self._on_saved(now, message)
            case EvaluateRange() | Evaluated():
                return self._on_evaluation(message)
            case Gathered() if (found := self.gathering) is not None and found.found is None:
                if (message.step, message.call) == (found.step, found.call):
                    found.take(message)
        return []

    def nothing(self, now: float) -> list[MemberEffect]:
        """No message came within wait_s()."""
        if self.phase is MemberPhase.LEAVING:
            self.end()
        elif self.phase is MemberPhase.IN and self.wants_stop and self.work is None:
            return self.leave(now)
        return []

    def _drop_state(self) -> list[MemberEffect]:
        return [DropState()] if self.phase is MemberPhase.CATCHING_UP else []

    # Steps

    def take(self) -> list[MemberEffect]:
        """Return what the loop waits for, if it is here: a step to apply, or slices to compute. Requests are served
        first."""
        effects = self._serve()
        while self._later:
            message = self._later.popleft()
            is_next = message.step == self.version + 1
            if isinstance(message, Committed):
                if is_next:
                    return [*effects, Apply(message)]
            elif is_next:
                self.work = message
                return [*effects, Compute(message)]
        return effects

    def begin(self) -> Work | None:
        """Begin to compute the work that there is."""
        work, self.work = self.work, None
        if work is not None:
            self.is_replaying = False
            self._has_stepped |= work.batch > 0
        return work

    def agree(self, committed: Committed) -> None:
        self.committed, self.version, self.work = committed, committed.step, None
        self._has_stepped = False

    def changed(self, *, in_step: bool) -> list[MemberEffect]:
        """The weights are not what the host was told: a bit that flipped must not reach the others.

        `in_step`: nothing has run since the last look that may change them.
        """
        self._is_damaged |= in_step
        self._changes_itself |= self._changed_at == self.version - 1
        self._changed_at = self.version
        return [TellApplied()]

    # Evaluations

    def evaluate(self, rows: int, size: int) -> list[MemberEffect]:
        self.evaluation = MemberEvaluation(self.version, rows, size)
        return [self.evaluation.ask()]

    def looked(self, asked: LookAt, names: str, figures: Sequence[float], samples: float) -> list[MemberEffect]:
        """The sum of each figure, the loss first. `names`: as JSON; empty: there is only the loss."""
        assert self.evaluation is not None
        return [self.evaluation.ask(asked.start, asked.end, names, figures, samples)]

    def _on_evaluation(self, message: EvaluateRange | Evaluated) -> list[MemberEffect]:
        evaluation = self.evaluation
        if evaluation is None or not evaluation.is_under_way or message.step != evaluation.step:
            return []
        if isinstance(message, EvaluateRange):
            return [LookAt(message.start, message.end)]
        return evaluation.take(message)

    # Values of one's own

    def gather(self, data: bytes) -> list[MemberEffect]:
        """For all who are at this step. A worker that was given these weights has not been here with the others."""
        step, call = self._call
        self._call = self.version, call + 1 if step == self.version else 0
        self.gathering = MemberGathering(*self._call, self._first_id, data)
        if self.phase is MemberPhase.IN and not self.left and (not self.version or self.version != self._loaded_at):
            return [self.gathering.ask()]
        self.gathering.end()
        return []

    # Saving

    def save(self, now: float, keep_last: int) -> list[MemberEffect]:
        """One at a time: not while is_saving(), of the one who speaks for all."""
        self.save_due, self._due_at = self.version, now
        sent: list[MemberEffect] = [SendToHost(SaveDue(self.version, keep_last))]
        return [*sent, ServeState(SAVE)] if self.leads else sent

    def is_saving(self, *, until_kept: bool) -> bool:
        """Whether the host has not answered yet. `until_kept`: that it cannot write is no answer then."""
        answered = self.saved.step if until_kept else max(self.saved.step, self.unsaved.step)
        return not self.left and not self.is_over and answered < self.save_due

    def is_keep_due(self, now: float) -> bool:
        """A user's own loop need not think of saving: the host gets a checkpoint as often as that costs little.

        The worker that speaks for all decides; should it be lost, the host asks another.
        """
        every_s = max(KEEP_EVERY_S if self.saved.step else KEEP_FIRST_S, KEEP_SHARE * self._keeping_s)
        return self.leads and self.saved.step >= self.save_due and now - self._kept_at > every_s

    def _on_saved(self, now: float, message: Saved) -> None:
        if message.error:
            self.unsaved = message
            return
        self.saved, self._kept_at = message, now
        self._keeping_s = now - self._due_at if self._due_at else 0.0
        self._due_at = 0.0

    def _serve(self) -> list[MemberEffect]:
        """Requests for a state that this worker has by now."""
        due = [asked for asked in self._asked if asked.step <= self.version]
        self._asked = [asked for asked in self._asked if asked.step > self.version]
        return [ServeState(asked.transfer) for asked in due]

    # The end

    def leave(self, now: float) -> list[MemberEffect]:
        """After a step, or while there is nothing to do: nothing is computed again."""
        self.left = True
        return self._say_goodbye(now, Leave(0, self.wants_stop or "asked to stop"))

    def finish(self, now: float) -> list[MemberEffect]:
        """The loop is done; the run ends when all holders of its weights are."""
        return self._say_goodbye(now, Leave(FOR_ALL if self.ends_for_all else 1, "finished"))

    def _say_goodbye(self, now: float, leave: Leave) -> list[MemberEffect]:
        self.phase, self._deadline = MemberPhase.LEAVING, now + self.patience_s
        return [SendToHost(leave)]

    def _hear_at_the_end(self, now: float, message: Message) -> list[MemberEffect]:
        match message:
            case Shutdown():
                self.end()
            case StateRequest():
                self._asked.append(message)
                if not self._was_asked:  # it may be asked again and again, where the host cannot write
                    self._deadline, self._was_asked = now + 10 * self.patience_s, True
                return self._serve()
            case Saved() if message.error:
                self.unsaved = message
                return [Say(f"{message.error.removesuffix('.')}. It is tried again before this worker goes.")]
        return []

    def end(self) -> None:
        self.phase = MemberPhase.OVER
        self.turn += 1
        if self.evaluation is not None:
            self.evaluation.end()
        if self.gathering is not None:
            self.gathering.end()


def is_together(committed: Committed) -> bool:
    """Whether all took the step together, where others are windows; a worker may have been given nothing of it."""
    return bool(json.loads(committed.workers).get("together"))


def overflow_of(told: dict[str, Any]) -> str | None:
    """Why nobody applies a step in which a gradient had no room in fp16, and whose that was. None: all had room."""
    found = told.get("overflowed")
    names = ", ".join(clean(str(name)) for name in found) if isinstance(found, list) else ""
    return f"a gradient overflows in fp16{f' on {names}' if names else ''}" if found else None
