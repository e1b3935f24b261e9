"""The arguments of prepare(), models, optimizers, schedulers and data: taken as a run needs them, and checked.

Several models or optimizers are taken as one, and given back as they were. A model's numbers are its own, and its
shapes, its data and its settings the same on every worker. BatchNorm takes means over rows, of which a single one has
none: a person hears of that before the first step.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from potluck.agree.terms import SAME_DATA, Fingerprint, differing_data, differing_settings
from potluck.agree.turns import Turns
from potluck.data.loader import Loader
from potluck.engine.buffers import is_expanded
from potluck.engine.scheduled import RunScheduler, Scheduled, TurnSchedulers
from potluck.errors import ConfigError
from potluck.link.link import Link
from potluck.sharding.absent import own_state
from potluck.sharding.runs import sparse_gradient
from potluck.sharding.united_optimizers import JointOptimizer, TurnOptimizer, each_of
from potluck.words import plural

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts


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


def check_model(model: nn.Module) -> None:
    """Check a whole model: a stage of it may have nothing that is trained."""
    check_own_memory(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("The model has no parameter that requires a gradient, so there is nothing to train.")


def check_no_writes(model: nn.Module) -> None:
    """Refuses layers that write their weight in forward, where several workers hold it or parts of it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'The model'} is an embedding with max_norm, which scales rows of its weight in each forward:"
                " on each worker those of its own rows. Leave max_norm out, and scale what it gives in the model's own"
                " forward(), such as by x * (limit / x.norm(dim=-1, keepdim=True)).clamp(max=1); or train on one worker"
                " with NoShard."
            )


def check_dense(model: nn.Module) -> None:
    """Refuses layers whose gradients are sparse, where those are to be added to others'."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(sparse_gradient(f"{name}.weight".lstrip(".")))


def check_optimizer(optimizer: Optimizer, names: Container[int]) -> None:
    """Refuses an optimizer of another model's parameters, and one that a step cannot step. `names`: ids of ours."""
    if any(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "The optimizer holds a parameter that is not one of the model's. Make the optimizer from"
            " model.parameters() of the model that you pass here. If it is a loss function's, such as a learned"
            " temperature, pass both: model, criterion = prepare([model, criterion], optimizer, ...)[0]; a bare"
            " nn.Parameter as nn.ParameterList([parameter])."
        )
    if any(isinstance(each, LBFGS) for each in each_of(optimizer)):
        raise ConfigError("LBFGS evaluates the loss many times within one step, which step() cannot do.")


def check_own_memory(model: nn.Module) -> None:
    """Refuses parameters whose elements share memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} has no shape yet: its layer is a lazy one, such as nn.LazyLinear, which takes its shape from"
                " the first batch. Run a batch through the model before prepare()."
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{name} has a shape and no numbers: it is on the device meta. Make it real before prepare(), with"
                " model.to_empty(device=...), and initialise it or load its weights."
            )
    for name, parameter in model.named_parameters():
        if is_expanded(parameter):
            raise ConfigError(
                f"The parameter {name} is expanded: several of its numbers share one place in memory, and no optimizer"
                " can step them. Give it memory of its own with nn.Parameter(tensor.expand(...).clone()), or keep the"
                " small tensor as the parameter and expand it in forward()."
            )


def check_same_model(model: nn.Module, link: Link) -> None:
    """A collective."""
    state = own_state(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    mine = [
        [name, list(tensor.shape), str(tensor.dtype) + (", frozen" if name in frozen else "")]
        for name, tensor in state.items()
    ]
    for rank, theirs in enumerate(map(json.loads, link.gather_bytes(json.dumps(mine).encode()))):
        if theirs != mine:
            first = next((a, b) for a, b in _padded(mine, theirs) if a != b)
            raise ConfigError(
                f"The model differs between workers: on worker {link.rank} it has {_tell(first[0])}"
                f" where worker {rank} has {_tell(first[1])}. Build the same model on every worker."
            )


def _padded(a: list[Any], b: list[Any]) -> list[tuple[Any, Any]]:
    longest = max(len(a), len(b))
    return list(zip(a + [None] * (longest - len(a)), b + [None] * (longest - len(b)), strict=True))


def _tell(entry: list[Any] | None) -> str:
    return f"{entry[0]} {tuple(entry[1])} {entry[2]}" if entry else "nothing more"


def find_batch_norm(model: nn.Module) -> str | None:
    """The name and kind of a layer that cannot be trained by a single value of each channel; none: there is no such."""
    found = (each for each in model.named_modules() if isinstance(each[1], nn.modules.batchnorm._BatchNorm))
    return next((f"{name} ({type(module).__name__})" for name, module in found), None)


@contextmanager
def explain_single_rows() -> Iterator[None]:
    """Turns torch's error about a batch of one row into a sentence that says what to do."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise ConfigError(
            f"BatchNorm was to be trained by a single row, of which it can take no mean ({error}). Choose batches and"
            " micro-batches of at least two rows for each worker, and one size that does not leave a single row at the"
            " end of the data; or use LayerNorm or GroupNorm."
        ) from None


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
