"""LossScale: what a loss is multiplied by before its backward, so that gradients of fp16 neither vanish nor overflow.

It is a power of two, so that it changes no digit of a gradient that fits. It falls with a step that is not finite, and
rises after many that are, as torch's GradScaler does. All who step together decide alike, and so have the same. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FIRST, RISES_AFTER = 2.0**16, 2000
LEAST, MOST = 2.0**-8, 2.0**40
"""Below the least, a step that is not finite counts as one, and enough of them in a row end the run."""


@dataclass
class LossScale:
    is_on: bool = False
    value: float = FIRST
    """Scale of the mean loss over a step's samples."""
    good: int = 0
    """Steps since it changed."""
    samples_per_row: float = 1.0
    """About how many there were in the last step, as a power of two: a gradient is a sum over samples, for each of
    which there is one over the rows of a batch in it."""

    @property
    def factor(self) -> float:
        """Return the factor of a loss that is weighted by its samples and by OpenStep.unit."""
        return self.value / self.samples_per_row if self.is_on else 1.0

    @property
    def may_fall(self) -> bool:
        return self.is_on and self.value > LEAST

    def rise(self) -> None:
        """A step was finite."""
        self.good += 1
        if self.good >= RISES_AFTER:
            self.value, self.good = min(MOST, 2 * self.value), 0

    def fall(self) -> bool:
        """A step was not; whether the scale may have been too high for it."""
        if not self.may_fall:
            return False
        self.value, self.good = self.value / 2, 0
        return True

    def learn(self, samples: float, rows: float) -> None:
        """From a step that is over, on all who took it alike."""
        if self.is_on and samples > 0 and rows > 0 and math.isfinite(samples):
            self.samples_per_row = 2.0 ** round(math.log2(samples / rows))

    def agree(self, values: Sequence[float]) -> None:
        """Replicas that stepped by themselves, each with its own, may step together next: the lowest is everybody's."""
        lowest = min(values)
        if self.is_on and lowest != self.value:
            self.value, self.good = lowest, 0

    def standing(self) -> list[float] | None:
        return [self.value, self.good, self.samples_per_row] if self.is_on else None

    def restore(self, saved: Sequence[float] | None) -> None:
        value, good, samples_per_row = saved if saved is not None else (FIRST, 0, 1.0)
        self.value, self.good, self.samples_per_row = float(value), int(good), float(samples_per_row)


def most_falls(steps: int) -> int:
    """How often at most the scale of a run of so many steps can have fallen, from its first value and each rise."""
    return round(math.log2(FIRST / LEAST)) + steps // RISES_AFTER
