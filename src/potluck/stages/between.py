"""What a model's own forward does between its layers: heard while it runs, operation by operation.

Most models do nothing there. Others add a residual, scale it, or drop some of it: `x = x + block(x)`. Then a cut lies
behind an operation rather than behind a layer, and both stages find it by its name and its place in the code.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch.overrides import TorchFunctionMode, _get_current_function_mode

from potluck.stages.plan import Form, Layer

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
