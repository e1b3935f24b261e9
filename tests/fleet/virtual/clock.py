"""A clock on which what happens next happens at once."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """What happens next happens at once; what happens at the same time happens in the order it was asked for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.after_each: Callable[[], None] = lambda: None
        """Called after whatever happens."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._count), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came about within so many seconds."""
        deadline = self.now + limit_s
        while not until():
            if not self._heap or self._heap[0][0] > deadline:
                self.now = deadline
                return False
            self.now, _, call = heapq.heappop(self._heap)
            call()
            self.after_each()
        return True
