"""The learning rate over a run, counted in rows, so that it does not depend on how many workers there are. Pure."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over a run: a linear warm-up, then a cosine down to a floor."""

    warmup: float = 0.02
    """The share of the run over which the rate rises from zero to its peak."""
    floor: float = 0.1
    """Where the cosine ends, as a share of the peak; 1 keeps the rate constant after the warm-up."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a share of the run, in [0, 1), not {self.warmup}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is a share of the peak, in [0, 1], not {self.floor}")

    def factor(self, rows_seen: int, rows_total: int) -> float:
        """The share of the peak rate for the step that ends at `rows_seen`."""
        done = min(1.0, rows_seen / rows_total)
        if done < self.warmup:
            return done / self.warmup
        past_warmup = (done - self.warmup) / (1 - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * past_warmup))
