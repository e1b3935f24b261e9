"""Slowdown: one worker of the demo pauses in proportion to what it computes, as if its machine were slower.

Quotas of the kernel, for measurements, are bench/testbed's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from potluck.events import Event, RunStarted

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    worker: int
    """Number of the worker that it slows."""
    factor: float = 3.0

    @property
    def sentence(self) -> str:
        times = f"{self.factor - 1:g} times as long as it computes"
        return f"Worker {self.worker} is slowed {self.factor:g}-fold: it pauses {times}."


class Brake:
    """A worker's side: a listener that slows the worker it is on while its run lasts."""

    def __init__(self, slowdown: Slowdown, rank: int) -> None:
        self._slowdown, self._rank = slowdown, rank
        self.pauses = Pauses(slowdown.factor) if rank == slowdown.worker else None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            if self._rank == 0:
                print(self._slowdown.sentence, flush=True)
            if self.pauses is not None:
                self.pauses.start()

    def slow(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that the slow worker pauses after each call, for all that it computed since the last."""
        pauses = self.pauses
        if pauses is None:
            return function

        def slowed(*arguments: P.args, **options: P.kwargs) -> R:
            result = function(*arguments, **options)
            pauses.pause()
            return result

        return slowed


class Pauses:
    """Sleeps in proportion to the time that this process has really computed, whatever else had the cores."""

    def __init__(
        self,
        factor: float,
        computed_s: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._factor, self._computed_s, self._sleep = factor, computed_s, sleep
        self.start()

    def start(self) -> None:
        self._until_s = self._computed_s()

    def pause(self) -> None:
        now_s = self._computed_s()
        self._sleep((self._factor - 1) * (now_s - self._until_s))
        self._until_s = now_s
