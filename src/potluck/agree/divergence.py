"""How far replicas drifted apart, and when that calls for agreeing more often. Pure."""

import itertools
import math
from collections import deque

RISING = 3
"""Windows in a row in which it rose."""


class Divergence:
    """Takes each window's largest |own - mean| / |mean| over the replicas."""

    def __init__(self, threshold: float) -> None:
        if not threshold >= 0:
            raise ValueError(f"a divergence threshold must be at least 0, not {threshold}")
        self.threshold = threshold
        self._last: deque[float] = deque(maxlen=RISING + 1)

    def report(self, value: float) -> bool:
        """Whether it has risen three windows running, and is above the threshold now; then it starts anew."""
        if not math.isfinite(value):
            value = math.inf
        self._last.append(value)
        found = list(self._last)
        is_rising = len(found) == RISING + 1 and all(a < b for a, b in itertools.pairwise(found))
        if is_rising and value > self.threshold:
            self._last.clear()
            self._last.append(value)
            return True
        return False
