"""Takes what layers hand to each other apart into the tensors that are sent, and puts it together again.

Most models do nothing between their layers. Others add a residual, scale it, or drop some of it: `x = x + block(x)`.
Then a cut lies behind an operation rather than behind a layer. `OpListener` hears those operations while the model
runs, and both stages find the cut by the operation's name and its place in the code.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves, tree_map_only

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
        if (found := fields_of(value)) is not None:
            _CLASSES[_name_of(type(value))] = type(value)
            return {"object": [_name_of(type(value)), {key: visit(one) for key, one in found.items()}]}
        if type(value) in (tuple, list):
            return {type(value).__name__: [visit(one) for one in value]}
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: visit(one) for key, one in value.items()}}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise ConfigError(
            f"{what} is a {type(value).__name__}. Between stages go tensors, and tuples, lists, dicts and dataclasses"
            " of them."
        )

    return visit(value)


def has_form(value: Any) -> bool:
    """Whether it holds real numbers that can go from one stage to another."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if (type(value) not in (tuple, list, dict) and fields_of(value) is None) or not any(
        one.is_floating_point() for one in tensors_in(value)
    ):
        return False
    try:
        describe(value, "")
    except ConfigError:
        return False
    return True


def narrow(form: Form, sent: set[int], first: int = 0) -> Form:
    """Send only some of a form's tensors, which are numbered from `first` on."""
    return renumbered(form, {number: place for place, number in enumerate(sorted(sent), start=first)})


_CLASSES: dict[str, type] = {}
"""Classes of objects that this process has seen between layers, by name. A plan names them, and nothing is imported by
such a name."""


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass, such as what models of Hugging Face return, or of a named tuple; None for other
    objects."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def with_fields(value: Any, values: dict[str, Any]) -> Any:
    """Copy an object with other values in these fields. A dataclass is copied, so that what its __init__ does is not
    done again."""
    if isinstance(value, tuple | dict):
        return type(value)(**(fields_of(value) or {}) | values)
    copied = copy.copy(value)
    for name, one in values.items():
        object.__setattr__(copied, name, one)
    return copied


def _made(name: str, given: dict[str, Any]) -> Any:
    if (kind := _CLASSES.get(name)) is None:
        raise ConfigError(f"The plan has a {name} between layers, and this process has not seen one: survey the model.")
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"Between stages goes a {name}, which cannot be made from its fields: {error}.") from error


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace each tensor in a value by the function's result, in the order of describe()."""
    if isinstance(value, Tensor):
        return function(value)
    if (found := fields_of(value)) is not None:
        return with_fields(value, {name: map_tensors(function, one) for name, one in found.items()})
    if type(value) in (tuple, list):
        return type(value)(map_tensors(function, one) for one in value)
    if type(value) is dict:
        return {key: map_tensors(function, one) for key, one in value.items()}
    return tree_map_only(Tensor, function, value)


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in tuples, lists, dicts and dataclasses, however deep; in the order of describe()."""
    if isinstance(value, Tensor):
        return [value]
    found: Any = fields_of(value)
    if found is None:
        found = value if isinstance(value, dict) else dict(enumerate(value if isinstance(value, tuple | list) else ()))
    return [tensor for one in found.values() for tensor in tensors_in(one)]


def all_tensors(value: Any) -> list[Tensor]:
    """List all tensors, also in whatever else torch knows to take apart, such as what models of Hugging Face return."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def pick(form: Form, value: Any, what: str) -> list[Tensor]:
    """The tensors of a value that are sent; ConfigError if it has another form than the plan says."""
    [(kind, inner)] = form.items()
    match kind:
        case "value":
            return []
        case "tensor" if isinstance(value, Tensor):
            return [] if inner is None else [value]
        case "tuple" | "list" if isinstance(value, tuple | list) and len(value) == len(inner):
            pairs = list(zip(inner, value, strict=True))
        case "dict" if isinstance(value, dict) and inner.keys() <= value.keys():
            pairs = [(one, value[key]) for key, one in inner.items()]
        case "object" if (found := fields_of(value)) is not None and inner[1].keys() <= found.keys():
            pairs = [(one, found[key]) for key, one in inner[1].items()]
        case _:
            raise ConfigError(
                f"{what} is a {type(value).__name__} of another form than when the model was surveyed. Stages need the"
                " same form in every batch."
            )
    return [tensor for one, part in pairs for tensor in pick(one, part, what)]


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
        case "object":
            return _made(inner[0], {key: fill(one, tensors) for key, one in inner[1].items()})
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
        case "object":
            return with_fields(value, {key: put(one, getattr(value, key), tensors) for key, one in inner[1].items()})
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


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Way = Literal["in", "through", "out"]


class OpListener(TorchFunctionMode):
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
        """Hear nothing of what runs inside: a layer's operations are its own, and are not slowed down."""
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
    """Name the operation's place in the code of the model: forward+3 is the third line of forward's body.

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
    """Forms of the layer's own output and of each operation's result."""
    way: Way
    """Whether what is sent was received, stays in the stage, or leaves it."""
    number: int
    """Number of the layer."""
    place: int
    """The place (seed_of) whose random numbers are used after it."""
    is_last: bool
    """Whether no layer of the chain follows."""
    is_door: bool
    """Whether the stage begins behind it. What comes in earlier was carried past layers of other stages."""
    is_carried: bool
    """Whether what is handed on there leaves the stage, although it ends later."""


def forms_of(layer: Layer) -> tuple[Form, ...]:
    """List the forms of the layer's own output and of each of its operations' results."""
    output = layer.output or {"value": None}
    return tuple(output["list"]) if layer.operations else (output,)


def renumbered(form: Form, numbers: dict[int, int]) -> Form:
    """Renumber a form's tensors; those that have no number are not sent."""
    [(kind, inner)] = form.items()
    if kind == "tensor":
        return {kind: numbers.get(inner)}
    if kind in ("tuple", "list"):
        return {kind: [renumbered(one, numbers) for one in inner]}
    if kind == "object":
        return {kind: [inner[0], {key: renumbered(one, numbers) for key, one in inner[1].items()}]}
    return {kind: {key: renumbered(one, numbers) for key, one in inner.items()}} if kind == "dict" else form
