"""Remembers a run's validations: the best one, and how many were not better since. Pure."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class Validations:
    count: int = 0
    best: float = math.nan
    best_step: int = -1
    since_best: int = 0
    """Validations since the best one."""
    last_step: int = -1

    def take(self, step: int, loss: float | None) -> bool:
        """Whether it is the best so far."""
        if step == self.last_step:  # a run that was resumed at its end looks once more
            return False
        self.count, self.last_step = self.count + 1, step
        if loss is None:
            return False
        is_best = loss < self.best or (math.isnan(self.best) and not math.isnan(loss))
        self.since_best = 0 if is_best else self.since_best + 1
        if is_best:
            self.best, self.best_step = loss, step
        return is_best

    @property
    def best_loss(self) -> float | None:
        """None where no validation had a loss."""
        return self.best if self.best_step >= 0 else None

    def is_out_of(self, patience: int | None) -> bool:
        return patience is not None and self.since_best >= patience

    def follow(self, others: list[dict[str, Any]]) -> None:
        """Take over the state of the worker that has seen the most: a newcomer may have missed some."""
        seen = max(others, key=lambda other: other["count"])
        if seen["count"] > self.count:
            self.__dict__.update(seen)


def needs_loss(names: list[str]) -> str:
    """Say what to do to a person whose validations give figures of these names, and who wants to know the best of
    them."""
    return (
        f"fit.patience and checkpoint.best go by the validation loss, and validate gave {', '.join(names)}. Name one of"
        ' its figures "loss", of which lower is better; of an accuracy that is 1 - accuracy. The run is saved as it is.'
    )
