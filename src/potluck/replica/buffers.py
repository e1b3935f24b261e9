"""The buffers that are saved with a model: what a step changed in them, and how that becomes everybody's.

A number of a floating-point buffer that was finite and is finite has a mean: its changes are averaged, by samples.
Nothing else has one: integers, truth values, numbers that are or become infinite or NaN. Those are, bit for bit, what
the first has made of them: the first rank with samples of the step, or the worker that computed the step's first slice.
What nobody changed is not touched. Knows nothing of slices, windows or hosts.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from potluck.devices import wide
from potluck.errors import ConfigError, PotluckError
from potluck.fleet.description import BUFFERS, Part
from potluck.link.link import Link
from potluck.sharding.absent import own_state
from potluck.stages.chain import BufferSlot, on_copies
from potluck.tensor_bytes import raw

LARGEST_FLOAT64 = torch.finfo(torch.float64).max
LARGEST_ON_THE_WIRE = 1e30
"""A larger change could overflow where changes are added up in float32: it is taken to have no mean."""
MOST_EXACT_BYTES = 8 << 20
"""The most bytes of exact values per step that a message to a host carries."""


class BufferChanges(NamedTuple):
    """Changes of the buffers since some moment."""

    moved: list[Tensor]
    """How much the numbers of each floating-point buffer changed, in float64; 0 where that has no mean."""
    exact: bytes
    """Buffers that changed and have no mean, as they are now; empty if none did."""


class SavedBuffers:
    """Looked up anew each time: `self.average = ...` in a forward makes a buffer another tensor."""

    def __init__(self, model: nn.Module) -> None:
        kept, seen = set(own_state(model)), set()
        self._places: list[BufferSlot] = []
        self._every_place: list[BufferSlot] = []
        """Also of those that are in several places, or not saved."""
        self.names: list[str] = []
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                self._every_place.append((module, key))
                if buffer is None or name not in kept or id(buffer) in seen:
                    continue
                if is_expanded(buffer):  # nothing could be written into it
                    buffer = module._buffers[key] = buffer.clone(memory_format=torch.contiguous_format)
                seen.add(id(buffer))
                self._places.append((module, key))
                self.names.append(name)
        found = [_real(module._buffers[key]) for module, key in self._places]
        self._specs = [(buffer.shape, buffer.dtype) for buffer in found]
        self._floats = [index for index, buffer in enumerate(found) if buffer.is_floating_point()]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers may have a mean, of each floating-point buffer."""
        return tuple(self._specs[index][0].numel() for index in self._floats)

    @property
    def parts(self) -> tuple[Part, ...]:
        """How the changes travel to a host: one part, if there are buffers. It is never empty, so that a peer that
        cannot send it, such as a plain one, is given nothing to compute."""
        sizes = self.sizes if sum(self.sizes) else (1,)
        return (Part(None, BUFFERS, sizes),) if len(self) else ()

    def now(self) -> list[Tensor]:
        """The buffers' own memory; of complex ones, as pairs of numbers."""
        buffers = []
        for name, (module, key), (shape, dtype) in zip(self.names, self._places, self._specs, strict=True):
            buffer = _real(module._buffers[key])
            if buffer is None or buffer.shape != shape:
                became = "None" if buffer is None else f"of shape {tuple(buffer.shape)}"
                raise ConfigError(
                    f"The model's buffer {name} had the shape {tuple(shape)} at prepare(), and is {became} now."
                    " Buffers that are saved keep their shape: give it its largest shape from the start, or register"
                    " it with persistent=False."
                )
            if buffer.dtype != dtype or is_expanded(buffer):
                buffer = _put_in_place(module, key, buffer.to(dtype).clone(memory_format=torch.contiguous_format))
            buffers.append(buffer)
        return buffers

    def aside(self) -> AbstractContextManager[None]:
        """A forward in here leaves no trace in them."""
        return on_copies(self._every_place)

    def copy(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.now()]

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self.now(), values, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def changes(self, before: Sequence[Tensor], largest: float = LARGEST_FLOAT64) -> BufferChanges:
        """`largest`: a change beyond it has no mean."""
        moved, odd = [], {}
        for index, (buffer, was) in enumerate(zip(self.now(), before, strict=True)):
            if index in self._floats:
                change, has_none = _compare(wide(buffer), wide(was), largest)
                moved.append(change)
                if has_none.any():
                    odd[f"{index}"] = raw(buffer[has_none.to(buffer.device)])
                    odd[f"{index} where"] = torch.from_numpy(np.packbits(has_none.cpu().numpy().reshape(-1)))
            elif not torch.equal(raw(buffer), raw(was)):
                odd[f"{index}"] = raw(buffer)
        return BufferChanges(moved, save({key: raw.cpu() for key, raw in odd.items()}) if odd else b"")

    def for_host(self, before: Sequence[Tensor], weight: float) -> tuple[Tensor, bytes]:
        """(the numbers of the part, weighted; what changed and has no mean)"""
        moved, exact = self.changes(before, LARGEST_ON_THE_WIRE)
        if len(exact) > MOST_EXACT_BYTES:
            raise ConfigError(
                f"{len(exact):,} bytes changed in buffers that have no mean: integers, truth values, or numbers that"
                f" are not finite. Under a host it may be {MOST_EXACT_BYTES:,}. Register large ones with"
                " persistent=False, or keep them as they are."
            )
        flat = torch.cat([change.reshape(-1).to(torch.float32) for change in moved]) if moved else torch.zeros(0)
        return (flat if len(flat) else flat.new_zeros(1)).mul_(weight), exact

    def apply_from_host(self, before: Sequence[Tensor], mean: Tensor, exact: bytes) -> None:
        """The part's mean, and what the first slice changed that has none."""
        self.apply(before, torch.split(mean[: sum(self.sizes)], list(self.sizes)), exact)

    @torch.no_grad()
    def apply(self, before: Sequence[Tensor], moved: Sequence[Tensor | None], exact: bytes) -> None:
        """`moved`: the mean change of each floating-point buffer, none where nobody changed it."""
        values = list(before)
        for index, change in zip(self._floats, moved, strict=True):
            if change is not None:
                was = values[index]
                change = wide(change.to(was.device)).view(self._specs[index][0])
                moved_by = (wide(was) + change).to(was)
                values[index] = torch.where((change == 0).to(was.device), was, moved_by)
        for index, where, found in self._unpack(exact):
            value = found.to(values[index].device).view(values[index].dtype)
            if where is None:
                values[index] = value.view(self._specs[index][0])
            else:
                values[index] = values[index].clone()
                values[index][where.to(value.device)] = value
        self.put(values)

    def average(self, link: Link, weight: float, before: Sequence[Tensor]) -> None:
        """Replace what has changed since then by the mean of the link's ranks, by weight; a collective."""
        if link.world == 1 or not self:
            return
        moved, exact = self.changes(before)
        has_moved = torch.stack([change.any() for change in moved]).tolist() if moved else []
        changes_of_ranks = link.gather_bytes(bytes([weight > 0, *has_moved]) + exact)
        first = next((other for other in changes_of_ranks if other[0]), b"")[1 + len(moved) :]
        is_summed = [any(other[1 + place] for other in changes_of_ranks) for place in range(len(moved))]
        means: list[Tensor | None] = [None] * len(moved)
        if any(is_summed):
            chosen = [place for place, wanted in enumerate(is_summed) if wanted]
            # In float64, so that what all changed alike comes out to the bit.
            flat = torch.cat([moved[place].reshape(-1) for place in chosen]).mul_(weight)
            link.start_sum(flat).wait()
            for place, mean in zip(chosen, torch.split(flat, [moved[place].numel() for place in chosen]), strict=True):
                means[place] = mean
        self.apply(before, means, first)

    def with_nan(self) -> str | None:
        """The name of the first that holds a NaN."""
        named = zip(self.names, self.now(), strict=True)
        return next((name for name, one in named if one.is_floating_point() and wide(one).isnan().any()), None)

    def _unpack(self, exact: bytes) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Each (buffer, which of its numbers or all, their bytes). What comes from outside is checked."""
        try:
            table = load(exact) if exact else {}
            for key in [key for key in table if not key.endswith("where")]:
                index, raw, where = int(key), table[key], None
                shape, dtype = self._specs[index]
                count = shape.numel()
                if f"{key} where" in table:
                    bits = np.unpackbits(table[f"{key} where"].numpy(), count=count)
                    where = torch.from_numpy(bits).bool().view(shape)
                    count = int(where.sum())
                if index < 0 or raw.dtype != torch.uint8 or raw.numel() != count * dtype.itemsize:
                    raise ValueError(f"buffer {index} has {count:,} numbers of {dtype}, not {raw.numel():,} bytes")
                yield index, where, raw
        except (SafetensorError, ValueError, IndexError, TypeError) as error:
            raise PotluckError(f"What a worker told of its buffers is damaged: {error}.") from None


def is_expanded(tensor: Tensor) -> bool:
    """Whether some of its numbers share memory, so that none can be written by itself."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _compare(now: Tensor, was: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """(by how much each number changed, which changed in a way that has no mean)"""
    change = now - was
    has_mean = change.abs() <= largest  # not so for NaN: inf - inf, NaN - x
    is_same = (now == was) | (now.isnan() & was.isnan())
    return torch.where(has_mean, change, 0.0), ~has_mean & ~is_same


def _real(buffer: Tensor | None) -> Tensor:
    return torch.view_as_real(buffer) if buffer is not None and buffer.is_complex() else buffer  # type: ignore[return-value]


def _put_in_place(module: nn.Module, key: str, value: Tensor) -> Tensor:
    old = module._buffers[key]
    module._buffers[key] = torch.view_as_complex(value) if old is not None and old.is_complex() else value
    return value
