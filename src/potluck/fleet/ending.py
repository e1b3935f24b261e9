"""When the run is over: because it is complete, because somebody stops it, or because nobody is left. Pure."""

from dataclasses import dataclass, field

from potluck.events import Noticed
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.effects import Effect, Emit, Finish, Send
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.gathering import Gatherings
from potluck.fleet.membership import WorkerRecord
from potluck.fleet.saving import Saving
from potluck.fleet.step_dispatcher import StepDispatcher
from potluck.fleet.weights import Weights
from potluck.wire.messages import FOR_ALL, EndRun, Leave


@dataclass
class Ending:
    run: CoordinatorState
    rounds: StepDispatcher
    saving: Saving
    evaluations: Evaluations
    gatherings: Gatherings
    weights: Weights
    over_at: int | None = field(default=None, init=False)
    """The step after which a worker said that the run is over."""
    over_since: float = field(default=0.0, init=False)

    finishes: bool = field(default=False, init=False)
    """A worker's script has ended the run: it stops, and counts as done."""

    def on_end_run(self, member: WorkerRecord, wish: EndRun) -> list[Effect]:
        """A script has come to an end for all: with the step under way, and all of it saved."""
        run = self.run
        if not member.is_ready or run.stopping or run.finished:
            return []
        self.finishes = bool(wish.finished)
        what = "ends" if self.finishes else "stops"
        told = Noticed(sentence=f"The script of {member.name} {what} the run for all, with the step under way.")
        return [Emit(told), *self._tell_of_end(), *self.request_stop()]

    def _tell_of_end(self) -> list[Effect]:
        """Workers whose loops have rows left end as if there were none."""
        there = [each.peer for each in self.run.membership.members.values() if not each.plain]
        return [Send(peer, EndRun(1)) for peer in there] if self.finishes else []

    def on_leave(self, member: WorkerRecord, leave: Leave) -> list[Effect]:
        """It goes, and others do at once what it was given since: it may have to stay, while its state is saved."""
        member.leaving, member.goodbye = True, leave.reason
        self.gatherings.give_back(member)
        effects = self.rounds.take_away(member) + self.evaluations.give_back(member) + self.gatherings.settle()
        effects += self.rounds.abandon_if_deserted() + self.weights.transfers.pass_over_leavers()
        return effects + self._part_with(member, leave)

    def _part_with(self, member: WorkerRecord, leave: Leave) -> list[Effect]:
        """That it has finished ends the run for all only once nobody else who holds the weights is at work."""
        run = self.run
        is_last = member.is_ready and member.applied >= run.standing.version
        if leave.finished == FOR_ALL and is_last and not run.is_complete and run.standing.rows_seen:
            run.rows_limit, self.finishes = run.standing.rows_seen, True
            return [*self.rounds.abandon(), *self._tell_of_end(), *self._part_with(member, leave)]
        # Of a run whose length nobody told, only the workers know.
        may_be_over = run.stopping or not run.rows_limit or run.is_complete
        if not (leave.finished and is_last and may_be_over):
            return self.saving.let_go(member)
        self.over_at, self.over_since = run.standing.version, run.clock
        if any(not m.leaving for m in run.membership.holders):
            return run.shut(member)
        return self._end()

    @property
    def _is_said_to_be_over(self) -> bool:
        """Whether a worker with the last step's weights said so, and has taken no other step since."""
        return self.over_at is not None and self.over_at >= self.run.standing.version

    def request_stop(self) -> list[Effect]:
        """The step under way is the last, and is saved."""
        self.run.stopping = True
        return self._interrupt() if self.rounds.now is None else []

    def _interrupt(self) -> list[Effect]:
        """Ends the run at once: there is no step under way to wait for."""
        told = self._end()
        return told if self.run.membership.holders else [*told, Finish(self.run.finished or "interrupted")]

    def _end(self) -> list[Effect]:
        run = self.run
        run.finished = run.finished or ("interrupted" if run.stopping and not self.finishes else "finished")
        return [effect for member in list(run.membership.members.values()) for effect in run.shut(member)]

    def on_gone(self) -> list[Effect]:
        run = self.run
        effects: list[Effect] = []
        if run.stopping and not run.finished and not run.membership.holders:
            effects += self._interrupt()
        if self._is_said_to_be_over and not run.finished and not run.membership.holders:
            effects += self._end()
        return effects + self.finish()

    def finish(self) -> list[Effect]:
        is_over = self.run.finished is not None and not self.run.membership.members
        return [Finish(self.run.finished or "")] if is_over else []

    def expire_slow(self) -> list[Effect]:
        """Closes workers that were told to go, or that have nothing left to do and do not say so."""
        run = self.run
        effects: list[Effect] = []
        for member in [m for m in run.membership.members.values() if m.shut_at is not None]:
            if run.clock - (member.shut_at or 0.0) > run.patience_s:
                why = f"the run is over for it, and it has not gone for {run.patience_s:g} s"
                effects += run.close(member.peer, why)
        self._end_without_them()
        if run.finished or not self._is_said_to_be_over or not (run.stopping or run.rows_limit):
            return effects
        if self.saving.is_under_way or self.evaluations.open or self.gatherings.open:
            self.over_since = run.clock
        elif run.clock - self.over_since > run.patience_s:
            effects += self._end()
        return effects

    def _end_without_them(self) -> None:
        """All is done and kept, and those who may come back to say so have not: they may have ended, and nobody else
        need come."""
        run = self.run
        is_done = run.is_complete and self.saving.is_last_kept
        if not run.finished and not run.membership.members and is_done and self.weights.has_waited_in_vain():
            run.finished = "finished"
