"""Parameters without numbers: those of a block that is not gathered, as a loop sees them between forwards.

Shapes, types and gradients can be asked for. Whatever would read or write numbers, and would find NaN or be lost, is
refused with a sentence that names the parameter and what to do instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from potluck.errors import ConfigError

VIEWS = {Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real, Tensor.imag}
"""Attributes that give numbers."""
SETTABLE = {Tensor.grad, Tensor.requires_grad}
QUESTIONS = {
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_signed,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.register_hook,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.stride,
    torch._has_compatible_shallow_copy_type,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
}
"""Functions that need no numbers."""


quiet: Callable[..., Any] = torch.compiler.disable
"""Keeps a hook of ours out of what is compiled."""


class AbsentParameter(nn.Parameter):
    """The class of a parameter while its block is not gathered; its own comes back with its numbers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if _needs_no_numbers(func, args):
                return func(*args, **(kwargs or {}))
            if func is Tensor.to and (found := func(*args, **(kwargs or {}))) is args[0]:
                return found  # model.to() of the device where it is
        for each in tree_leaves((args, kwargs or {})):
            if isinstance(each, AbsentParameter):
                if func is Tensor.register_post_accumulate_grad_hook:
                    refuse_hook(each)
                raise ConfigError(outside(each))
        raise AssertionError(func)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter {name_of(self)}, split over ranks, {tuple(self.shape)}"


class WatchedParameter(nn.Parameter):
    """The class of one that is whole from a forward to its backward: its version counts writes to `.data` too."""

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        refuse_write(self)


@dataclass(frozen=True, slots=True)
class SplitPlace:
    """The place where a module has a split parameter, and what we put there."""

    module: nn.Module
    attribute: str
    name: str
    holds: Callable[[object], bool]

    def check(self) -> None:
        if not self.holds(self.module._parameters.get(self.attribute)):
            raise ConfigError(
                f"{self.name} was replaced by another tensor, as by torch.func.functional_call. It is split over ranks,"
                " and its forward would compute with the numbers of the ranks instead. Use ShardGradOp or NoShard,"
                " which keep parameters whole."
            )


def refuse_replacements(module: nn.Module, places: Sequence[SplitPlace]) -> None:
    """Check these places before each forward of the module, which gathers them: nobody may have replaced a
    parameter."""

    def check(module: nn.Module, args: Any) -> None:
        for place in places:
            place.check()

    module.register_forward_pre_hook(quiet(check), prepend=True)


def name_parameter(parameter: Tensor, name: str) -> None:
    """Set the name by which refusals call this parameter."""
    parameter._name_of_split = name  # type: ignore[attr-defined]


def name_of(parameter: Tensor) -> str:
    return getattr(parameter, "_name_of_split", "a parameter")


def _needs_no_numbers(func: Any, args: Any) -> bool:
    attribute, kind = getattr(func, "__self__", None), getattr(func, "__name__", "")
    if kind == "__get__":
        return attribute not in VIEWS
    if kind == "__set__":
        return attribute in SETTABLE or (attribute is Tensor.data and args[0] is args[1])
    return func in QUESTIONS


def refuse_hook(parameter: Tensor) -> NoReturn:
    raise ConfigError(
        f"A hook was registered on {name_of(parameter)} after prepare(), which has split it over ranks: it would not be"
        " called. Register hooks on parameters before prepare()."
    )


def watch(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = WatchedParameter


def check_unwritten(parameters: Iterable[tuple[Tensor, int]]) -> None:
    """Check that none of these gathered parameters was written since it had its version, and stop watching them."""
    for parameter, version in parameters:
        if type(parameter) is WatchedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        if parameter._version != version:
            refuse_write(parameter)


def refuse_write(parameter: Tensor) -> NoReturn:
    raise ConfigError(
        f"{name_of(parameter)} was written after a forward, before its backward. It is split over ranks, and whole for"
        " that time alone, so that the write would be lost. Write weights before prepare(), or call"
        " model.load_state_dict() with whole weights on every worker between steps; or use ShardGradOp or NoShard,"
        " which keep parameters whole."
    )


def outside(parameter: Tensor) -> str:
    return (
        f"{name_of(parameter)} was used outside of its module's forward. It is split over ranks, and whole only while"
        " the module that owns it computes. To read weights between steps, call fleet.state_dict() on every worker:"
        " rank 0 gets all of them. To write them, do so before prepare(), or call model.load_state_dict() with"
        " whole weights on every worker. For a loss that uses them, use them within that module's forward(), or use"
        " ShardGradOp or NoShard, which keep parameters whole; weight decay is the optimizer's."
    )


def refuse_copy(memo: Any) -> NoReturn:
    raise ConfigError(
        "A model that is split over ranks cannot be copied. Copy it before prepare(), and load what fleet.state_dict()"
        " gives on rank 0 into the copy."
    )


def own_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the state_dict of the model's class: a model that is split has another of its own, for a person."""
    tensors: dict[str, Tensor] = type(model).state_dict(model, keep_vars=True)
    if keep_vars:
        return tensors
    # One that is split gives shape and type alone: its numbers are in the runs of the ranks that own them.
    kept = {name for name, each in tensors.items() if isinstance(each, AbsentParameter) or not isinstance(each, Tensor)}
    return {name: each if name in kept else each.detach() for name, each in tensors.items()}
