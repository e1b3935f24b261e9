"""What windows cost: the time to agree, and what is learned less from the same rows. Pure.

A window of H batches wastes agree_s / H of each batch's time; and replicas that step by themselves for H batches need
about LEARNING * sqrt(H) more rows for the same loss, as measured (docs/decisions/0062). Both together are least at one
H, and where even that is dearer than a step that all take together, all should step together.
"""

import math

from potluck.words import plural

LEARNING = 0.036
"""More rows for the same loss, by the square root of a window's batches: 8 % at 5 of them, 16 % at 20."""
STATE = 3
"""A window moves parameters and two moments, where a step moves gradients: so many times the bytes, until measured."""
SMOOTH = 0.2
CLEAR = 0.95
"""By how much another way has to be cheaper before it is taken: noise alone should move nothing."""


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
        wanted = math.pow(2 * self._agree_s / self.batch_s / LEARNING, 2 / 3)
        return max(1, min(most, round(wanted)))

    def price(self, anchor: int) -> float:
        """The time for what one batch of all replicas teaches under Sync, against the time of that batch alone.

        `anchor` 0: a step that all take together.
        """
        if self.batch_s <= 0:
            return 1.0
        if not anchor:
            return 1 + (self.step_s or self._agree_s / STATE) / self.batch_s
        return (1 + self._agree_s / self.batch_s / anchor) * (1 + LEARNING * math.sqrt(anchor))

    def decide(self, most: int) -> str | None:
        """Sets `anchor`. Why, if that is another way than before."""
        best, was = self.best(most), self.anchor
        together, apart = self.price(0), self.price(best)
        is_apart = apart < CLEAR * together if was == 0 else apart * CLEAR <= together
        self.anchor = best if is_apart else 0
        if is_apart == (was > 0):
            return None
        if is_apart:
            return (
                f"Agreeing in every step takes {together - 1:.0%} more time than computing, and windows of"
                f" {plural(best, 'batch')} take {apart - 1:.0%} more for the same loss, so replicas step by themselves"
            )
        return (
            f"Windows take {apart - 1:.0%} more time than computing for the same loss, and agreeing in every step"
            f" {together - 1:.0%}, so all step together"
        )


def _smooth(old: float, new: float) -> float:
    if not (math.isfinite(new) and new > 0):  # 0: it was not measured
        return old
    return new if old <= 0 else (1 - SMOOTH) * old + SMOOTH * new
