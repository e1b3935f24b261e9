"""What layers hand to each other: taken apart into the tensors that are sent, and put together again.

Most models do nothing between their layers. Others add a residual, scale it, or drop some of it: `x = x + block(x)`.
Then a cut lies behind an operation rather than behind a layer. `Ear` hears those operations while the model runs, and
both stages find the cut by the operation's name and its place in the code.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

from potluck.errors import ConfigError
from potluck.stages.plan import Form, Layer


def describe(value: Any, what: str) -> Form:
    """The form of a value, all its tensors numbered in order."""
    numbers = itertools.count()

    def visit(value: Any) -> Form:
        if isinstance(value, Tensor):
            if value.is_complex():
                raise ConfigError(f"{what} is complex. Between stages go real tensors: use torch.view_as_real().")
            return {"tensor": next(numbers)}
        if type(value) in (tuple, list):
            return {type(value).__name__: [visit(one) for one in value]}
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: visit(one) for key, one in value.items()}}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise ConfigError(
            f"{what} is a {type(value).__name__}. Between stages go tensors, and tuples, lists and dicts of them."
        )

    return visit(value)


def has_form(value: Any) -> bool:
    """Whether it holds real numbers that can go from one stage to another."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if type(value) not in (tuple, list, dict) or not any(one.is_floating_point() for one in tensors_in(value)):
        return False
    try:
        describe(value, "")
    except ConfigError:
        return False
    return True


def narrow(form: Form, sent: set[int], first: int = 0) -> Form:
    """The same with only some tensors sent, which are numbered anew, from `first` on."""
    places = {number: place for place, number in enumerate(sorted(sent), start=first)}

    def visit(form: Form) -> Form:
        [(kind, inner)] = form.items()
        if kind == "tensor":
            return {kind: places.get(inner)}
        if kind in ("tuple", "list"):
            return {kind: [visit(one) for one in inner]}
        return {kind: {key: visit(one) for key, one in inner.items()}} if kind == "dict" else form

    return visit(form)


def tensors_in(value: Any) -> list[Tensor]:
    """In tuples, lists and dicts, however deep; in the order of describe()."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in tensors_in(one)]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in tensors_in(one)]
    return []


def all_tensors(value: Any) -> list[Tensor]:
    """Also in whatever else torch knows to take apart, such as what models of Hugging Face return."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def pick(form: Form, value: Any, what: str) -> list[Tensor]:
    """The tensors of a value that are sent; ConfigError if it has another form than the plan says."""
    [(kind, inner)] = form.items()
    if kind == "tensor":
        if not isinstance(value, Tensor):
            raise _other_form(what, value)
        return [] if inner is None else [value]
    if kind in ("tuple", "list"):
        if not isinstance(value, tuple | list) or len(value) != len(inner):
            raise _other_form(what, value)
        return [tensor for one, part in zip(inner, value, strict=True) for tensor in pick(one, part, what)]
    if kind == "dict":
        if not isinstance(value, dict) or not inner.keys() <= value.keys():
            raise _other_form(what, value)
        return [tensor for key, one in inner.items() for tensor in pick(one, value[key], what)]
    return []


def fill(form: Form, tensors: Sequence[Tensor]) -> Any:
    """A value of this form with these tensors; one that is not sent, or that is missing, is a single zero."""
    [(kind, inner)] = form.items()
    match kind:
        case "tensor":
            return tensors[inner] if inner is not None and inner < len(tensors) else torch.zeros(())
        case "tuple":
            return tuple(fill(one, tensors) for one in inner)
        case "list":
            return [fill(one, tensors) for one in inner]
        case "dict":
            return {key: fill(one, tensors) for key, one in inner.items()}
    return inner


def put(form: Form, value: Any, tensors: Sequence[Tensor]) -> Any:
    """The value with those of its tensors that are sent in the place of its own."""
    [(kind, inner)] = form.items()
    match kind:
        case "tensor":
            return value if inner is None else tensors[inner]
        case "tuple":
            return tuple(put(one, part, tensors) for one, part in zip(inner, value, strict=True))
        case "list":
            return [put(one, part, tensors) for one, part in zip(inner, value, strict=True)]
        case "dict":
            return value | {key: put(one, value[key], tensors) for key, one in inner.items()}
    return value


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Both by name: those without one by their place."""
    return {str(place): value for place, value in enumerate(args)} | kwargs


def with_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The reverse: those that are given take the place of what was there."""
    return (
        tuple(given.get(str(place), value) for place, value in enumerate(args)),
        kwargs | {name: value for name, value in given.items() if not name.isdecimal()},
    )


def _other_form(what: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{what} is a {type(value).__name__} of another form than when the model was surveyed. Stages need the same"
        " form in every batch."
    )


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Way = Literal["in", "through", "out"]


class Ear(TorchFunctionMode):
    """Hears every operation that is called while it is open, and may put something else in the place of its result."""

    def __init__(self, hear: Callable[[str, Inputs, Any], Any]) -> None:
        super().__init__()
        self._hear = hear
        self._is_open = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._is_open:
            return output
        return self._hear(f"{func.__name__}@{_line()}", (args, kwargs or {}), output)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """What runs in a layer is its own business, and is not slowed down by being heard."""
        before, self._is_open = self._is_open, False
        is_last = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if is_last:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if is_last:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._is_open = before


def _line() -> str:
    """Where the operation stands in the code of the model: forward+3 is the third line of forward's body.

    With its offset in the compiled code, since a line may have several of a name.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    return f"{frame.f_code.co_name}+{frame.f_lineno - frame.f_code.co_firstlineno}:{frame.f_lasti}"


@dataclass(frozen=True, slots=True)
class Crossing:
    """The end of a layer: what is handed on there, once the operations that belong to it are done."""

    layer: str
    operations: tuple[str, ...]
    forms: tuple[Form, ...]
    """What is sent of the layer's own output, and of what each operation gives."""
    way: Way
    """Whether what is sent was received, stays in the stage, or leaves it."""
    place: int
    """Of the random numbers after it."""
    is_last: bool
    """Whether no layer of the chain follows."""

    @staticmethod
    def after(layer: Layer, way: Way, place: int, *, is_last: bool) -> "Crossing":
        output = layer.output or {"value": None}
        forms = tuple(output["list"]) if layer.operations else (output,)
        return Crossing(layer.name, layer.operations, forms, way, place, is_last)
