"""Takes what prepare() was given, models, optimizers and schedulers, as one of each; and gives it back as it was."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from potluck.agree.turns import Turns
from potluck.engine.scheduled import RunScheduler, Scheduled, TurnSchedulers
from potluck.errors import ConfigError
from potluck.sharding.united_optimizers import JointOptimizer, TurnOptimizer, each_of
from potluck.words import plural


class ListOfModels(nn.ModuleList):
    """Several as one, which nobody calls: each of them is a unit of its own where models are split."""

    holds_models = True

    def forward(self) -> None:
        raise NotImplementedError("call one of the models")


class TableOfModels(nn.ModuleDict):
    holds_models = True
    forward = ListOfModels.forward


class Given:
    def __init__(self, model: Any, optimizer: Any, scheduler: Any, turns: Turns) -> None:
        self._models, self._optimizers = model, optimizer
        self.model: nn.Module = _as_one_model(model)
        self.optimizer: Optimizer = optimizer
        self.scheduled: Scheduled | None = None
        if not _is_several(optimizer) and not isinstance(optimizer, JointOptimizer):
            self.scheduled = RunScheduler(scheduler, optimizer) if scheduler is not None else None
            return
        if isinstance(optimizer, JointOptimizer):
            each = each_of(optimizer)
        else:
            each = list(optimizer.values()) if isinstance(optimizer, Mapping) else list(optimizer)
            self.optimizer = TurnOptimizer(each, turns)
            turns.count = len(each)
        schedulers = [_own(scheduler, turn, one, each) for turn, one in enumerate(each)]
        self.scheduled = TurnSchedulers(schedulers, turns) if any(schedulers) else None

    def back(self, model: nn.Module) -> tuple[Any, Any]:
        """The prepared model, and the optimizers, in the form in which they were given."""
        if isinstance(self._models, Mapping):
            return dict(model.items()), self._optimizers  # type: ignore[operator]
        return list(model) if _is_several(self._models) else model, self._optimizers  # type: ignore[call-overload]


def _is_several(given: Any) -> bool:
    return isinstance(given, list | tuple) or (isinstance(given, Mapping) and not isinstance(given, nn.Module))


def _as_one_model(model: Any) -> Any:
    if not _is_several(model):
        return model
    models = list(model.values()) if isinstance(model, Mapping) else list(model)
    if not models or not all(isinstance(each, nn.Module) for each in models):
        kinds = ", ".join(type(each).__name__ for each in models) or "nothing"
        raise ConfigError(f"prepare() takes a torch.nn.Module, or several in a list or a dict, not one of {kinds}.")
    return TableOfModels(model) if isinstance(model, Mapping) else ListOfModels(models)


def _own(scheduler: Any, turn: int, optimizer: Optimizer, every: list[Optimizer]) -> RunScheduler | None:
    """This optimizer's, of a list with one for each, or None; or of a single one, which is one of theirs."""
    if isinstance(scheduler, list | tuple):
        if len(scheduler) != len(every):
            raise ConfigError(
                f"scheduler= has {plural(len(scheduler), 'scheduler')}, and there are {len(every)} optimizers. Give"
                " each of them one, in the same order; None for one that has none."
            )
        scheduler = scheduler[turn]
    elif getattr(scheduler, "optimizer", None) in every and scheduler.optimizer is not optimizer:
        return None
    return RunScheduler(scheduler, optimizer) if scheduler is not None else None
