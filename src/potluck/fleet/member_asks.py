"""Requests of a worker that its host has yet to answer: a look at held-out data, everybody's values, a save. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.wire.messages import Evaluated, EvaluateNext, Gather, Gathered, Saved, SaveDue

KEEP_FIRST_S, KEEP_EVERY_S = 10.0, 60.0
"""A loop of one's own has its run saved on the host after this long, and then about this often."""
KEEP_SHARE = 20
"""And not before this many times as long as the last save took."""


@dataclass
class MemberEvaluation:
    """An evaluation of this worker's."""

    step: int
    rows: int
    size: int
    is_under_way: bool = True
    names: str = ""
    """Names of figures, as JSON; empty: there is one, the loss."""
    figures: Sequence[float] = (math.nan,)
    """The sum of each."""
    samples: float = 0.0
    """None: this worker had no part in it."""

    def ask(
        self, start: int = 0, end: int = 0, names: str = "", figures: Sequence[float] = (0.0,), samples: float = 0.0
    ) -> EvaluateNext:
        """Asks for the next range, and reports the last one."""
        first, *others = figures
        further = np.array(others, "<f8")
        return EvaluateNext(self.step, self.rows, self.size, start, end, first, samples, names, further)

    def take(self, done: Evaluated) -> str:
        """Returns a sentence on what is odd; empty: nothing is."""
        self.is_under_way, self.names, self.samples = False, done.names, done.samples
        self.figures = done.loss_sum, *map(float, done.sums)
        if done.samples or not done.names:
            return ""
        odd = f"The others report other figures of the held-out rows than this worker: {done.names[:200]}."
        return f"{odd} It has no part in this validation; let its script report the same."

    def end(self) -> None:
        """There will be no answer."""
        self.is_under_way = False


@dataclass
class MemberGathering:
    """A value of this worker's own, and those of all; it is under way until they are found."""

    step: int
    call: int
    first_id: int
    data: bytes
    found: list[bytes] | None = None
    """In an order that is the same on every worker; our own alone where the others are elsewhere in the run."""
    fault: str = ""

    def ask(self) -> Gather:
        return Gather(self.step, self.call, self.first_id, self.data)

    def take(self, message: Gathered) -> None:
        ends = list(itertools.accumulate(map(int, message.sizes)))
        self.fault = message.fault
        if ends and ends[-1] != len(message.data):
            self.fault = "The host gave other bytes than it said."
        starts = [0, *ends[:-1]]
        every = [bytes(message.data[start:end]) for start, end in zip(starts, ends, strict=False)]
        self.found = every or [self.data]

    def end(self) -> None:
        self.found = self.found or [self.data]


@dataclass
class MemberSaves:
    """Checkpoints that this worker has asked for, and what became of them on the host's disk."""

    due: int = 0
    """The last version that is to be kept."""
    is_best: bool = False
    """Whether that is as the best so far."""
    kept: Saved = Saved(0, "", "")
    """The last checkpoint on the host's disk."""
    failed: Saved = Saved(0, "", "")
    """The last that it could not write, and why."""
    due_at: float = 0.0
    kept_at: float = 0.0
    """When the host last had one."""
    took_s: float = 0.0

    def is_under_way(self, *, until_kept: bool) -> bool:
        """Whether the host has not answered yet. `until_kept`: that it cannot write is no answer then."""
        answers = [self.kept] if until_kept else [self.kept, self.failed]
        return all((answer.step, answer.is_best) < (self.due, self.is_best) for answer in answers)

    def is_keep_due(self, now: float) -> bool:
        """A user's own loop need not think of saving: the host gets a checkpoint as often as that costs little."""
        every_s = max(KEEP_EVERY_S if self.kept.step else KEEP_FIRST_S, KEEP_SHARE * self.took_s)
        return self.kept.step >= self.due and now - self.kept_at > every_s

    def take(self, message: Saved, now: float) -> None:
        if message.error:
            self.failed = message
            return
        self.kept, self.kept_at = message, now
        self.took_s, self.due_at = now - self.due_at if self.due_at else 0.0, 0.0

    def forget_after(self, version: int) -> None:
        """This worker has the state of this version now: the run may have gone back, and what was due is no more."""
        self.kept = self.kept if self.kept.step <= version else Saved(0, "", "")
        self.due, self.is_best = self.kept.step, bool(self.kept.is_best)

    def ask(self, version: int, keep_last: int, now: float, *, is_best: bool) -> SaveDue:
        self.due, self.is_best, self.due_at = version, is_best, now
        return SaveDue(version, keep_last, int(is_best))
