"""Batches of any shape: moved to a device, and counted.

A batch is whatever a collate function makes: tensors, and mappings, sequences, dataclasses and other objects around
them, however deep. What is no tensor and holds none stays as it is.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from potluck.errors import ConfigError

Plain = str | bytes | int | float | complex | None
"""Left alone wherever it is found."""


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device, as the kinds of objects that it was made of."""
    match batch:
        case Tensor():
            # From memory that is not pinned the copy would wait for all that the GPU has to do.
            if device.type == "cuda" and batch.device.type == "cpu" and batch.layout == torch.strided:
                batch = batch if batch.is_nested else batch.pin_memory()
            return batch.to(device, non_blocking=True)
        case str() | bytes() | int() | float() | complex() | None | type():
            return batch
        case dict() | UserDict():
            return _rebuilt_mapping(batch, lambda value: to_device(value, device))
    if callable(getattr(batch, "to", None)):  # it knows best what of it moves: a PackedSequence keeps some on the CPU
        return _moved_by_itself(batch, device)
    return rebuilt(batch, lambda value: to_device(value, device))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a container with each of its values changed; anything else stays as it is."""
    match value:
        case Mapping():
            return _rebuilt_mapping(value, change)
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(change, value))
        case list() | tuple():
            return type(value)(map(change, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(copied, field.name, change(getattr(value, field.name)))  # also of a frozen one
        return copied
    return value


def _rebuilt_mapping(value: Mapping[Any, Any], change: Callable[[Any], Any]) -> Any:
    """Rebuild a mapping of its own class where that can be had, with what it keeps beside its values; else a dict."""
    changed = {key: change(one) for key, one in value.items()}
    if type(value) is dict:
        return changed
    try:
        if isinstance(value, MutableMapping):
            copied: Any = copy.copy(value)
            for key, one in changed.items():
                copied[key] = one
        else:
            copied = type(value)(changed)  # type: ignore[call-arg]
        return copied if list(copied) == list(changed) else changed
    except Exception:  # a mapping that cannot be copied or made from a dict
        return changed


def _moved_by_itself(batch: Any, device: torch.device) -> Any:
    try:
        moved = batch.to(device)
    except TypeError as error:  # a to() of another meaning
        raise ConfigError(
            f"A batch of type {type(batch).__name__} has a method to(), which does not take a device: {error}."
        ) from None
    return batch if moved is None else moved


def rows_of(batch: Any) -> int:
    """How many rows a batch has: the length of the first tensor in it that has one, however deep that is."""
    rows = next(_lengths(batch), None)
    rows = next(_lengths_of_lists(batch), None) if rows is None else rows
    if rows is None or rows < 0:
        raise ConfigError(
            f"Cannot tell how many rows a batch of type {type(batch).__name__} has. Let the loss function return"
            " (loss, samples), or give samples= to backward()."
        )
    return rows


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of each tensor; -1 for a list of tensors of many lengths, which are rows themselves, or parts of
    some."""
    match value:
        case PackedSequence():
            yield int(value.batch_sizes[0])
        case Tensor() | np.ndarray():
            if value.ndim:
                yield int(value.shape[0]) if isinstance(value, np.ndarray) else value.size(0)
        case list() if len(value) > 1 and all(isinstance(one, Tensor) and one.dim() for one in value):
            alike = {one.size(0) for one in value}
            yield alike.pop() if len(alike) == 1 else -1
        case _:
            for one in _values(value):
                yield from _lengths(one)


def _lengths_of_lists(value: Any) -> Iterator[int]:
    """Yield the length of each list of texts or numbers, such as labels that nobody made a tensor of."""
    if isinstance(value, list | tuple) and value and all(isinstance(one, Plain) for one in value):
        yield len(value)
    else:
        for one in _values(value):
            yield from _lengths_of_lists(one)


def tensors_of(value: Any) -> list[Tensor]:
    """All that are in it, however deep."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in _values(value) for tensor in tensors_of(one)]


def _values(value: Any) -> Iterator[Any]:
    """Yield the values that a container holds; nothing if it is none."""
    match value:
        case str() | bytes() | type():
            return
        case Mapping():
            yield from value.values()
        case list() | tuple():
            yield from value
        case _ if dataclasses.is_dataclass(value):
            yield from (getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name))
