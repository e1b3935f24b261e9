"""What a model's own forward does between its layers: heard while it runs, operation by operation.

Most models do nothing there. Others add a residual, scale it, or drop some of it: `x = x + block(x)`. Then a cut lies
behind an operation rather than behind a layer, and both stages find it by counting from the layer on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch.overrides import TorchFunctionMode, _get_current_function_mode

from potluck.stages.plan import Form, Layer

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Ear(TorchFunctionMode):
    """Hears every operation that is called while it is open, and may put something else in the place of its result."""

    def __init__(self, hear: Callable[[str, Inputs, Any], Any]) -> None:
        super().__init__()
        self._hear = hear
        self._is_open = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return self._hear(func.__name__, (args, kwargs or {}), output) if self._is_open else output

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


@dataclass(frozen=True, slots=True)
class Crossing:
    """The end of a layer: what is handed on there, once the operations that belong to it are done."""

    layer: str
    operations: tuple[str, ...]
    forms: tuple[Form, ...]
    """What is sent of the layer's own output, and of what each operation gives."""
    way: Literal["in", "through", "out"]
    """Whether what is sent was received, stays in the stage, or leaves it."""
    place: int
    """Of the random numbers after it."""

    @staticmethod
    def after(layer: Layer, way: Literal["in", "through", "out"], place: int) -> "Crossing":
        output = layer.output or {"value": None}
        forms = tuple(output["list"]) if layer.operations else (output,)
        return Crossing(layer.name, layer.operations, forms, way, place)
