"""Parts of each step's batch in proportion to measured speed, so that all workers finish together. Pure.

Every worker hears the same times and so decides the same.
"""

import statistics
from collections import deque
from collections.abc import Sequence

from potluck.agree.shares import share_out
from potluck.words import plural

STEPS = 8
"""That are measured before parts are changed, and after that."""
FIRST_GAIN, GAIN = 0.15, 0.05
"""Of a step's time that the first change has to save, and each later one: noise alone moves nothing."""


class Balance:
    def __init__(self, batch: int, world: int) -> None:
        self.batch = batch
        self._gain = FIRST_GAIN
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
        speeds = [part / seconds for part, seconds in zip(rows, took, strict=True)]
        parts = share_out(self.batch, speeds)
        while 0 in parts:  # a worker that got nothing could not be measured again
            parts[parts.index(max(parts))] -= 1
            parts[parts.index(0)] += 1
        expected = max(part / speed for part, speed in zip(parts, speeds, strict=True))
        if parts == list(rows) or expected > (1 - self._gain) * max(took):
            return None
        self._gain = GAIN
        for seconds in self._seconds:
            seconds.clear()
        slowest, fastest = speeds.index(min(speeds)), speeds.index(max(speeds))
        reason = (
            f"Worker {slowest} takes {speeds[fastest] / speeds[slowest]:.2g} times as long for a row as worker"
            f" {fastest}, so each step's {plural(self.batch, 'row')} are shared {', '.join(map(str, parts))}: about"
            f" {1000 * expected:.0f} ms a step instead of {1000 * max(took):.0f}."
        )
        return parts, reason
