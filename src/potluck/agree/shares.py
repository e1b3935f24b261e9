"""Whole numbers in proportion to weights: rows among workers, parameters among ranks. Pure, and exact at every size.

Floats would be wrong from 2^53 on, and each of them is a fraction of whole numbers; so those are counted with.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

from potluck.words import plural


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Parts of `total` in proportion to the weights: each within 1 of its exact part, ties to the first.

    Their sum is `total`, and a weight of zero gets nothing. Weights that are all zero count as equal.
    """
    ratios = [weight.as_integer_ratio() for weight in weights]
    one = math.lcm(*(denominator for _, denominator in ratios))
    whole = [numerator * (one // denominator) for numerator, denominator in ratios]
    if not any(whole):
        whole = [1] * len(whole)
    exact = [divmod(total * part, sum(whole)) for part in whole]
    parts = [part for part, _ in exact]
    by_rest = sorted(range(len(parts)), key=lambda rank: (-exact[rank][1], rank))
    for rank in by_rest[: total - sum(parts)]:
        parts[rank] += 1
    return parts


def without_singles(parts: Sequence[int]) -> list[int]:
    """Change parts so that none is 1, with the same total, if that is not 1: rows come from the largest, or else there
    are fewer parts."""
    changed = list(parts)
    while sum(changed) > 1 and 1 in changed:
        single, largest = changed.index(1), changed.index(max(changed))
        if changed[largest] > 2:
            changed[largest] -= 1
            changed[single] += 1
        else:  # all others are 1 or 2
            partner = changed.index(1, single + 1) if changed.count(1) > 1 else largest
            changed[partner] += 1
            changed[single] -= 1
    return changed


def give_each_one(parts: list[int]) -> None:
    """From the largest, as far as it goes: a worker that got nothing could not be measured again."""
    while 0 in parts and max(parts) > 1:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(0)] += 1


STEPS = 8
"""Steps that are measured before each change of parts."""
FIRST_GAIN, GAIN = 0.15, 0.05
"""The share of a step's time that the first change must save, and each later one, so that noise alone moves nothing."""
LEAST_TRUST = 0.2
"""Trust in a change after one that saved nothing: a worker that is really slower is still followed."""


class Balance:
    def __init__(self, batch: int, world: int) -> None:
        self.batch = batch
        self._gain = FIRST_GAIN
        self._trust = 1.0
        """How much of what changes were to save they did. Where a step takes as long with fewer rows, it is nothing."""
        self._promised: tuple[float, float] | None = None
        """How long a step took before the last change, and the share of it that was to be saved."""
        self._seconds: list[deque[float]] = [deque(maxlen=STEPS) for _ in range(world)]

    def report(self, rows: Sequence[int], busy_s: Sequence[float]) -> tuple[list[int], str] | None:
        """One step: each worker's rows, and how long it took. New parts, and why; none: they stay."""
        if sum(rows) != self.batch or min(rows) < 1 or min(busy_s) <= 0:
            return None  # an epoch's last step has other parts
        for seconds, own in zip(self._seconds, busy_s, strict=True):
            seconds.append(own)
        if len(self._seconds[0]) < STEPS:
            return None
        # The lower quartile: a device that is slower is so in most of its steps, and not in some that were disturbed.
        took = [statistics.quantiles(seconds, n=4)[0] for seconds in self._seconds]
        if self._promised is not None:
            before, share = self._promised
            self._trust = min(1.0, max(LEAST_TRUST, (1 - max(took) / before) / share))
            self._promised = None
        speeds = [part / seconds for part, seconds in zip(rows, took, strict=True)]
        parts = share_out(self.batch, speeds)
        give_each_one(parts)
        expected = max(part / speed for part, speed in zip(parts, speeds, strict=True))
        saved = 1 - expected / max(took)
        if parts == list(rows) or self._trust * saved < self._gain:
            return None
        self._gain, self._promised = GAIN, (max(took), saved)
        for seconds in self._seconds:
            seconds.clear()
        slowest, fastest = speeds.index(min(speeds)), speeds.index(max(speeds))
        reason = (
            f"Worker {slowest} takes {speeds[fastest] / speeds[slowest]:.2g} times as long for a row as worker"
            f" {fastest}, so each step's {plural(self.batch, 'row')} are shared {', '.join(map(str, parts))}: about"
            f" {1000 * expected:.0f} ms a step instead of {1000 * max(took):.0f}."
        )
        return parts, reason
