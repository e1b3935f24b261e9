"""LookSums: what rows came to that were only looked at: a loss, or figures of one's own by name."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from potluck.engine.losses import loss_and_samples
from potluck.errors import ConfigError
from potluck.events import LOSS

UNNAMED = ""
"""Name of the figure of a function that gave no names."""
MOST_FIGURES, MOST_NAME = 64, 100

Figures = float | dict[str, float]
"""The mean loss, or the mean of each figure by its name."""


@dataclass
class LookSums:
    sums: dict[str, float] = field(default_factory=dict)
    """Sum of each figure, weighted by samples; the loss, if there is one, is the first."""
    samples: float = 0.0

    def add(self, result: Any, batch: Any, *, counts: bool = True) -> None:
        """Add a function's result for a batch: a mean loss, a dictionary of means, or either with its samples."""
        found, samples = loss_and_samples(result, batch)
        figures = found if isinstance(found, dict) else {UNNAMED: found}
        for name in _loss_first(figures):
            value = figures[name]
            if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
                raise ConfigError(f"A function that is evaluated gives one number for each name, and {name!r} is none.")
            added = float(value) * samples if counts and samples else 0.0
            self.sums[name] = self.sums.get(name, 0.0) + added
        self._check(len(figures))
        self.samples += samples if counts else 0.0

    def _check(self, given: int) -> None:
        if len(self.sums) != given:
            raise ConfigError("A function that is evaluated gives the same names for every batch.")
        if given > MOST_FIGURES or any(not isinstance(name, str) or len(name) > MOST_NAME for name in self.sums):
            raise ConfigError(
                f"A function that is evaluated gives at most {MOST_FIGURES} figures, by names of at most"
                f" {MOST_NAME} characters."
            )

    @property
    def names(self) -> str:
        """Write the names as JSON, where there are any."""
        return json.dumps(list(self.sums)) if list(self.sums) != [UNNAMED] else ""

    @property
    def figures(self) -> list[float]:
        return list(self.sums.values()) or [0.0]

    def to_bytes(self) -> bytes:
        return json.dumps([self.sums, self.samples]).encode()


def add_up(told: Iterable[bytes]) -> LookSums:
    """Add up the sums of all workers, in order of rank. One that had no rows knows no names."""
    total = LookSums()
    for sums, samples in map(json.loads, told):
        for name, value in sums.items():
            total.sums[name] = total.sums.get(name, 0.0) + value
        total.samples += samples
    return total


def means_of(names: str, figures: Iterable[float], samples: float) -> Figures:
    """`names`: as LookSums tells them."""
    means = [figure / samples if samples else math.nan for figure in figures]
    return dict(zip(json.loads(names), means, strict=True)) if names else means[0]


def _loss_first(figures: dict[str, Any]) -> list[str]:
    if not figures:
        raise ConfigError("A function that is evaluated gave no figures: its dictionary is empty.")
    return sorted(figures, key=lambda name: name != LOSS)
