"""Workers that keep the others waiting: they are reported, and others do their work. Pure, and stateless."""

from dataclasses import dataclass

from potluck.fleet.coordinator_state import CoordinatorState, stalled
from potluck.fleet.effects import Effect, Emit
from potluck.fleet.membership import WorkerRecord, slices_of
from potluck.fleet.step_dispatcher import StepDispatcher

LONG = 4
"""A worker that takes this many times longer than expected is no longer waited for, where others have nothing to do."""


@dataclass
class Stragglers:
    run: CoordinatorState
    rounds: StepDispatcher

    def tell(self) -> list[Effect]:
        """Workers that keep the others waiting are named, each with what it is doing and for how long."""
        run = self.run
        effects: list[Effect] = []
        members = run.membership.members.values()
        late = [m for m in members if (m.nodes or m.evaluating) and not self._waits_for_others(m)]
        # What the others send is held back until it is wanted: those who are silent are waited for, or else those who
        # still compute.
        asleep = [m for m in late if run.is_silent(m)]
        for member in asleep or [m for m in late if m.is_computing] or late:
            is_silent = member in asleep
            seconds = member.silent_s(run.clock) if is_silent else run.clock - self._waited_since(member)
            least = run.patience_s / 2 if is_silent else run.patience_s
            if seconds > least and run.clock - member.warned_at > least:
                member.warned_at = run.clock
                effects.append(self._stalled(member, is_silent, seconds))
        return effects

    def _stalled(self, member: WorkerRecord, is_silent: bool, seconds: float, then: str = "") -> Emit:
        doing = f"{'silent while ' * is_silent}{member.doing(self.run.standing)}"
        return stalled(member, doing, seconds, then=then, stack=member.stack)

    def _waited_since(self, member: WorkerRecord) -> float:
        now = self.rounds.now
        if member.evaluating:
            return member.evaluating_since
        if now is None or not now.batch:
            return member.working_since
        # A window may be long: nobody is late before another is done.
        return max(member.working_since, now.first_report if now.first_report is not None else self.run.clock)

    def _waits_for_others(self, member: WorkerRecord) -> bool:
        """It has given a value of its own, and cannot begin its work before it has theirs."""
        return member.gathering is not None and not self.run.is_silent(member)

    def relieve(self) -> list[Effect]:
        """Give what a worker owes and does not deliver to those who have nothing left to do, before patience is over
        where it is silent. It stays in, and is given work again once it has applied the step."""
        under, holders = self.rounds.now, self.run.membership.holders
        if under is None:
            return []
        for member in [m for m in holders if self._owes(m) and self._delivers_nothing(m)]:
            able = [m for m in holders if m is not member and m.since <= under.step and not m.leaving]
            # Those who were relieved themselves have nothing to do either, and must not be relied on.
            if any(not (m.is_computing or m.is_relieved or self.run.is_silent(m)) for m in able):
                return self._relieve(under.step, member)  # one at a time: the next may have been given this one's part
            # Those who have applied the step, which is being computed again, continue once nobody is behind them.
            ahead = [m for m in holders if m.since > under.step and not (m.leaving or self.run.is_silent(m))]
            if self.run.ahead is not None and ahead:
                return self.run.close(
                    member.peer,
                    f"it computes nothing of step {self.run.step_at(under.step):,}, which others have applied",
                )
        return []

    def _owes(self, member: WorkerRecord) -> bool:
        """Others would have to compute: what has been reported is on its way, unless nothing is heard of it."""
        return member.is_computing or (bool(member.nodes) and self.run.is_silent(member))

    def part_with_silent(self, receivers: set[int]) -> list[Effect]:
        """Part with a silent worker that has not taken the averages of the step before, since it keeps this one from
        being finished: if another goes on. It gets the weights when it comes back: to keep averages for it would take
        memory without a bound."""
        run, effects = self.run, list[Effect]()
        for peer in sorted(receivers):
            member = run.membership.members.get(peer)
            if member is None or not run.is_silent(member):
                continue
            if any(m is not member and not run.is_silent(m) for m in run.membership.holders):
                run.membership.remember_silence(member)
                why = f"silent for {member.silent_s(run.clock):.1f} s, and the others waited for it to take averages"
                effects += run.close(peer, why, is_silent=True)
        return effects

    def _delivers_nothing(self, member: WorkerRecord) -> bool:
        """It is silent, or takes far longer than it should, though its heart beats."""
        if self.run.is_silent(member):
            return True
        if self._waits_for_others(member):
            return False
        patience_s, expected_s, under = self.run.patience_s, self._expected_s(member), self.rounds.now
        most_s = max(patience_s, LONG * (patience_s if expected_s is None else expected_s))
        since = self._waited_since(member)
        if under is not None and under.first_report is None and expected_s is not None:
            since = member.working_since  # it may be the only one in its window, which nobody else would end before it
        return self.run.clock - since > most_s

    def _expected_s(self, member: WorkerRecord) -> float | None:
        """How long its part of the step under way should take, by its own speed or that of the slowest other; none
        where nobody's is known yet: a first step may be slow."""
        known = [m.speed for m in self.run.membership.holders if m.speed]
        speed = member.speed or min(known, default=0.0)
        return self._amount(member) / speed if speed else None

    def _amount(self, member: WorkerRecord) -> float:
        """Count what it has yet to deliver."""
        under = self.rounds.now
        return under.amount(slices_of(member.nodes)) if under is not None else 0.0

    def _relieve(self, step: int, member: WorkerRecord) -> list[Effect]:
        run = self.run
        is_silent = run.is_silent(member)
        seconds = member.silent_s(run.clock) if is_silent else run.clock - member.working_since
        stalled = self._stalled(
            member, is_silent, seconds, f"the others compute its part of step {run.step_at(step):,}"
        )
        doing = member.doing(run.standing)
        member.relieved, member.relieved_amount, member.relieved_of = step, self._amount(member), doing
        member.warned_at = run.clock
        return [stalled, *self.rounds.take_away(member, avoid=member.peer)]
