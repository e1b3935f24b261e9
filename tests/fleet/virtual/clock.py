"""A clock on which what happens next happens at once, and what each process takes for the time."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """What happens at the same time happens in the order it was asked for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.after_each: Callable[[], None] = lambda: None
        """Called after whatever happens."""
        self.count = 0
        """How much has happened."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), call))

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
            self.count += 1
            call()
            self.after_each()
        return True


class ProcessClock:
    """One process's: it may be stopped, its machine may sleep, and its clock may leap."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ahead_s = 0.0
        self.wall_ahead_s = 0.0
        """Of the time of day, which may be anything: nothing may be decided by it."""
        self.stopped_until = 0.0

    @property
    def now(self) -> float:
        """As time.monotonic() tells it."""
        return self._clock.now + self._ahead_s

    @property
    def wall_ms(self) -> int:
        return max(0, int((self._clock.now + self.wall_ahead_s) * 1000))

    @property
    def is_stopped(self) -> bool:
        return self._clock.now < self.stopped_until

    def stop(self, seconds: float) -> None:
        """As by SIGSTOP: on waking, it sees how long it was."""
        self.stopped_until = max(self.stopped_until, self._clock.now + seconds)

    def sleep(self, seconds: float) -> None:
        """As a laptop whose lid is closed: its clock stands still meanwhile."""
        if not self.is_stopped:
            self.stop(seconds)
            self._clock.at(self.stopped_until, lambda: self.leap(-seconds))

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds
