"""Values of one's own, gathered from all who are at one step: fleet.mean() and fleet.gather() under a host. Pure.

A gathering is known by the step and by how many there were at that step before it. It is done when every worker that
takes part in the step has given its value, has moved on, or is gone. What the values are, only workers know.
"""

from dataclasses import dataclass, field

import numpy as np

from potluck.fleet.coordinator_state import CoordinatorState, stalled
from potluck.fleet.effects import Effect, Send
from potluck.fleet.evaluation import Evaluations
from potluck.fleet.membership import Call, WorkerPhase, WorkerRecord
from potluck.wire.messages import Gather, Gathered

MOST_BYTES, MOST_TOTAL_BYTES = 8 << 20, 48 << 20
"""The most bytes of one worker's value, and of all that are kept at once: they travel in one message."""
MOST_DONE = 4
"""Results that are kept whether or not anybody is known to be late: one that comes back may ask for them."""
LONG = 4
"""Times `patience` after the last value: then the others continue without those who have not given theirs."""


@dataclass
class Gathering:
    given: dict[int, bytes] = field(default_factory=dict)
    """By peer."""
    first_ids: dict[int, int] = field(default_factory=dict)
    """By peer, so that a worker that came back counts once, though its old connection is not known to be gone."""
    claims: dict[int, int] = field(default_factory=dict)
    """By peer: the first id that it named, which after a restart of the host may be another worker's."""
    last_at: float = 0.0
    """When the last one was given that had not been given before."""
    told_at: float = 0.0
    """When those were last named who are waited for."""


@dataclass
class Gatherings:
    run: CoordinatorState
    evaluations: Evaluations
    expected: int = 0
    """How many workers were in when the coordinator before this one ended, at this step. They may have been waiting
    for each other, and come back one by one."""
    resumed_at: int = 0
    open: dict[Call, Gathering] = field(default_factory=dict, init=False)
    done: dict[Call, Gathered] = field(default_factory=dict, init=False)
    """The last few results, and those that somebody who is late has yet to ask for."""
    _expected_until: float | None = field(default=None, init=False)

    def on_gather(self, member: WorkerRecord, ask: Gather) -> list[Effect]:
        call = ask.step, ask.call
        if ask.step > self.run.latest or len(ask.data) > MOST_BYTES:
            return self.run.refuse(member.peer, "illegal", "Gather is of a step to come, or has too many bytes.")
        self.give_back(member)
        member.gathered = max(member.gathered, call)
        if (done := self.done.get(call)) is not None:
            return [Send(member.peer, done)]
        if member.phase is WorkerPhase.CATCHING_UP:  # the others do not wait for it
            return [Send(member.peer, _answer(call, {}))]
        gathering = self.open.setdefault(call, Gathering())
        first_id = self._first_id_of(member, ask.first_id, gathering)
        is_known = member.peer in gathering.first_ids or first_id in gathering.first_ids.values()
        if not is_known:  # else it is given again
            gathering.last_at = gathering.told_at = self.run.clock
        gathering.given[member.peer], gathering.first_ids[member.peer] = bytes(ask.data), first_id
        gathering.claims[member.peer] = ask.first_id
        member.gathering = call
        if sum(len(data) for each in self.open.values() for data in each.given.values()) > MOST_TOTAL_BYTES:
            return self._end(call, gathering, f"All workers together gave more than {MOST_TOTAL_BYTES:,} bytes.")
        return self.settle()

    def _first_id_of(self, member: WorkerRecord, claimed: int, found: Gathering) -> int:
        """Its first id as it says, but not that of another worker, whose value it would replace: its own one then."""
        others = [m for m in self.run.membership.members.values() if m is not member]
        for other in others:
            if found.claims.get(other.peer) == claimed and _may_be_one(member, other):
                return found.first_ids[other.peer]
        same = [m for m in others if claimed in (m.worker_id, found.first_ids.get(m.peer))]
        return claimed if all(_may_be_one(member, other) for other in same) else member.worker_id

    def missing(self, call: Call) -> list[WorkerRecord]:
        """List the workers that take part in the step, and have neither given a value nor moved on."""
        return [m for m in self.run.membership.holders if self._is_awaited(m, call)]

    def _is_awaited(self, member: WorkerRecord, call: Call) -> bool:
        step, _ = call
        if member.gathered >= call or member.applied > step or member.leaving:
            return False
        # One that hangs is waited for once, and not at each step that the others take meanwhile.
        if self._is_behind(member, member.passed_over):
            return False
        if member.held == step > 0:  # it came back: if it is past this, its work shows it
            return not member.reported
        return member.since <= step or not step

    @staticmethod
    def _is_behind(member: WorkerRecord, call: Call) -> bool:
        return member.gathered < call and member.applied <= call[0]

    def _looks_at(self, step: int, member: WorkerRecord) -> bool:
        """It evaluates, and its value may depend on what it finds. One that hangs there finds nothing, and one that is
        at an earlier step is late with its work, too."""
        is_there = member.evaluating is not None and member.evaluating[0][0] == step
        return is_there and not self.evaluations.is_slow(member)

    def _expects_more(self, step: int) -> bool:
        if step != self.resumed_at or len(self.run.membership.holders) >= self.expected:
            return False
        if self._expected_until is None:
            self._expected_until = self.run.clock + self.run.patience_s
        return self.run.clock < self._expected_until

    def settle(self) -> list[Effect]:
        """Ends what nobody is missing from any more."""
        ended = [
            (call, found)
            for call, found in self.open.items()
            if not self.missing(call) and not self._expects_more(call[0])
        ]
        return [effect for call, found in ended for effect in self._end(call, found)]

    def _end(self, call: Call, found: Gathering, fault: str = "") -> list[Effect]:
        run = self.run
        del self.open[call]
        those = sorted((run.membership.members[peer] for peer in found.given), key=lambda m: m.worker_id)
        last = {found.first_ids[m.peer]: found.given[m.peer] for m in those}  # of each worker, where it first was
        answer = _answer(call, {} if fault else last, fault)
        self.done[call] = answer
        self._forget_old()
        for member in those:
            member.gathering = None
            member.working_since = max(member.working_since, run.clock)  # what it was given meanwhile begins now
        return [Send(member.peer, answer) for member in those]

    def _forget_old(self) -> None:
        """One that is late gets what the others got, and does not open a gathering of its own, in which it would wait
        for those who are later still."""
        left = MOST_TOTAL_BYTES
        for number, call in enumerate(reversed(list(self.done))):
            left -= len(self.done[call].data)
            is_wanted = left >= 0 and any(self._is_behind(m, call) for m in self.run.membership.holders)
            if number >= MOST_DONE and not is_wanted:
                del self.done[call]

    def give_back(self, member: WorkerRecord) -> None:
        """It waits for nothing any more, and its value does not count: it may come again, and give it anew."""
        if member.gathering is not None and (found := self.open.get(member.gathering)) is not None:
            found.given.pop(member.peer, None)
            if not found.given:
                del self.open[member.gathering]
        member.gathering = None

    def forget(self) -> None:
        """The run goes back: steps will be taken anew."""
        self.open.clear()
        self.done.clear()
        for member in self.run.membership.members.values():
            member.gathering, member.gathered, member.passed_over = None, (-1, -1), (-1, -1)

    def on_tick(self) -> list[Effect]:
        """Name the workers that are waited for; after a while the others continue without them."""
        run, effects = self.run, self.settle()
        for call, gathering in list(self.open.items()):
            if any(self._looks_at(call[0], member) for member in self.missing(call)):
                gathering.last_at = gathering.told_at = run.clock
            seconds, is_over = run.clock - gathering.last_at, run.clock - gathering.last_at > LONG * run.patience_s
            if not is_over and run.clock - gathering.told_at <= run.patience_s:
                continue
            gathering.told_at = run.clock
            then = "the others continue without its value"
            if not is_over:
                then += f" after {LONG * run.patience_s:g} s; call it on every worker, and not on rank 0 alone"
            doing = (
                f"it has not called fleet.mean(), fleet.gather(), fleet.keep_best() or fleet.early_stop() at step"
                f" {run.step_at(call[0]):,}, as others have,"
            )
            effects += [stalled(member, doing, seconds, then=then) for member in self.missing(call)]
            if is_over:
                for member in self.missing(call):
                    member.passed_over = max(member.passed_over, call)
                effects += self._end(call, gathering)
        return effects


def _answer(call: Call, given: dict[int, bytes], fault: str = "") -> Gathered:
    sizes = np.array([len(data) for data in given.values()], "<u4")
    return Gathered(*call, sizes, b"".join(given.values()), fault)


def _may_be_one(one: WorkerRecord, other: WorkerRecord) -> bool:
    """Whether two connections may be one worker's, which lost the first: from another address only if nothing has come
    over the first since. A name proves nothing, for everybody may see it."""
    if (one.name, one.kind) != (other.name, other.kind):
        return False
    first, second = sorted((one, other), key=lambda m: m.worker_id)
    return one.address == other.address or first.heard_at < second.came_at
