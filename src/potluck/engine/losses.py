"""Checks what a loss function gives, and what backward() takes, and refuses the rest in words."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from potluck.batch_shapes import rows_of
from potluck.engine.switches import in_float32
from potluck.errors import ConfigError

STEP_TOO_EARLY = (
    "step() was called before backward(). Call fleet.backward(loss, samples=...) first, in place of loss.backward(),"
    " which tells the other workers nothing."
)

LossFunction = Callable[[nn.Module, Any], Any]
"""Gives the mean loss over a batch's rows, or (mean loss, number of samples) where rows are not what is counted."""


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
