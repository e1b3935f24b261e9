"""Validation sets in ranges, which the workers that evaluate one together take one by one. Pure."""

import json
import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from potluck.agree.records import Range
from potluck.events import Validated, loss_among
from potluck.fleet.coordinator_state import CoordinatorState, exact_sum, stalled
from potluck.fleet.effects import Effect, Emit, Send
from potluck.fleet.membership import Look, WorkerPhase, WorkerRecord
from potluck.wire.messages import Evaluated, EvaluateNext, EvaluateRange
from potluck.wire.words import clean

MOST_ROWS, MOST_RANGES = 1 << 48, 1 << 20
"""Each range that is done is kept as two numbers until all are: their sum must not depend on their order."""
MOST_FIGURES, MOST_SUMS = 64, 1 << 22
"""The most figures of one evaluation, and the most sums of all its ranges, which are kept too."""
LOSS = '["loss"]'
"""The names of figures where there is only the loss."""
MOST_AT_ONE_STEP = 64
"""Sets that one worker may look at in turn without a step between them."""
MOST_DONE = 4
"""Results that are kept for those who ask late."""
SLOW = 4
"""Times what the slowest range took, beyond `patience`: then a range is given to another."""


@dataclass
class Told:
    """Results of ranges, as some workers told them under the same names."""

    workers: set[int] = field(default_factory=set)
    """Their ids."""
    starts: "array[int]" = field(default_factory=lambda: array("q"))
    """The first row of each range."""
    samples: "array[float]" = field(default_factory=lambda: array("d"))
    sums: "list[array[float]]" = field(default_factory=list)
    """Sums of each figure, the loss first."""


@dataclass
class Evaluation:
    rows: int
    size: int
    next: int = 0
    returned: list[Range] = field(default_factory=list)
    rows_done: int = 0
    told: dict[str, Told] = field(default_factory=dict)
    """By the names of all figures, as JSON; empty: there is only the loss. Whose are right is decided once all is done:
    the first who tells may be the only one who has others."""
    waiting: list[int] = field(default_factory=list)
    """Peers that asked when no range was left."""
    longest_s: float = 0.0
    """The longest time that a range has taken."""

    def take(self) -> Range | None:
        if self.returned:
            return self.returned.pop()
        if self.next >= self.rows:
            return None
        start = self.next
        self.next = min(self.rows, start + self.size)
        return start, self.next

    def is_like(self, ask: EvaluateNext, worker_id: int) -> bool:
        """Whether its figures are those that it told before, and such as can be kept."""
        if any(worker_id in told.workers for names, told in self.told.items() if names != ask.names):
            return False
        if (known := self.told.get(ask.names)) is not None:
            return 1 + len(ask.sums) == len(known.sums)
        if not ask.names:
            return not len(ask.sums)
        names = names_in(ask.names)
        ranges = -(-self.rows // self.size)
        is_few = len(self.told) < MOST_FIGURES and ranges * len(ask.sums) <= MOST_SUMS
        return is_few and len(names) == 1 + len(ask.sums) <= MOST_FIGURES

    def add(self, ask: EvaluateNext, worker_id: int, seconds: float) -> None:
        """A range that was given to one worker, and to nobody else, is done."""
        figures = [ask.loss_sum, *map(float, ask.sums)]
        results = self.told.setdefault(ask.names, Told(sums=[array("d") for _ in figures]))
        results.workers.add(worker_id)
        self.rows_done += ask.end - ask.start
        results.starts.append(ask.start)
        for kept, value in zip(results.sums, figures, strict=True):
            kept.append(value)
        results.samples.append(ask.samples)
        self.longest_s = max(self.longest_s, seconds)

    @property
    def is_done(self) -> bool:
        return self.rows_done >= self.rows

    def agree_on_names(self, present: Collection[int]) -> set[int]:
        """Keep the names that most workers told, of those who are there, or those of the worker that was in first.
        Returns the ids of all others: what they looked at is left for somebody else."""
        there = {names: told.workers & {*present} for names, told in self.told.items()}
        right = max(there, key=lambda names: (len(there[names]), -min(there[names], default=0)))
        others = {names: told for names, told in self.told.items() if names != right}
        for names, told in others.items():
            ranges = [(start, min(self.rows, start + self.size)) for start in told.starts]
            self.returned += ranges
            self.rows_done -= sum(end - start for start, end in ranges)
            del self.told[names]
        return {worker_id for told in others.values() for worker_id in told.workers}


@dataclass
class Evaluations:
    """All evaluations that are under way, and the last results."""

    run: CoordinatorState
    open: dict[Look, Evaluation] = field(default_factory=dict, init=False)
    done: dict[Look, Evaluated] = field(default_factory=dict, init=False)
    """The last few results."""

    def on_next(self, member: WorkerRecord, ask: EvaluateNext) -> list[Effect]:
        look = ask.step, ask.rows, ask.size
        if (done := self.done.get(look)) is not None:
            member.evaluating = None
            return [Send(member.peer, done)]
        if not (0 < ask.size <= ask.rows <= MOST_ROWS and -(-ask.rows // ask.size) <= MOST_RANGES):
            return self.run.refuse(member.peer, "illegal", "EvaluateNext has no rows, or too many ranges.")
        if member.phase is WorkerPhase.CATCHING_UP:  # it will have other weights; those who keep theirs look
            return [Send(member.peer, Evaluated(ask.step, 0.0, 0.0))]
        if not self._may_look(member, ask.step, is_new=look not in self.open):
            return self.run.refuse(member.peer, "illegal", "EvaluateNext is of a step to come, or one of very many.")
        effects: list[Effect] = []
        evaluation = self.open.get(look)
        if evaluation is not None and member.evaluating == (look, ask.start, ask.end):
            if not evaluation.is_like(ask, member.worker_id):
                sentence = "EvaluateNext tells of other figures than you told before, or of too many."
                return self.run.refuse(member.peer, "illegal", sentence)
            evaluation.add(ask, member.worker_id, self.run.clock - member.evaluating_since)
            member.evaluating = None
        else:
            effects = self.give_back(member)
            evaluation = self.open.setdefault(look, Evaluation(ask.rows, ask.size))
        if not evaluation.is_done:
            return effects + self._give_next(member, look, evaluation)
        evaluation.waiting.append(member.peer)
        if len(evaluation.told) > 1:
            effects += self._leave_out(look, evaluation)
        return effects if not evaluation.is_done else effects + self._end(look, evaluation)

    def _leave_out(self, look: Look, evaluation: Evaluation) -> list[Effect]:
        """Leave out the results of workers that tell of other figures than most. They take part in all else: one of
        them must not end the others, nor they it."""
        members = self.run.membership.members
        odd = evaluation.agree_on_names({member.worker_id for member in members.values()})
        names = next(iter(evaluation.told))
        waiting, evaluation.waiting = [members[peer] for peer in evaluation.waiting], []
        effects: list[Effect] = []
        for member in [m for m in waiting if m.worker_id in odd]:
            doing = f"it reports other figures of the held-out rows than {tell_names(names)}, which the others report"
            effects.append(stalled(member, doing, then="it is left out of this validation"))
            effects.append(Send(member.peer, Evaluated(look[0], 0.0, 0.0, names or LOSS)))
        for member in [m for m in waiting if m.worker_id not in odd]:
            effects += self._give_next(member, look, evaluation)
        return effects

    def _may_look(self, member: WorkerRecord, step: int, *, is_new: bool) -> bool:
        """One worker keeps no more than one set open, and begins only some at one step."""
        before, count = member.looks
        count = (count if before == step else 0) + is_new
        member.looks = step, count
        return step <= self.run.latest and count <= MOST_AT_ONE_STEP

    def _end(self, look: Look, evaluation: Evaluation) -> list[Effect]:
        step, ((names, told),) = look[0], evaluation.told.items()
        samples = exact_sum(told.samples)
        total, *sums = map(exact_sum, told.sums)
        done = Evaluated(step, total, samples, names, np.array(sums, "<f8"))
        self.done[look] = done
        for old in list(self.done)[:-MOST_DONE]:
            del self.done[old]
        del self.open[look]
        means = [figure / samples if samples else math.nan for figure in (total, *sums)]
        metrics = dict(zip(map(clean, names_in(names)), means, strict=True)) if names else {}
        loss = loss_among(metrics or means[0])
        validated = Validated(step=self.run.step_at(step), loss=loss, metrics=metrics)
        return [Emit(validated), *(Send(peer, done) for peer in evaluation.waiting)]

    def _give_next(self, member: WorkerRecord, look: Look, evaluation: Evaluation) -> list[Effect]:
        range_given = evaluation.take()
        if range_given is None:
            evaluation.waiting.append(member.peer)
            return []
        member.evaluating, member.evaluating_since = (look, *range_given), self.run.clock
        return [Send(member.peer, EvaluateRange(look[0], *range_given))]

    def give_back(self, member: WorkerRecord) -> list[Effect]:
        """It looks at nothing any more: others do its range, and what nobody looks at is forgotten."""
        for evaluation in self.open.values():
            evaluation.waiting = [peer for peer in evaluation.waiting if peer != member.peer]
        members = self.run.membership.members
        effects: list[Effect] = []
        if member.evaluating is not None:
            (look, start, end), member.evaluating = member.evaluating, None
            if (found := self.open.get(look)) is not None:
                found.returned.append((start, end))
                if found.waiting:
                    effects = self._give_next(members[found.waiting.pop(0)], look, found)
        busy = {m.evaluating[0] for m in members.values() if m.evaluating is not None}
        for look in [look for look, found in self.open.items() if look not in busy and not found.waiting]:
            del self.open[look]
        return effects

    def on_tick(self) -> list[Effect]:
        """A range that takes far longer than any other, while somebody waits, is given to one who waits."""
        run = self.run
        effects: list[Effect] = []
        for member in [m for m in run.membership.members.values() if m.evaluating is not None]:
            found = self.open.get(member.evaluating[0]) if member.evaluating is not None else None
            if found is None or not found.waiting:
                continue
            if self.is_slow(member) or run.is_silent(member):
                effects += self.give_back(member)
        return effects

    def is_slow(self, member: WorkerRecord) -> bool:
        """Whether the range that it looks at takes far longer than any other."""
        found = self.open.get(member.evaluating[0]) if member.evaluating is not None else None
        longest_s = found.longest_s if found is not None else 0.0
        return self.run.clock - member.evaluating_since > self.run.patience_s + SLOW * longest_s


def names_in(text: str) -> list[str]:
    """Read the names of figures, as a worker tells them; empty where they are no names."""
    try:
        names = json.loads(text)
    except ValueError:
        return []
    is_right = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_right and len({*names}) == len(names) else []


def tell_names(text: str) -> str:
    """The first few, for people to read."""
    names = [clean(name)[:40] for name in names_in(text or LOSS)]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])
