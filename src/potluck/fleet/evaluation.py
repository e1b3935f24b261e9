"""Validation sets in ranges, which the workers that evaluate one together take one by one. Pure."""

import json
import math
from array import array
from dataclasses import dataclass, field

import numpy as np

from potluck.events import Validated, loss_among
from potluck.fleet.coordinator_state import CoordinatorState, exact_sum
from potluck.fleet.effects import Effect, Emit, Send
from potluck.fleet.ledger import Range
from potluck.fleet.membership import Look, WorkerPhase, WorkerRecord
from potluck.wire.messages import Evaluated, EvaluateNext, EvaluateRange
from potluck.wire.words import clean

MOST_ROWS, MOST_RANGES = 1 << 48, 1 << 20
"""Each range that is done is kept as two numbers until all are: their sum must not depend on their order."""
MOST_FIGURES, MOST_SUMS = 64, 1 << 22
"""Of one evaluation, and of all its ranges: those are kept too."""
MOST_AT_ONE_STEP = 64
"""Sets that one worker may look at in turn without a step between them."""
MOST_DONE = 4
"""Results that are kept for those who ask late."""
SLOW = 4
"""Times what the slowest range took, beyond `patience`: then a range is given to another."""


@dataclass
class Evaluation:
    rows: int
    size: int
    next: int = 0
    returned: list[Range] = field(default_factory=list)
    rows_done: int = 0
    loss_sums: "array[float]" = field(default_factory=lambda: array("d"))
    samples: "array[float]" = field(default_factory=lambda: array("d"))
    names: str | None = None
    """Of all figures, as JSON, once somebody has told them; empty: there is only the loss."""
    sums: "list[array[float]]" = field(default_factory=list)
    """Of each figure but the loss."""
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

    def is_like(self, ask: EvaluateNext) -> bool:
        """Whether its figures are those that were told before; or, if none were, such as can be kept."""
        if self.names is not None:
            return ask.names == self.names and len(ask.sums) == len(self.sums)
        if not ask.names:
            return not len(ask.sums)
        names = names_in(ask.names)
        ranges = -(-self.rows // self.size)
        return len(names) == 1 + len(ask.sums) <= MOST_FIGURES and ranges * len(ask.sums) <= MOST_SUMS

    def add(self, ask: EvaluateNext, seconds: float) -> None:
        """A range that was given to one worker, and to nobody else, is done."""
        if self.names is None:
            self.names, self.sums = ask.names, [array("d") for _ in ask.sums]
        self.rows_done += ask.end - ask.start
        self.loss_sums.append(ask.loss_sum)
        for kept, told in zip(self.sums, ask.sums, strict=True):
            kept.append(float(told))
        self.samples.append(ask.samples)
        self.longest_s = max(self.longest_s, seconds)

    @property
    def is_done(self) -> bool:
        return self.rows_done >= self.rows


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
            if not evaluation.is_like(ask):
                sentence = "EvaluateNext tells of other figures than were told before, or of too many."
                return self.run.refuse(member.peer, "illegal", sentence)
            evaluation.add(ask, self.run.clock - member.evaluating_since)
            member.evaluating = None
        else:
            effects = self.give_back(member)
            evaluation = self.open.setdefault(look, Evaluation(ask.rows, ask.size))
        if evaluation.is_done:
            return effects + self._end(member, look, evaluation)
        return effects + self._give_next(member, look, evaluation)

    def _may_look(self, member: WorkerRecord, step: int, *, is_new: bool) -> bool:
        """One worker keeps no more than one set open, and begins only some at one step."""
        before, count = member.looks
        count = (count if before == step else 0) + is_new
        member.looks = step, count
        return step <= self.run.latest and count <= MOST_AT_ONE_STEP

    def _end(self, member: WorkerRecord, look: Look, evaluation: Evaluation) -> list[Effect]:
        step = look[0]
        total, samples = exact_sum(evaluation.loss_sums), exact_sum(evaluation.samples)
        sums, names = [exact_sum(each) for each in evaluation.sums], evaluation.names or ""
        done = Evaluated(step, total, samples, names, np.array(sums, "<f8"))
        self.done[look] = done
        for old in list(self.done)[:-MOST_DONE]:
            del self.done[old]
        del self.open[look]
        means = [figure / samples if samples else math.nan for figure in (total, *sums)]
        metrics = dict(zip(map(clean, names_in(names)), means, strict=True)) if names else {}
        loss = loss_among(metrics or means[0])
        validated = Validated(step=self.run.steps.get(step, step), loss=loss, metrics=metrics)
        return [Emit(validated), *(Send(peer, done) for peer in (member.peer, *evaluation.waiting))]

    def _give_next(self, member: WorkerRecord, look: Look, evaluation: Evaluation) -> list[Effect]:
        found = evaluation.take()
        if found is None:
            evaluation.waiting.append(member.peer)
            return []
        member.evaluating, member.evaluating_since = (look, *found), self.run.clock
        return [Send(member.peer, EvaluateRange(look[0], *found))]

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
    """Of figures, as a worker tells them; none where they are no names."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    is_right = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return found if is_right and len({*found}) == len(found) else []
