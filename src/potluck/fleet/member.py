"""Member: a worker's side of the protocol, the mirror of the coordinator. Pure: what takes time is its holder's to do.

It knows where this worker stands with its host: whether it is in, what it was asked for, what the host still owes it.
All that a worker says to its host and hears from it passes through here. What a step computes, where weights lie, how
bytes travel and what time it is, its holder knows: engine/host_holder.py over a connection, tests/fleet/virtual on a
virtual clock. What may take long is a generator, which yields what it waits for. Several ranks that are one worker each
have a Member of their own, whose holder lets all of them hear the same, so nothing here may depend on the time but how
long to wait.
"""

import json
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from potluck.agree.records import Position
from potluck.errors import ConfigError, Diverged, PotluckError
from potluck.fleet.file_stream import stream_files
from potluck.fleet.holder import ConnectionLost, Holder, Waits
from potluck.fleet.member_asks import MemberEvaluation, MemberGathering, MemberSaves
from potluck.wire.messages import (
    DIVERGED,
    FOR_ALL,
    LET_GO,
    SAVE,
    STEPPED,
    Admitted,
    Committed,
    EndRun,
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
    Work,
)
from potluck.wire.words import clean

BEAT_S = 0.2
"""How long to wait for a message before this worker looks whether somebody wants it to stop."""
DRIFTS, DRIFT_STEPS = 4, 40
"""A worker whose weights had to be replaced more often than DRIFTS times within DRIFT_STEPS steps ends."""


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
    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.phase = MemberPhase.AWAY
        self.worker_id, self._first_id = 0, -1
        self.patience_s = 10.0
        self.has_joined = False
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
        self.finishes = False
        """The host has said that the run ends for all as if it were done, with the step under way."""
        self.is_in = False
        """Since it joined, or joined again: the host has said that its weights are the run's, or has sent it those."""
        self.is_replaying = False
        """It has others' weights, and has computed nothing since."""
        self.others = 0
        """How many others came before this worker; 0: it speaks for all, until the host names another."""
        self.evaluation: MemberEvaluation | None = None
        self.gathering: MemberGathering | None = None
        self._call = -1, -1
        """The last one: the step, and how many there were at that step before it."""
        self._loaded_at = -1
        """The version that this worker was given: the others were there at another time."""
        self.saves = MemberSaves()
        self._later: deque[Work | Committed] = deque()
        """In the order in which they came, until the loop asks for them."""
        self._asked: list[StateRequest] = []
        self._transfer, self._left_bytes = -1, 0
        self._deadline, self._was_asked = 0.0, False
        self._drifts: list[int] = []
        """The steps at which this worker's weights were not the others'."""
        self._changed_at = -1
        """The version whose weights were last found changed. At two in a row, the loop itself changes them."""
        self._changes_itself = False
        self._is_damaged = False
        """They changed while no code of the loop ran, or are of a step that the run went back to before."""
        self._moments: frozenset[int] = frozenset()
        """Parts that travel with windows alone."""
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

    # The pump

    def pump(self) -> Waits[bool]:
        """Handles one message, or its absence. Returns whether the run may stand elsewhere than before."""
        turn = self.turn
        yield from self._hear_next()
        yield from self._settle()
        return self.turn != turn

    def _settle(self) -> Waits[None]:
        """Waits until this worker is in the run, or out of it."""
        while not self.is_settled:
            yield from self._hear_next()
        if self.is_over:
            self._holder.stop()

    def _hear_next(self) -> Waits[None]:
        holder, is_leaving = self._holder, self.phase is MemberPhase.LEAVING
        heard = yield from holder.hear(max(0.0, self._deadline - holder.now()) if is_leaving else BEAT_S)
        if isinstance(heard, ConnectionLost):
            yield from holder.reach("lost", self.version)
            yield from self._join_again(heard.why)
        elif heard is not None:
            yield from self.hear(heard)
        elif is_leaving:
            self.end()
        elif self.phase is MemberPhase.IN and self.wants_stop and self.work is None:
            self._begin_to_leave()

    def hear(self, message: Message) -> Waits[None]:
        if isinstance(message, EndRun):
            self.finishes |= bool(message.finished)
            return
        if self.phase is MemberPhase.LEAVING:
            yield from self._hear_at_the_end(message)
            return
        match message:
            case Shutdown() | Refusal() if getattr(message, "code", LET_GO) == LET_GO:
                self.left |= isinstance(message, Refusal)
                self._drop_state()
                self.end()
            case Refusal():
                self._drop_state()
                if message.code == DIVERGED:
                    raise Diverged(message.sentence + self._holder.nonfinite_hint())
                raise (ConfigError if self.phase is MemberPhase.PRESENTING else PotluckError)(message.sentence)
            case Admitted():
                self.saves.kept_at = self.saves.kept_at or self._holder.now()
                yield from self._on_admitted(message)
            case StateBegin() | StateChunk() if self.phase is MemberPhase.CATCHING_UP:
                yield from self._on_state(message)
            case Work() | Committed():
                self._later.append(message)
            case StateRequest() if self.phase is not MemberPhase.CATCHING_UP:
                self._asked.append(message)
                if self.phase is MemberPhase.IN:
                    yield from self._serve()
            case Saved():
                self.saves.take(message, self._holder.now())
            case EvaluateRange() | Evaluated():
                yield from self._on_evaluation(message)
            case Gathered() if (found := self.gathering) is not None and found.found is None:
                if (message.step, message.call) == (found.step, found.call):
                    found.take(message)

    # Joining

    def join(self) -> Waits[None]:
        if not self.has_joined:
            self.has_joined = True
            yield from self._present()
            yield from self._settle()

    def _present(self) -> Waits[None]:
        """Connected: says what this worker has built and holds."""
        holder = self._holder
        yield from holder.reach("joined", self.version + 1)
        described, welcome = holder.describe(), holder.welcome()
        self._moments = described.moments
        is_same, digest = not holder.is_changed(), holder.digest()
        self.phase, self.is_in = MemberPhase.PRESENTING, False
        self.worker_id, self.patience_s = welcome.worker_id, welcome.patience_ms / 1000
        self._first_id = self.worker_id if self._first_id < 0 else self._first_id
        holder.pass_over_until(self.version)
        holds = self.version > 0
        is_damaged = self._is_damaged or (self._changed_at == self.version and not self._changes_itself)
        if holds and (is_damaged or not is_same):
            digest = ""  # this host may not have heard the one that was told before
            holder.say("This worker's weights are not those of their last step any more; it gets them anew.")
        holds_what = STEPPED if holds and self._has_stepped else int(holds)
        holder.send(Ready(described.to_json(), self.version, digest, holds_what))

    def _join_again(self, why: str) -> Waits[None]:
        """The connection is lost, and what was computed is of no use: this worker continues from wherever the run
        stands then."""
        if self.phase in (MemberPhase.LEAVING, MemberPhase.OVER):
            self.end()
            return
        holder = self._holder
        self._drop_state()
        self.phase = MemberPhase.AWAY
        self._forget_work()
        self._asked.clear()
        self.turn += 1
        holder.say(f"Lost the host ({why}); joining again.")
        holder.forget()
        yield from holder.connect()
        yield from self._present()

    def _on_admitted(self, message: Admitted) -> Waits[None]:
        self.others = Position.others_in(message.position)
        match self.phase:
            case MemberPhase.CATCHING_UP:  # from somebody else, or from the disk, and maybe of an earlier step
                self._later.clear()
            case MemberPhase.IN if message.wait:
                self._check_drift()
                self._catch_up()
            case MemberPhase.PRESENTING if message.wait:
                self._catch_up()
            case MemberPhase.PRESENTING:
                yield from self._come_in(message)

    def _come_in(self, admitted: Admitted) -> Waits[None]:
        holder, where = self._holder, Position.from_wire(admitted.position)
        if 0 < self.version == where.version and where.rows_seen != holder.rows_seen:
            # The run went back while this worker was away, and a window that took this one's number is over other
            # rows. Nobody has told the host its digest yet.
            self._is_damaged = True
            yield from self._join_again("its run has other rows in its weights by now")
            return
        self.phase, self.is_in = MemberPhase.IN, True
        if not self.version and admitted.step == where.version:  # the run begins, with what this worker has built
            holder.stand_at(where)
        if self.saves.is_under_way(until_kept=True):  # the answer may have been lost with the connection
            holder.send(SaveDue(self.saves.due, 2, int(self.saves.is_best)))
        self._ask_again()

    def _ask_again(self) -> None:
        """An evaluation or a gathering that was under way begins anew, or is of weights that are no more."""
        if (look := self.evaluation) is not None and look.is_under_way:
            if look.step == self.version:
                self._holder.send(look.ask())
            else:
                look.end()
        if (values := self.gathering) is not None and values.found is None:
            if values.step == self.version != self._loaded_at:
                self._holder.send(values.ask())
            else:
                values.end()

    def _check_drift(self) -> None:
        """Weights that have drifted are sent anew; where they do so again and again, that mends nothing."""
        self._drifts = [step for step in self._drifts if step > self.version - DRIFT_STEPS] + [self.version]
        if len(self._drifts) <= DRIFTS:
            return
        raise ConfigError(
            f"This worker's weights have differed from the others' {len(self._drifts)} times in"
            f" {self.version - self._drifts[0] + 1} steps, so its loop does something else than theirs. Often it is"
            " a learning-rate scheduler that starts anew here: give it to prepare(..., scheduler=scheduler), which"
            " sends it to newcomers."
        )

    def _catch_up(self) -> None:
        """The run's weights come from a worker that has them, or from the host's disk; the averages since then wait."""
        self.phase, self.is_in = MemberPhase.CATCHING_UP, False
        self._transfer = -1
        self._forget_work()

    def _forget_work(self) -> None:
        self.work = None
        self._later.clear()

    def _on_state(self, message: StateBegin | StateChunk) -> Waits[None]:
        holder = self._holder
        if isinstance(message, StateBegin):
            self._transfer = message.transfer
            self._left_bytes = sum(size for _, size in stream_files(message.header))
            holder.receive_state(message.step, message.header)
        elif message.transfer != self._transfer:
            return
        else:
            self._left_bytes -= len(message.data)
            yield from holder.take_chunk(message.data)
        if self._left_bytes <= 0:
            yield from self._load()

    def _load(self) -> Waits[None]:
        """Puts the state that is here into the model."""
        version, step = self._holder.load_state()  # the step: what a person calls it
        self.version = self._loaded_at = version
        self._call = -1, -1  # of a life that is over: those who take its steps with us count anew
        self.saves.forget_after(version)
        self._changed_at, self._is_damaged, self._has_stepped = -1, False, False
        self._later = deque(message for message in self._later if message.step > version)
        self.phase, self.is_in, self.is_replaying = MemberPhase.IN, True, True
        self.turn += 1
        self._holder.pass_over_until(version)
        self._holder.say(f"Got the weights of step {step}.")
        yield from self.tell_applied(0.0, "")
        self._ask_again()

    def _drop_state(self) -> None:
        """The rest of it will not come."""
        if self.phase is MemberPhase.CATCHING_UP:
            self._holder.drop_state()

    # Steps

    def await_step(self) -> Waits[tuple[Committed, Any] | None]:
        """Waits until a step is committed, and returns it with its means. None: there is work to do, or the run may
        stand elsewhere. Requests for a state are served first."""
        while True:
            yield from self._serve()
            while self._later:
                message = self._later.popleft()
                if message.step != self.version + 1:
                    continue
                if isinstance(message, Work):
                    self.work = message
                    return None
                without = self._moments if self._moments and is_together(message) else frozenset[int]()
                means = yield from self._holder.average(message.step, without)
                return (message, means) if means is not None else None
            if (yield from self.pump()):
                return None

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

    def check_weights(self, *, in_step: bool = False) -> None:
        """Tells the host if they are no longer what it was told: a bit that flipped must not reach the others.

        `in_step`: no code of the loop has run since the last look. It waits for nothing, since it is called from within
        a backward, too.
        """
        if self._holder.is_changed():
            self._is_damaged |= in_step
            self._changes_itself |= self._changed_at == self.version - 1
            self._changed_at = self.version
            self._tell_applied(0.0, "")

    def tell_applied(self, norm: float, fault: str) -> Waits[None]:
        yield from self._holder.reach("applied", self.version)
        self._tell_applied(norm, fault)
        yield from self._holder.reach("told", self.version)

    def _tell_applied(self, norm: float, fault: str) -> None:
        holder = self._holder
        holder.send(holder.applied_message(self.version, holder.digest(), norm, fault))

    # Evaluating, gathering

    def evaluate(self, rows: int, size: int) -> Waits[MemberEvaluation]:
        """Evaluates some rows in ranges that the host hands out; the result does not depend on who computes which."""
        self.evaluation = evaluation = MemberEvaluation(self.version, rows, size)
        self._holder.send(evaluation.ask())
        while evaluation.is_under_way:
            yield from self.pump()
        return evaluation

    def _on_evaluation(self, message: EvaluateRange | Evaluated) -> Waits[None]:
        evaluation = self.evaluation
        if evaluation is None or not evaluation.is_under_way or message.step != evaluation.step:
            return
        if isinstance(message, EvaluateRange):
            looked = yield from self._holder.look_at(message.start, message.end)
            self._holder.send(evaluation.ask(message.start, message.end, *looked))
        elif sentence := evaluation.take(message):
            self._holder.say(sentence)

    def gather(self, data: bytes) -> Waits[list[bytes]]:
        """This worker's bytes, and those of all who are at this step, in the same order on each of them. A worker that
        was given these weights has not been here with the others."""
        step, call = self._call
        self._call = self.version, call + 1 if step == self.version else 0
        self.gathering = gathering = MemberGathering(*self._call, self._first_id, data)
        if self.phase is MemberPhase.IN and not self.left and (not self.version or self.version != self._loaded_at):
            self._holder.send(gathering.ask())
        else:
            gathering.end()
        yield from self._holder.reach("gathering", self.version)
        while gathering.found is None:
            yield from self.pump()
        if gathering.fault:
            raise ConfigError(gathering.fault)
        return gathering.found

    # Saving

    def save(self, keep_last: int, *, is_best: bool = False) -> Waits[None]:
        holder = self._holder
        if self.leads:
            yield from self.await_saves(until_kept=False)  # one at a time
        leads = self.leads
        holder.send(self.saves.ask(self.version, keep_last, holder.now(), is_best=is_best))
        yield from holder.reach("save due", self.version)
        if leads:
            yield from holder.serve_state(SAVE, self.version)

    def await_saves(self, *, until_kept: bool, on_error: Callable[[str], None] = lambda error: None) -> Waits[None]:
        """Waits until the host has answered. `until_kept`: until it has the last checkpoint on its disk, however often
        it has to try; `on_error` hears why that failed."""
        last = ""
        saves = self.saves
        while not self.left and not self.is_over and saves.is_under_way(until_kept=until_kept):
            before = saves.failed
            yield from self.pump()
            error = saves.failed.error if saves.failed is not before else ""
            if error not in ("", last) and until_kept:
                last = error
                on_error(error)

    def is_keep_due(self) -> bool:
        """The worker that speaks for all decides; should it be lost, the host asks another."""
        return self.leads and self.saves.is_keep_due(self._holder.now())

    def _serve(self) -> Waits[None]:
        """Sends each state that was asked for and that this worker has by now."""
        due = [asked for asked in self._asked if asked.step <= self.version]
        self._asked = [asked for asked in self._asked if asked.step > self.version]
        for asked in due:
            yield from self._holder.serve_state(asked.transfer, self.version)

    # The end

    def leave_if_asked(self) -> Waits[bool]:
        """Before anything is begun: what this worker was given since is for the others."""
        is_asked = bool(self.wants_stop) and not self.is_over
        if is_asked:
            yield from self.leave()
        return is_asked

    def leave(self) -> Waits[None]:
        """After a step, or while there is nothing to do: nothing is computed again."""
        self._begin_to_leave()
        yield from self._settle()

    def _begin_to_leave(self) -> None:
        self.left = True
        self._say_goodbye(Leave(0, self.wants_stop or "asked to stop"))

    def end_run(self, *, finished: bool) -> None:
        """The loop wishes that the run ends for all with the step under way; `finished`: as if it were done."""
        if self.has_joined and self.is_settled and not self.is_over:
            self._holder.send(EndRun(int(finished)))

    def finish(self) -> Waits[None]:
        """The loop is done, and the host is told. The run ends when all holders of its weights are."""
        if self.has_joined and not self.is_over:
            self._say_goodbye(Leave(FOR_ALL if self.ends_for_all else 1, "finished"))
            while not self.is_over:
                yield from self._hear_next()

    def _say_goodbye(self, leave: Leave) -> None:
        # No longer: a host that has died, or hangs, must not keep this worker from ending.
        self.phase, self._deadline = MemberPhase.LEAVING, self._holder.now() + self.patience_s
        self._holder.send(leave)

    def _hear_at_the_end(self, message: Message) -> Waits[None]:
        match message:
            case Shutdown():
                self.end()
            case StateRequest():
                self._asked.append(message)
                if not self._was_asked:  # it may be asked again and again, where the host cannot write
                    self._deadline, self._was_asked = self._holder.now() + 10 * self.patience_s, True
                yield from self._serve()
            case Saved() if message.error:
                self.saves.failed = message
                self._holder.say(f"{message.error.removesuffix('.')}. It is tried again before this worker goes.")

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
