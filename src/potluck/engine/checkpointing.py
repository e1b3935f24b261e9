"""Checkpoints of a run beside the model's state: its position, Kept, and the methods by which a model saves itself."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from potluck.agree.records import Position
from potluck.agree.terms import differing_data
from potluck.data.loader import Loader
from potluck.errors import CheckpointError, ConfigError
from potluck.patches import replace_attribute
from potluck.save.parts import is_in_parts, saved_part
from potluck.save.saves import TENSORS, KeptTensors, Standing
from potluck.save.state import Tensors, tensors_json, tensors_of_json
from potluck.sharding.sharded import Sharded
from potluck.words import plural

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts
    from potluck.replica.replica import Replica

Save = Callable[[KeptTensors], Any]
"""Gives what JSON can hold, and puts tensors into the dictionary; None: this checkpoint has nothing under the name."""
Load = Callable[[Any, Tensors], None]
"""Takes what was saved under the name, or None where the checkpoint has nothing: it may be of an earlier version."""


class Kept:
    """State that a checkpoint keeps beside the model, saved and loaded under each name by its owner alone."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Save, Load]] = {}

    def add(self, name: str, save: Save, load: Load = lambda saved, tensors: None) -> None:
        """Registers an owner. Names are keys of every checkpoint ever written: one that is given out stays."""
        assert name not in self._pairs, name
        self._pairs[name] = save, load

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def save(self, tensors: KeptTensors) -> Standing:
        saved = {name: save(tensors) for name, (save, _) in self._pairs.items()}
        return {name: value for name, value in saved.items() if value is not None}

    def load(self, standing: Standing) -> None:
        """Calls each owner in the order in which they were registered, since later ones may look at earlier ones."""
        tensors = standing.get(TENSORS, {})
        tensors = tensors_of_json(tensors) if isinstance(tensors, str) else tensors
        for name, (_, load) in self._pairs.items():
            try:
                load(standing.get(name), tensors)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"What the checkpoint keeps as {name!r} is damaged: {error!r}.") from error


def take_position(run: "RunParts") -> tuple[Standing, KeptTensors]:
    """Where the run stands and what is kept beside the model, and the tensors among that."""
    tensors: KeptTensors = {}
    loader = run.loader
    position = run.progress.at
    saved = position.to_dict() | {
        "rows_in_epoch": loader.rows if loader is not None else 0,
        "seed": loader.seed if loader is not None else 0,
        "batch": loader.batch.size if loader is not None else 0,
        "data": run.data or {},
        "stream": loader.saved_stream() if loader is not None else [],
        "order": loader.order.digest(position.epoch, loader.seed) if loader is not None and position.row else "",
        "scheduler": None,
    }
    return saved | run.kept.save(tensors), tensors


def position_as_json(run: "RunParts") -> Standing:
    standing, tensors = take_position(run)
    return standing | {TENSORS: tensors_json(tensors)}


def check_position(run: "RunParts", path: Path, standing: Standing) -> None:
    """Checks a saved position before anything is loaded."""
    if run.scheduled is not None:
        run.scheduled.check(standing.get("scheduler"), str(path))
    if run.loader is not None and standing["rows_in_epoch"] not in (0, run.loader.rows):
        raise CheckpointError(
            f"{path} stands in an epoch of {plural(standing['rows_in_epoch'], 'row')}, and the data now has"
            f" {run.loader.rows:,}. Continue with the same data, or start anew in another folder."
        )
    if run.loader is not None and standing["row"] and standing.get("order"):
        own = run.loader.order.digest(standing["epoch"], standing["seed"])
        if own not in ("", standing["order"]):
            raise CheckpointError(
                f"{path} stands in the middle of epoch {standing['epoch'] + 1}, and the sampler now gives that epoch in"
                " another order: some rows would be used twice. Give the sampler the generator it had; one that counts"
                " its epochs itself needs set_epoch()."
            )


def restore_position(run: "RunParts", standing: Standing) -> None:
    """Moves the run to a saved position."""
    position = Position.from_dict(standing)
    run.progress.seek(position if run.loader is not None else replace(position, epoch=0, row=0, left=()))
    if run.loader is not None:
        _tell_of_changes(run, standing, run.loader)
        run.loader.restore(standing["seed"], standing.get("stream", []))
    run.kept.load(standing)
    run.state.tell_loaded()
    # What was trained before the checkpoint is rank 0's to tell, since those workers may be gone.
    run.progress.begin_ledger([(0, standing["row"])] if run.link.rank == 0 else [])


def _tell_of_changes(run: "RunParts", standing: Standing, loader: Loader) -> None:
    """Say what is not as it was when this was saved: that is allowed. Older checkpoints do not know all of it."""
    step, changes = standing["step"], []
    where = differing_data(standing.get("data", {}), run.data or {}, ("the checkpoint's", "yours"))
    if where is not None:
        changes.append(
            f"The data are OTHER DATA than those this run was trained on up to step {step}: as many rows, but"
            f" {where}. It continues with them. If that is not what you want, stop it, and give it the data it had."
        )
    if standing["seed"] != loader.seed:
        changes.append(
            f"This run was begun with seed {standing['seed']}, and keeps it: the order of its rows depends on it."
            f" Seed {loader.seed}, which was given now, is not used."
        )
    if standing.get("batch") not in (None, 0, loader.batch.size):
        changes.append(
            f"Batches had {standing['batch']:,} rows up to step {step}, and from here on {loader.batch.size:,}."
        )
    for sentence in changes:
        run.notice(sentence)


class _Shadow:
    """In place of one method of one model.

    A prepared model keeps its class, and so the methods of its library, which know nothing of what other workers hold.
    `save_pretrained`, `state_dict` and `load_state_dict` are shadowed on the one instance, and save and load all of it;
    its copies and what is pickled of it have their class's own again.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name
        self.plain: Callable[..., Any] = getattr(model, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, such as an average of its weights, saves itself: it has not got this when it asks."""
        return getattr, (self._model, self._name)


class _SavePretrained(_Shadow):
    def __init__(self, model: nn.Module, gather: Callable[[], dict[str, Any]], writes: Callable[[], bool]) -> None:
        super().__init__(model, "save_pretrained")
        self._gather, self._writes = gather, writes
        self._takes_state = "state_dict" in inspect.signature(self.plain).parameters

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it on every worker; the one that keeps the run's folder writes."""
        state = options.pop("state_dict", None)
        state = self._gather() if state is None else state
        if not self._writes():
            return None
        if self._takes_state:
            return self.plain(*arguments, state_dict=state, **options)
        own = vars(self._model)
        kept = {name: own[name] for name in ("state_dict",) if name in own}
        own["state_dict"] = lambda *told, **more: state
        try:
            return self.plain(*arguments, **options)
        finally:
            del own["state_dict"]
            own.update(kept)


class _PartsOfState(_Shadow):
    def __init__(self, model: nn.Module, notice: Callable[[str], None]) -> None:
        super().__init__(model, "state_dict")
        self._notice: Callable[[str], None] | None = notice

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._notice is not None:
            self._notice(
                "model.state_dict() gives what this worker holds, which is a part of the model. For all of it call"
                " fleet.state_dict() on every worker: rank 0 gets it, under the names that the model had."
            )
            self._notice = None
        return self.plain(*arguments, **options)


class _LoadWhole(_Shadow):
    """Loads whole weights, which all ranks are given alike, into a model that is split over ranks: each takes its
    part."""

    def __init__(self, model: nn.Module, replica: "Replica", sharded: Sharded) -> None:
        super().__init__(model, "load_state_dict")
        self._replica, self._sharded = replica, sharded

    def __call__(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        sharded = self._sharded
        if sharded is not self._replica.sharded:
            raise ConfigError(
                "model.load_state_dict() was called on a model that prepare() has cut into stages. Load weights before"
                " prepare(), or a checkpoint with fleet.load()."
            )
        tied = sharded.tied()
        firsts = {
            tied.get(name, name): tensor for name, tensor in state_dict.items() if tied.get(name) not in state_dict
        }
        parts = {name: tensor for name, tensor in firsts.items() if name in sharded.split}
        for name, tensor in parts.items():
            if tuple(tensor.shape) != (shape := sharded.split[name].shape):
                raise ConfigError(
                    f"model.load_state_dict() was given {name} of shape {tuple(tensor.shape)}, and the model's is"
                    f" {shape}."
                )
        rest = OrderedDict(
            (name, tensor) for name, tensor in state_dict.items() if tied.get(name, name) not in sharded.split
        )
        if hasattr(state_dict, "_metadata"):  # by which layers know the form of what they load, as spectral norms do
            vars(rest)["_metadata"] = state_dict._metadata
        loaded = self.plain(rest, strict=False)
        missing = [name for name in loaded.missing_keys if tied.get(name, name) not in parts]
        if strict and (missing or loaded.unexpected_keys):
            raise ConfigError(
                "model.load_state_dict() was given weights of another model:"
                f" {', '.join([*(f'{name} is missing' for name in missing), *loaded.unexpected_keys])}."
                " strict=False loads what there is."
            )
        with torch.no_grad(), self._replica.optimizer_writes():
            for run in (*sharded.runs, *sharded.rest):
                if (tensor := parts.get(run.span.name)) is not None:
                    part = tensor.detach().reshape(-1)[run.span.start : run.span.end]
                    run.parameter.copy_(part.view_as(run.parameter))
        return type(loaded)(missing, loaded.unexpected_keys)


def shadow_saving(
    run: "RunParts", plain_model: nn.Module, gather: Callable[[], dict[str, Any]], rank: Callable[[], int]
) -> None:
    """`plain_model`: the model as prepare() got it; of one that is cut, prepare() gives another back."""
    replica = run.prepared()
    if callable(getattr(plain_model, "save_pretrained", None)):
        saving = _SavePretrained(plain_model, gather, lambda: rank() == 0)
        for model in {plain_model, replica.model}:
            undo = replace_attribute(model, "save_pretrained", saving)
            if not is_in_parts(replica):
                replica.on_close.callback(undo)
    if is_in_parts(replica):
        notice = run.notice if run.speaks else lambda sentence: None
        part = saved_part(replica)
        for model in {plain_model, replica.model}:
            replace_attribute(model, "state_dict", _PartsOfState(model, notice))
            replace_attribute(model, "load_state_dict", _LoadWhole(model, replica, part))
