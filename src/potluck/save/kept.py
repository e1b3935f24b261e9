"""fleet.state: what a person wants kept beside the model, such as an average of its weights or the best score so far.

It is saved with each checkpoint, sent to each worker that joins, and put back by load(). Nothing is pickled.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from potluck.errors import CheckpointError, ConfigError
from potluck.save.state import Tensors, flatten, unflatten

NAME = "fleet.state"


class Kept(MutableMapping[str, Any]):
    """Numbers, strings, lists, tuples, dictionaries and tensors, by name. Refuses at once what cannot be kept.

    Every worker has its own, and should put the same there: kept is that of the worker who saves. Tensors come back in
    host memory.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"{NAME} has names for keys, not {name!r}.")
        try:
            flatten(value, f"{NAME}/{name}", None, "")
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        except RecursionError:
            raise ConfigError(f"{NAME}/{name} holds itself, and has no end that could be kept.") from None
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{NAME} {self._values!r}"

    def save(self, tensors: dict[str, Tensor]) -> Any:
        """As JSON; tensors go into `tensors`."""
        return flatten(self._values, NAME, tensors, "")

    def load(self, saved: Any, tensors: Tensors) -> None:
        """What was kept takes the place of what is here; what is here alone stays."""
        found = unflatten(saved, tensors)
        if not isinstance(found, dict):
            raise TypeError(f"{NAME} is a table, not a {type(found).__name__}")
        self._values |= found
