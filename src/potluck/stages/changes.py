"""Buffers outside of a model's layers that its forward changes: who touches them, and which stages leave them right.

The model's own forward runs on every stage, on zeros up to the stage's own layers. So a buffer that it changes after
some layer is right on the stage that has this layer, and nowhere else; one that counts batches is right everywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigError
from potluck.stages.chain import Chain
from potluck.stages.forms import tensors_in
from potluck.tensor_bytes import raw

Seat = tuple[nn.Module, str]
"""Where a buffer is: another tensor may be put there."""


def buffers_outside(model: nn.Module, chain: Chain) -> dict[str, Seat]:
    inside = {id(module) for link in chain.modules.values() for module in link.modules()}
    return {name: seat for name, seat in seats_of_buffers(model) if id(seat[0]) not in inside}


def seats_of_buffers(model: nn.Module) -> Iterator[tuple[str, Seat]]:
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}" if path else key, (module, key)


def copies(seats: dict[str, Seat]) -> dict[str, Tensor | None]:
    found = {name: module._buffers[key] for name, (module, key) in seats.items()}
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in found.items()}


def differing(one: dict[str, Tensor | None], other: dict[str, Tensor | None], near: float = 0.0) -> set[str]:
    """By name. Numbers that are not finite are equal to themselves."""
    return {name for name, tensor in one.items() if not _is_same(tensor, other[name], near)}


def _is_same(one: Tensor | None, other: Tensor | None, near: float) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    if near and one.is_floating_point():
        return torch.allclose(one.double(), other.double(), rtol=near, equal_nan=True)
    return torch.equal(raw(one), raw(other))


class Touches:
    """When each buffer was changed or used, counted in events."""

    def __init__(self, seats: dict[str, Seat]) -> None:
        self._seats = seats
        self._seen = {name: self._now(seat) for name, seat in seats.items()}
        self.at: dict[str, set[int]] = {name: set() for name in seats}

    def look(self, event: int) -> None:
        for name, seat in self._seats.items():
            (was, version), (buffer, now) = self._seen[name], self._now(seat)
            if buffer is not was or now != version:
                self.at[name].add(event)
                self._seen[name] = (buffer, now)

    def hear(self, event: int, inputs: Any) -> None:
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs) if not tensor.is_meta}
        for name, (buffer, _) in self._seen.items() if given else ():
            if buffer is not None and buffer.untyped_storage().data_ptr() in given:
                self.at[name].add(event)

    @staticmethod
    def _now(seat: Seat) -> tuple[Tensor | None, int]:
        buffer = seat[0]._buffers[seat[1]]
        return buffer, -1 if buffer is None else buffer._version


def check_one(name: str, layers: Sequence[str], right: Sequence[str]) -> None:
    """A buffer that is not right everywhere is touched by one layer, which leaves it right."""
    if len(layers) == 1 and layers[0] in right:
        return
    told = " and ".join(layers) if layers else "no layer that could be found"
    raise ConfigError(
        f"The model's buffer {name} is changed and used by {told}: cut into stages, each would have its own, since"
        " stages tell each other of activations alone. Change it where it is used, or make it a part of one layer."
    )


def left_alone(model: nn.Module, names: set[str]) -> AbstractContextManager[None]:
    """What other stages have to themselves stands afterwards as before."""
    return on_copies([seat for name, seat in seats_of_buffers(model) if name in names] if names else [])


@contextmanager
def on_copies(seats: Iterable[Seat]) -> Iterator[None]:
    """A forward in here changes copies. The buffers themselves are not written to, not even what they held: a forward
    before it may still need them for its backward."""
    kept = [(module, key, module._buffers[key]) for module, key in seats]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in kept if buffer is not None}
    for module, key, buffer in kept:
        module._buffers[key] = None if buffer is None else copies[id(buffer)]
    try:
        yield
    finally:
        for module, key, buffer in kept:
            module._buffers[key] = buffer
