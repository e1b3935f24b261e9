"""Shadows a prepared model's own `save_pretrained`, `state_dict` and `load_state_dict`: they save and load all of it.

A model keeps its class, and so the methods of its library, which know nothing of what other workers hold. They are
shadowed on the one instance; its copies and what is pickled of it have their class's own again.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from potluck.engine.replica import Replica
from potluck.engine.run_state import RunState
from potluck.errors import ConfigError
from potluck.patches import replace_attribute
from potluck.save.saves import saved_part
from potluck.save.whole_state import is_in_parts
from potluck.sharding.sharded import Sharded


class _Shadow:
    """In place of one method of one model."""

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

    def __init__(self, model: nn.Module, replica: Replica, sharded: Sharded) -> None:
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
    run: RunState, plain_model: nn.Module, gather: Callable[[], dict[str, Any]], rank: Callable[[], int]
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
