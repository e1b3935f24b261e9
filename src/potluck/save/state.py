"""A model's, an optimizer's and the generators' state, as tensors in host memory and JSON. Nothing is pickled."""

import base64
import json
import random
import zlib
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from potluck.devices import random_states, set_random_states
from potluck.errors import CheckpointError, ConfigError
from potluck.sharding.absent import own_state
from potluck.sharding.optimizer_traits import FIRST
from potluck.sharding.ranges import Spec
from potluck.sharding.united_optimizers import each_of
from potluck.tensor_bytes import from_bytes, to_bytes

MOST_RANDOM_BYTES = 1 << 24
"""The most bytes of a worker's random state, unpacked."""


Described = Tensor | Spec
"""A tensor, or what a file says of one."""


class Tensors(Protocol):
    """Tensors by name: in a dictionary, or read when they are asked for."""

    def __getitem__(self, name: str, /) -> Tensor: ...


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """A copy in host memory of all that the model's state_dict holds."""
    return {name: to_host(tensor) for name, tensor in own_state(model).items()}


def check_model(own: Mapping[str, Described], saved: Mapping[str, Described], source: str) -> None:
    """Refuse a checkpoint of another model: name the first parameter that differs. Nothing has been changed by then."""
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(f"{source} is of another model: it has no parameter {name}.")
        if tuple(saved[name].shape) != tuple(tensor.shape) or saved[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{source} is of another model: its {name} is {_shape(saved[name])}, and this model's is"
                f" {_shape(tensor)}."
            )
    for name in saved:
        if name not in own:
            raise CheckpointError(f"{source} is of another model: its parameter {name} is not in this one.")


def check_optimizer(optimizer: Optimizer, names: list[list[str]], skeleton: dict[str, Any]) -> None:
    """`names`: of the parameters in each of its groups. Changes nothing."""
    if skeleton["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"The checkpoint holds the state of {skeleton['class']}, and this run uses {type(optimizer).__name__}."
        )
    groups = skeleton["groups"]["list"]
    if [group["dict"]["params"]["list"] for group in groups] != names:
        raise CheckpointError("The checkpoint's optimizer has other parameter groups than this run's.")


def random_state() -> bytes:
    """The state of every generator that a training step may draw from, on this rank."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": _json_tensor([version, gauss]),
        "python words": from_bytes(np.array(internal, np.uint32).tobytes()),
        "numpy": _json_tensor([kind, *rest]),
        "numpy words": from_bytes(np.asarray(keys, np.uint32).tobytes()),
    }
    return zlib.compress(save(states | random_states()), 9)  # beside a small adapter it is not little


def set_random_state(data: bytes) -> None:
    is_older = data[8:9] == b"{"  # as it was saved by earlier versions, with numbers as text
    states = load(data if is_older else zlib.decompressobj().decompress(data, MOST_RANDOM_BYTES))
    torch.set_rng_state(states["torch"])
    if is_older:
        version, internal, gauss = _tensor_json(states["python"])
        kind, keys, *rest = _tensor_json(states["numpy"])
    else:
        (version, gauss), (kind, *rest) = _tensor_json(states["python"]), _tensor_json(states["numpy"])
        internal, keys = (np.frombuffer(to_bytes(states[f"{name} words"]), np.uint32) for name in ("python", "numpy"))
    random.setstate((version, tuple(map(int, internal)), gauss))
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    set_random_states(states)


class CodedParts(dict[str, Any]):
    """The tensors that make up one which codes its numbers in its own way, as torchao's optimizers keep them."""


def load_state(optimizer: Optimizer, groups: list[dict[str, Any]], states: dict[int, dict[str, Any]]) -> None:
    """`states`: by the place of a parameter in all groups. What is coded is not the optimizer's to cast."""
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    plain = {
        i: {key: _laid_out(value, order[i]) for key, value in known.items() if not isinstance(value, CodedParts)}
        for i, known in states.items()
    }
    optimizer.load_state_dict({"param_groups": groups, "state": plain})
    for i, known in states.items():
        for key, parts in known.items():
            if isinstance(parts, CodedParts):
                optimizer.state[order[i]][key] = _coded_again(optimizer, order[i], key, parts)


def _laid_out(value: Any, parameter: Tensor) -> Any:
    """The numbers of each element lie where the parameter has that element: fused kernels go through the memory of all
    alike, and would step a weight in channels_last by another's moments."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _coded_again(optimizer: Optimizer, parameter: Tensor, key: str, parts: CodedParts) -> Tensor:
    for each in each_of(optimizer):
        make = getattr(each, "_new_buffer", None)
        if make is not None and any(parameter is own for group in each.param_groups for own in group["params"]):
            coded: Tensor = make(parameter, key in FIRST)  # the others have no sign
            for name, tensor in parts.items():
                getattr(coded, name).copy_(tensor)
            return coded
    raise CheckpointError(f"The checkpoint's {key} is coded in a way of {type(optimizer).__name__} that is not known.")


def to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def flatten(value: Any, key: str, tensors: dict[str, Tensor] | None, whose: str = "The optimizer's ") -> Any:
    """JSON in which each tensor is replaced by its key in `tensors`; none: only to see whether it can be."""
    match value:
        case Tensor() if hasattr(value, "device_mesh"):  # a DTensor, whose other parts lie with other ranks
            raise CheckpointError(
                f"{whose}{key} is a part of a tensor that is split over ranks. Keep whole tensors there, such as those"
                " that fleet.state_dict() gives on rank 0."
            )
        case Tensor() if is_traceable_wrapper_subclass(value):
            parts = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
            return {"coded": {name: flatten(part, f"{key}/{name}", tensors, whose) for name, part in parts.items()}}
        case Tensor() if value.layout == torch.strided:
            while tensors is not None and key in tensors:  # {"a/b": x, "a": {"b": y}}
                key += "'"
            if tensors is not None:
                tensors[key] = to_host(value)
            return {"tensor": key}
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [flatten(item, f"{key}/{i}", tensors, whose) for i, item in enumerate(value)]}
        case dict() if all(isinstance(name, str) for name in value):
            return {"dict": {name: flatten(item, f"{key}/{name}", tensors, whose) for name, item in value.items()}}
        case dict():  # JSON has names alone for keys
            pairs = enumerate(value.items())
            return {"items": [[flatten(part, f"{key}/{i}", tensors, whose) for part in pair] for i, pair in pairs]}
    raise CheckpointError(
        f"{whose}{key} is a {type(value).__name__}, which has no place in a checkpoint that is never pickled."
        " Tensors, numbers, strings, lists and dictionaries have."
    )


def unflatten(value: Any, tensors: Tensors) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: unflatten(item, tensors) for key, item in content.items()}
        case "coded":
            return CodedParts({key: unflatten(item, tensors) for key, item in content.items()})
        case "items":
            return {unflatten(name, tensors): unflatten(item, tensors) for name, item in content}
        case "list":
            return [unflatten(item, tensors) for item in content]
        case "tuple":
            return tuple(unflatten(item, tensors) for item in content)
    raise CheckpointError(f"The checkpoint's state holds an unknown kind {kind!r}.")


def tensors_json(tensors: dict[str, Tensor]) -> str:
    """Convert few and small tensors to JSON, where there is no file to put them into."""
    return base64.b64encode(save(tensors)).decode() if tensors else ""


def tensors_of_json(text: str) -> dict[str, Tensor]:
    return load(base64.b64decode(text)) if text else {}


def _json_tensor(value: Any) -> Tensor:
    return from_bytes(json.dumps(value).encode())


def _tensor_json(tensor: Tensor) -> Any:
    return json.loads(to_bytes(tensor))


def _shape(tensor: Described) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


NAME = "fleet.state"


class UserState(UserDict[str, Any]):
    """Numbers, strings, lists, tuples, dictionaries and tensors, by name. Refuses at once what cannot be kept.

    Every worker has its own, and should put the same there: kept is that of the worker who saves. Tensors come back in
    host memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pairs: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def add_pair(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Asks `save` for the value whenever a checkpoint is taken, and gives it to `load` wherever one was loaded."""
        self._pairs[name] = save, load

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"{NAME} has names for keys, not {name!r}.")
        try:
            flatten(value, f"{NAME}/{name}", None, "")
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        except RecursionError:
            raise ConfigError(f"{NAME}/{name} holds itself, and has no end that could be kept.") from None
        self.data[name] = value

    def __repr__(self) -> str:
        return f"{NAME} {self.data!r}"

    def save(self, tensors: dict[str, Tensor]) -> Any:
        """Return what is kept as JSON; its tensors go into `tensors`."""
        for name, (save_one, _) in self._pairs.items():
            self[name] = save_one()
        return flatten(self.data, NAME, tensors, "")

    def load(self, saved: Any, tensors: Tensors) -> None:
        """Replace values here by those that were kept; values that are only here stay."""
        if saved is None:  # a checkpoint of an earlier version
            return
        values = unflatten(saved, tensors)
        if not isinstance(values, dict):
            raise TypeError(f"{NAME} is a table, not a {type(values).__name__}")
        self.data |= values

    def tell_loaded(self) -> None:
        """Calls what is the user's own, so its errors are not those of a damaged checkpoint."""
        for name, (_, load_one) in self._pairs.items():
            load_one(self.data.get(name))
