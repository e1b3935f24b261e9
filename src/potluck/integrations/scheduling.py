"""Schedulers of other loops: a fleet steps one with every step of the run, and these move otherwise, or ask."""

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def by_epochs(scheduler: LRScheduler, per_epoch: int) -> LRScheduler:
    """One that is stepped with every step of the run, and moves with every epoch."""
    kind: Any = type(scheduler)

    def step(self: Any, *told: Any, **more: Any) -> None:
        self.steps_of_run += 1
        if self.steps_of_run % per_epoch == 0:
            kind.step(self)

    scheduler.steps_of_run = 0  # type: ignore[attr-defined]
    return _with_step(scheduler, step)


def heard(scheduler: LRScheduler, hear: Callable[[], None]) -> LRScheduler:
    """A prepared one, whose step() does nothing: `hear` is called when the script calls it."""
    return _with_step(scheduler, lambda self, *told, **more: hear())


def _with_step(scheduler: LRScheduler, step: Callable[..., None]) -> LRScheduler:
    """Replace step() by way of the class: what lies in the object is a part of its state."""
    kind: Any = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    return scheduler
