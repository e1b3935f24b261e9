"""The arguments of prepare(), models, optimizers, schedulers and data: taken as a run needs them, and checked.

Several models or optimizers are taken as one, and given back as they were. Data and settings are the same on every
worker. BatchNorm takes means over rows, of which a single one has none: a person hears of that before the first step.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.terms import SAME_DATA, Fingerprint, differing_data, differing_settings
from potluck.agree.turns import Turns
from potluck.data.loader import Loader
from potluck.data.source import DataSource
from potluck.engine.scheduled import RunScheduler, Scheduled, TurnSchedulers
from potluck.errors import ConfigError
from potluck.sharding.united_optimizers import JointOptimizer, TurnOptimizer, each_of
from potluck.words import plural

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts


def of_one_dataset(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses with a sentence what stands behind the dataset and has no name."""

    @wraps(prepare)
    def prepared(fleet: Any, *given: Any, **named: Any) -> Any:
        if more := given[3:]:
            raise ConfigError(
                "prepare() takes a model, an optimizer and the data to train on, and was given"
                f" {plural(len(more), 'argument')} more: {', '.join(type(each).__name__ for each in more)}. Data for"
                " validation go to fleet.evaluate() as they are, a scheduler to scheduler=, and all else has a name,"
                " such as batch_size=32."
            )
        return prepare(fleet, *given, **named)

    return prepared


class ListOfModels(nn.ModuleList):
    """Several as one, which nobody calls: each of them is a unit of its own where models are split."""

    holds_models = True

    def forward(self) -> None:
        raise NotImplementedError("call one of the models")


class TableOfModels(nn.ModuleDict):
    holds_models = True
    forward = ListOfModels.forward


class Given:
    """Models, optimizers and schedulers, as one of each."""

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


def warn_of_single_rows(layer: str, loader: Loader, pipelines: int, notice: Callable[[str], None]) -> None:
    """Warns, before the first step, of single rows that no plan can avoid."""
    size, micro = loader.batch.size, loader.batch.micro_size
    if micro == 1:
        where, advice = "micro-batches have 1 row", "make them larger"
    elif size < 2 * pipelines:
        where, advice = f"some of {plural(pipelines, 'worker')} have 1 row of a batch of {size}", "use more rows"
    elif loader.order.has_gaps:
        where, advice = "the sampler's batches have many sizes, so that a worker may have 1 row", "use larger ones"
    elif loader.rows % size == 1:
        where, advice = f"the last of {loader.rows:,} rows is a batch by itself", "leave it out, or change the size"
    else:
        return
    notice(
        f"{layer} takes means over the values of a channel, and {where}. Unless rows have several values of each"
        f" channel, as images have, the run stops there: {advice}."
    )


def training_settings(optimizer: Any, clip: float | None, wire: str = "fp32") -> dict[str, Any]:
    """Return what an optimizer does to a gradient, and before it: by name, and a list where its groups differ."""
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__, "step.clip": clip}
    if wire != "fp32":  # else it is not told, as by an older version
        settings["wire"] = wire
    groups = getattr(optimizer, "param_groups", [])
    for name in sorted({name for group in groups for name in group} - _OWN_AFFAIRS):
        values = [_plain(group.get(name)) for group in groups]
        if None not in values:
            settings[f"optimizer.{name}"] = values[0] if all(value == values[0] for value in values) else values
    return settings


_OWN_AFFAIRS = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Settings of an optimizer's group that say how this machine computes a step, not what it computes."""


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; None if it cannot."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return None if None in items else items
    return value if isinstance(value, bool | int | str | float) else None


def check_same_data(run: "RunParts", loader: Loader) -> None:
    """Workers that planned different steps would wait for each other forever, and none may train on other rows."""
    data, training, own_rank = (
        run.look_at_data(loader.dataset, elsewhere=loader.fetching if loader.batch.fetchers else None),
        run.loop.training,
        run.link.rank,
    )
    mine = f"{plural(loader.rows, 'row')} in batches of {loader.batch.size:,}, {loader.order.tell(loader.seed)}"
    told = run.link.gather_bytes(json.dumps([mine, data, training]).encode())
    for rank, (theirs, other_data, other_training) in enumerate(map(_terms, told)):
        if theirs != mine:
            raise ConfigError(
                f"The data differs between workers: worker {own_rank} has {mine}, and worker {rank}"
                f" {theirs}. Give every worker the whole dataset, in the same order; it is shared out here."
            )
        where = differing_data(data, other_data, (f"worker {own_rank}'s", f"worker {rank}'s"))
        if where is not None:
            raise ConfigError(f"Worker {own_rank} and worker {rank} have as many rows, but {where}. {SAME_DATA}")
        for name, (own, other) in differing_settings(training, other_training).items():
            raise ConfigError(
                f"Worker {own_rank} has {name} = {own}, and worker {rank} has {other}. Give every worker the same"
                " optimizer and settings."
            )


def _terms(told: bytes) -> tuple[str, Fingerprint, dict[str, Any]]:
    """Read what a worker says of its data; one of an older version, whose words a store has kept, said but the
    first."""
    try:
        rows, data, training = json.loads(told)
    except ValueError:
        return told.decode(), {}, {}
    return rows, data, training


def accumulated(
    run: "RunParts", source: DataSource, accumulate: int, micro_size: int | None
) -> tuple[DataSource, int | None]:
    """The data in steps of so many batches, and how many rows of one go through the model of a worker at once."""
    if not source.batch_size:
        raise ConfigError(
            "prepare() needs a batch_size: the rows of one step over all workers together, such as batch_size=32."
        )
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ConfigError(f"accumulate= is how many batches make one step, at least 1, not {accumulate!r}.")
    if accumulate == 1:
        return source, micro_size
    if micro_size is not None and run.wanted.stages is None:
        raise ConfigError(
            "accumulate= and micro_batch_size= both say how a step is cut. With accumulate=4 a step has 4 batches of"
            " batch_size; with micro_batch_size= it has one. Leave out one of them."
        )
    if run.wanted.stages is None:
        micro_size = source.batch_size if run.wanted.has_host else -(-source.batch_size // run.grid.pipelines)
    return replace(source, batch_size=source.batch_size * accumulate), micro_size
