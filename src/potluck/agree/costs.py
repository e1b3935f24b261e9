"""Weighs what windows cost: the time to agree, and what is learned less from the same rows. Pure.

A window of H batches wastes agree_s / H of each batch's time; and replicas that step by themselves for H batches need
about LEARNING * sqrt(H * (replicas - 1)) more rows for the same loss (docs/decisions/0062). Both together are least at
one H, and where even that is dearer than a step that all take together, all should step together.
"""

import math
from collections.abc import Sequence

from potluck.words import percent, plural

LEARNING = 0.023
"""More rows for the same loss: of 4 replicas 18 % at 20 batches and 28 % at 50, as measured. At 5 it was less."""
EARLY = 15
"""How many times that, in the first share of a run: what is not learned there is missing at the end of its schedule."""
NEARLY_SYNC = 15
"""H * (replicas - 1) up to which replicas learn nearly like Sync: 2 % more loss of 4 replicas at 5 batches."""
ALONE = 0.1
"""How many replicas one that is alone counts as having beside it: others may come, and wait for a window's end."""
STATE = 3
"""A window moves parameters and two moments, where a step moves gradients: so many times the bytes, until measured."""
SMOOTH = 0.2
CLEAR = 0.95
"""By how much windows have to be cheaper before Sync is left: noise alone should move nothing."""


class WindowCosts:
    """Seconds, smoothed. `batch_s`: of the slowest replica; a step together has as many rows for each."""

    def __init__(self) -> None:
        self.batch_s = 0.0
        self.step_s = 0.0
        """What a step that all take together costs beyond its batch."""
        self.agree_s = 0.0
        """What agreeing at a window's end costs; 0: not measured yet."""
        self.anchor = 0
        """Batches of the slowest in a window; 0: all step together."""
        self.others = 1.0
        """How many replicas there are beside one, if all were equally fast."""
        self.is_early = False

    def set_speeds(self, speeds: Sequence[float]) -> None:
        """One that does nearly everything is nearly alone."""
        squares = sum(speed * speed for speed in speeds)
        self.others = max(ALONE, sum(speeds) ** 2 / squares - 1 if squares > 0 else len(speeds) - 1.0)

    @property
    def is_measured(self) -> bool:
        return self.batch_s > 0 and self._agree_s > 0

    @property
    def _learning(self) -> float:
        return LEARNING * math.sqrt(self.others) * (EARLY if self.is_early else 1)

    @property
    def longest(self) -> int:
        """The most batches of a window in which replicas learn nearly like Sync."""
        return max(1, round(NEARLY_SYNC / self.others))

    def report_step(self, batch_s: float, more_s: float) -> None:
        self.batch_s = _smooth(self.batch_s, batch_s)
        self.step_s = _smooth(self.step_s, more_s)

    def report_window(self, batch_s: float, agree_s: float) -> None:
        self.batch_s = _smooth(self.batch_s, batch_s)
        self.agree_s = _smooth(self.agree_s, agree_s)

    @property
    def _agree_s(self) -> float:
        return self.agree_s or STATE * self.step_s

    def best(self, most: int) -> int:
        """How many batches a window should have, at most so many."""
        if self.batch_s <= 0:
            return 1
        wanted = math.pow(2 * self._agree_s / self.batch_s / self._learning, 2 / 3)
        return max(1, min(most, round(wanted)))

    def more_rows(self, anchor: int) -> float:
        """Return the share of rows that it takes more for the same loss."""
        return self._learning * math.sqrt(anchor)

    def more_time(self, anchor: int) -> float:
        """Return the time that agreeing takes, as a share of the time to compute."""
        return self._agree_s / self.batch_s / anchor if self.batch_s > 0 else 0.0

    def price(self, anchor: int) -> float:
        """The time for what one batch of all replicas teaches under Sync, against the time of that batch alone.

        `anchor` 0: a step that all take together.
        """
        if self.batch_s <= 0:
            return 1.0
        if not anchor:
            return 1 + (self.step_s or self._agree_s / STATE) / self.batch_s
        return (1 + self.more_time(anchor)) * (1 + self.more_rows(anchor))

    def decide(self, most: int) -> bool:
        """Sets `anchor`, and tells whether that is another way than before."""
        best, was = self.best(most), self.anchor
        is_apart = self.price(best) < (self.price(0) if was else CLEAR * self.price(0))
        self.anchor = best if is_apart else 0
        return is_apart != (was > 0)

    def why_together(self, most: int) -> str:
        """Say why all agree in every step, as a sentence without its end."""
        if not self.is_measured:
            return "All agree in every step until it is measured what that costs"
        best = self.best(most)
        close = "" if self.price(best) >= self.price(0) else ", which is not clearly less"
        return (
            f"Agreeing in every step adds {self._added(0)} to the time of computing; averaging only every"
            f" {plural(best, 'batch')} would add {self._added(best)} until the loss is as low{close}"
        )

    def why_apart(self, anchor: int) -> str:
        """Say why each worker steps by itself between averages, as a sentence without its end."""
        return (
            f"Agreeing in every step would add {self._added(0)} to the time of computing; averaging only every"
            f" {plural(anchor, 'batch')} adds {self._added(anchor)} until the loss is as low"
        )

    def _added(self, anchor: int) -> str:
        return percent(self.price(anchor) - 1)


def _smooth(old: float, new: float) -> float:
    if not (math.isfinite(new) and new > 0):  # 0: it was not measured
        return old
    return new if old <= 0 else (1 - SMOOTH) * old + SMOOTH * new
