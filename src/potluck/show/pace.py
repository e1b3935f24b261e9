"""Pace: how fast a run is, and how long it has yet to go, from its last steps. Pure.

The terminal and the page both ask it, so that they show the same figures of the same steps.
"""

from collections import deque
from dataclasses import dataclass

RECENT = 400
"""Steps that are remembered."""
SPANS = (20, 60, 200, RECENT)
"""Numbers of last steps over which the time left is estimated; the band is from the least to the most. The speed is
that of the first."""


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A step or a window that was done."""

    time: float
    step: int
    samples: float
    seconds: float


class Pace:
    def __init__(self) -> None:
        self._steps: deque[PacedStep] = deque(maxlen=RECENT)

    def add(self, time: float, step: int, samples: float, seconds: float) -> None:
        self._steps.append(PacedStep(time, step, samples, seconds))

    def clear(self) -> None:
        """Forget the steps: what comes next is no continuation of them, such as after a pause."""
        self._steps.clear()

    @property
    def rate(self) -> float | None:
        """Samples a second over the last steps; of one step alone, by how long that took."""
        steps = list(self._steps)[-SPANS[0] :]
        if not steps:
            return None
        if len(steps) == 1:
            return steps[0].samples / max(steps[0].seconds, 1e-9)
        return sum(step.samples for step in steps[1:]) / max(steps[-1].time - steps[0].time, 1e-9)

    def left_s(self, total: int) -> tuple[float, float, float] | None:
        """Estimate the seconds until step `total`, by the last steps; and the band, least and most."""
        steps = list(self._steps)
        if not total or not steps:
            return None
        left = max(0, total - steps[-1].step)
        if len(steps) == 1:
            return (left * steps[0].seconds,) * 3
        half = len(steps) // 2
        parts = [*(steps[-span:] for span in SPANS if span < len(steps)), steps, steps[: half + 1], steps[half:]]
        estimates = [
            left * (part[-1].time - part[0].time) / max(1, part[-1].step - part[0].step)  # a short window ends no step
            for part in parts
            if len(part) > 1
        ]
        return estimates[0], min(estimates), max(estimates)
