"""Loss functions, and functions that are only evaluated: checks of what they give, and LookSums, which adds it up.

What is refused is refused in words. backward() takes its loss by the same checks.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from potluck.batch_shapes import rows_of
from potluck.errors import ConfigError
from potluck.events import LOSS
from potluck.replica.precision import in_float32

STEP_TOO_EARLY = (
    "step() was called before backward(). Call fleet.backward(loss, samples=...) first, in place of loss.backward(),"
    " which tells the other workers nothing."
)
STEP_TWICE = (
    "step() was called without a backward() since the last step. Call fleet.backward(loss, samples=...) before it, in"
    " place of loss.backward(), and only one of fleet.step() and optimizer.step(): after prepare() they are the same."
)

LossFunction = Callable[[nn.Module, Any], Any]
"""Gives the mean loss over a batch's rows, or (mean loss, number of samples) where rows are not what is counted."""

UNNAMED = ""
"""Name of the figure of a function that gave no names."""
MOST_FIGURES, MOST_NAME = 64, 100
Figures = float | dict[str, float]
"""The mean loss, or the mean of each figure by its name."""


def check_mean(loss: Any, samples: float) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(f"backward() takes the mean loss, a tensor of one number, not {_tell(loss)}.")
    if not (math.isfinite(samples) and samples >= 0):
        raise ConfigError(f"backward() takes how many samples the loss is a mean over, not {samples}.")
    if samples:
        check_grad(loss)
    return in_float32(loss)


def check_grad(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ConfigError(
            "The loss has no gradient: no parameter that is trained had a part in it. It was detached (.detach(),"
            " .item(), .data, torch.tensor(loss)), or computed under torch.no_grad() or with frozen parameters alone."
        )


def loss_and_samples(result: Any, batch: Any) -> tuple[Any, float]:
    """Read what a loss function gave: a mean over the batch's rows, or (mean, how many samples it is over)."""
    if not isinstance(result, tuple):
        return result, float(rows_of(batch))
    if len(result) != 2 or not (isinstance(result[1], int | float) or getattr(result[1], "numel", lambda: 0)() == 1):
        raise ConfigError(
            "A loss function returns the mean loss over the batch's rows, or (mean loss, number of samples), not"
            f" {_tell(result)}."
        )
    samples = float(result[1])
    if not (math.isfinite(samples) and samples >= 0):
        raise ConfigError(f"A loss function says over how many samples its mean is, and {samples} is no such number.")
    return result[0], samples


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Layers behave as they do when nothing is trained."""
    were_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in were_training:
            module.training = True


def _tell(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


@dataclass
class LookSums:
    """Sums over rows that were only looked at: of a loss, or of figures of one's own by name."""

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
