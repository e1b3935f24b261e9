"""The chain of a model's layers: which modules follow each other, and what lies around them.

Buffers outside of the layers that a forward changes: who touches them, and which stages leave them right. The model's
own forward runs on every stage, on zeros up to the stage's own layers. So a buffer that it changes after some layer is
right on the stage that has this layer, and nowhere else; one that counts batches is right everywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from potluck.errors import ConfigError
from potluck.stages.forms import tensors_in
from potluck.stages.seats import shallow
from potluck.tensor_bytes import raw


@dataclass(frozen=True, slots=True)
class Chain:
    """The modules of a model that run one after the other, and everything else in it."""

    modules: dict[str, nn.Module]
    """The links of the chain by name, in order."""
    holders: dict[str, nn.Module]
    """The modules that hold them, from the model itself (named "") down, and lists of parts."""
    parts: dict[str, nn.Module | nn.Parameter]
    """Everything else that the holders hold: other modules, and parameters of their own."""


def find_chain(model: nn.Module, *, every: bool = False, mixed: bool = False) -> Chain:
    """Find the layers of a model, in order: an nn.Sequential's children, else the list of blocks that holds most of the
    parameters.

    `every`: all lists, one after the other, in the order in which the model has them. `mixed`: also lists of layers of
    several classes, in the place of lists within them.
    """
    if is_sequential(model):
        names = _flat(model, "")
    else:
        lists: dict[str, list[str]] = {}
        _collect(model, "", lists, mixed=mixed)
        if not lists:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut into stages: it is not an nn.Sequential, and it holds neither an"
                " nn.ModuleList of at least two layers nor an nn.Sequential. Arrange its layers in one of these."
            )
        sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in lists}
        largest = max(sizes, key=sizes.__getitem__)
        names = [name for each in lists.values() for name in each] if every else lists[largest]
    if len(names) < 2:
        raise ConfigError(f"{type(model).__name__} has a single layer, and cannot be cut into stages.")
    return chain_of(model, names)


def chain_of(model: nn.Module, names: list[str]) -> Chain:
    """The chain with these links; ConfigError for a name that the model does not have."""
    modules: dict[str, nn.Module] = {}
    holders: dict[str, nn.Module] = {"": model}
    for name in names:
        module = model
        steps = name.split(".")
        for depth, step in enumerate(steps):
            child = module._modules.get(step)
            if child is None:
                raise ConfigError(f"The model has no layer {name}: the plan is of another model.")
            holder, module = module, child
            if depth < len(steps) - 1:
                holders[".".join(steps[: depth + 1])] = module
        if any(module is earlier for earlier in modules.values()):
            module = holder._modules[steps[-1]] = _another(module, name)
        modules[name] = module
    if both := modules.keys() & holders.keys():
        raise ConfigError(f"The plan has {min(both)} both as a layer and as what holds layers.")
    parts: dict[str, nn.Module | nn.Parameter] = {}
    links = {id(module) for module in modules.values()}
    waiting = list(holders.items())
    for path, holder in waiting:  # grows by those found on the way
        for name, one in (*holder._modules.items(), *holder._parameters.items()):
            where = f"{path}.{name}" if path else name
            if one is None or id(one) in links or where in holders:
                continue
            if isinstance(one, nn.Module) and type(one).forward is nn.Module.forward:
                holders[where] = one  # a list or a table of parts, each of which is used by itself
                waiting.append((where, one))
            else:
                parts[where] = one
    return Chain(modules, holders, parts)


def _another(module: nn.Module, name: str) -> nn.Module:
    """A layer that is in the chain several times: another object for this place, with the same parameters."""
    if any(key not in each._non_persistent_buffers_set for each in module.modules() for key in each._buffers):
        raise ConfigError(
            f"{name} is in the chain twice, and has buffers: cut into stages, each place would change its own. Give"
            " each place a layer of its own; they may share parameters."
        )
    return shallow(module, type(module))


def is_sequential(module: nn.Module) -> bool:
    """Whether it runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def parameters_of(part: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [part] if isinstance(part, nn.Parameter) else list(part.parameters())


def _flat(module: nn.Module, path: str) -> list[str]:
    """The children of a Sequential, those of Sequentials within it in their place."""
    names = []
    for name, child in module._modules.items():
        assert child is not None
        where = f"{path}.{name}" if path else name
        names += _flat(child, where) if is_sequential(child) and len(list(child.children())) else [where]
    return names


def _collect(module: nn.Module, path: str, found: dict[str, list[str]], *, mixed: bool) -> None:
    """The outermost lists of layers: a list within a layer, of experts or heads, is that layer's own business."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if is_sequential(child):
            names = _flat(child, where)
        elif isinstance(child, nn.ModuleList) and (mixed or len({type(one) for one in child}) == 1):
            names = [f"{where}.{number}" for number in range(len(child))]
        else:
            names = []
        if len(names) >= 2 and any(True for _ in child.parameters()):
            found[where] = names
        else:
            _collect(child, where, found, mixed=mixed)


BufferSlot = tuple[nn.Module, str]
"""Where a buffer is: another tensor may be put there."""


def buffers_outside(model: nn.Module, chain: Chain) -> dict[str, BufferSlot]:
    inside = {id(module) for link in chain.modules.values() for module in link.modules()}
    return {name: seat for name, seat in seats_of_buffers(model) if id(seat[0]) not in inside}


def seats_of_buffers(model: nn.Module) -> Iterator[tuple[str, BufferSlot]]:
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}" if path else key, (module, key)


def copies(seats: dict[str, BufferSlot]) -> dict[str, Tensor | None]:
    found = {name: module._buffers[key] for name, (module, key) in seats.items()}
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in found.items()}


def differing(one: dict[str, Tensor | None], other: dict[str, Tensor | None], near: float = 0.0) -> set[str]:
    """Name the buffers that differ. Numbers that are not finite are equal to themselves."""
    return {name for name, tensor in one.items() if not _is_same(tensor, other[name], near)}


def _is_same(one: Tensor | None, other: Tensor | None, near: float) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    if near and one.is_floating_point():
        return torch.allclose(one.double(), other.double(), rtol=near, equal_nan=True)
    return torch.equal(raw(one), raw(other))


class BufferAccess:
    """When each buffer was changed or used, counted in events."""

    def __init__(self, seats: dict[str, BufferSlot]) -> None:
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
    def _now(seat: BufferSlot) -> tuple[Tensor | None, int]:
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
    """Restore these buffers on exit: other stages keep them."""
    return on_copies([seat for name, seat in seats_of_buffers(model) if name in names] if names else [])


@contextmanager
def on_copies(seats: Iterable[BufferSlot]) -> Iterator[None]:
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
