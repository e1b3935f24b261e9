"""The order of an epoch's rows: at each place of it, which row of the dataset.

An epoch is counted, shared out, saved and proved by places, each of which is used exactly once; which row stands at a
place is up to the order alone. It is the same on every worker, and after a restart, for the same epoch and seed.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from potluck.data.rows import mix, random_numbers_kept, seed_everything
from potluck.errors import ConfigError
from potluck.words import plural

EMPTY = -1
"""Marks a place without a row."""
KEPT = 2
"""Epochs whose order is remembered."""


class Order:
    rows: int
    """How many places an epoch has."""
    has_gaps: bool = False
    """Whether some places are empty."""
    counted: str = ""
    """The word for the places, where they are not the samples of the dataset, each at one place."""

    def of(self, epoch: int, seed: int) -> Tensor:
        """The row at each place, or EMPTY."""
        raise NotImplementedError

    def begin(self, epoch: int) -> None:
        """An epoch is about to be read."""

    def tell(self, seed: int) -> str:
        """Tell in which order rows come: for a person, and for other workers to compare."""
        raise NotImplementedError

    def digest(self, epoch: int, seed: int) -> str:
        """Return the digest of one epoch's order; empty where the seed determines it."""
        return ""


class Shuffled(Order):
    """Gives each row once, in another shuffled order for each epoch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def of(self, epoch: int, seed: int) -> Tensor:
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(mix(seed, epoch)))

    def tell(self, seed: int) -> str:
        return f"shuffled by seed {seed}"


class SamplerOrder(Order):
    """The order that a DataLoader's own sampler gives, as one process that iterates over the DataLoader would see it.

    Generators that the loader and its samplers hold are replayed from where they stood at first, and left as they are.
    What a sampler draws from no generator of its own is seeded for each epoch. Batches of many sizes take as many
    places as the largest, so that each is one step; the empty ones lie evenly between the others, so that any share of
    the places has its share of the rows.
    """

    def __init__(self, loader: "DataLoader[Any]", length: int, seed: int) -> None:
        self._loader = loader
        self._length = length
        """Of the dataset."""
        _check_samplers(loader)
        self._generators = _generators_of(loader)
        self._states = [[each.get_state() for each in self._generators]]
        """Of the generators, at the beginning of each epoch that is known so far."""
        self._kept: dict[tuple[int, int], Tensor] = {}
        rows, sizes = self._ask_until(0, seed)
        self.batch = max(sizes, default=0)
        """How many places one batch takes; the last may be shorter."""
        self.has_gaps = any(size != self.batch for size in sizes[:-1])
        first = self._kept[0, seed] = self._laid_out(rows, sizes)
        self.rows = len(first)
        if self.has_gaps or len(torch.unique(first)) < self.rows:
            self.counted = "places in the sampler's order"

    def of(self, epoch: int, seed: int) -> Tensor:
        places = self._kept.get((epoch, seed))
        if places is None:
            places = self._laid_out(*self._ask_until(epoch, seed))
            if len(places) != self.rows:
                raise ConfigError(
                    f"The sampler {self._name} gave {len(places):,} places in epoch {epoch + 1}, and {self.rows:,} in"
                    " the first epoch. All epochs of a run are equally long: let the sampler give as many rows, in"
                    " as many batches, each time."
                )
            self._kept[epoch, seed] = places
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return places

    def begin(self, epoch: int) -> None:
        for each in (*_samplers_of(self._loader), self._loader.dataset):
            _set_epoch(each, epoch)

    def tell(self, seed: int) -> str:
        first = ", ".join(str(row) for row in self.of(0, seed)[:8].tolist() if row != EMPTY)
        return f"in the order of its {self._name}, which begins with rows {first} ({self.digest(0, seed)})"

    def digest(self, epoch: int, seed: int) -> str:
        return hashlib.sha256(self.of(epoch, seed).numpy().astype("<i8").tobytes()).hexdigest()[:16]

    @property
    def _name(self) -> str:
        return type(_samplers_of(self._loader)[-1]).__name__

    def _ask_until(self, epoch: int, seed: int) -> tuple[Tensor, list[int]]:
        """The rows of an epoch, and how many are in each batch. Generators are replayed from one epoch to the next."""
        for before in range(len(self._states) - 1, epoch):
            self._ask(before, seed)
        found = [batch for batch in self._ask(epoch, seed) if batch]
        return self._checked([row for batch in found for row in batch]), list(map(len, found))

    def _ask(self, epoch: int, seed: int) -> list[list[Any]]:
        with random_numbers_kept(), _as_they_stood(self._generators, self._states[epoch]):
            seed_everything(mix(seed, epoch))
            for sampler in _samplers_of(self._loader):
                _set_epoch(sampler, epoch)
            found = _ask_as_a_loader_does(self._loader, is_first=epoch == 0)
            if len(self._states) == epoch + 1:
                self._states.append([each.get_state() for each in self._generators])
        return found

    def _checked(self, rows: list[Any]) -> Tensor:
        indices = np.asarray(rows if rows else np.zeros(0, np.int64))
        if indices.dtype.kind not in "iu" or indices.ndim != 1:
            raise ConfigError(
                f"The sampler {self._name} gives {type(rows[0]).__name__}s, and rows are found by whole numbers. Let"
                " the dataset number its rows."
            )
        indices = indices.astype(np.int64)
        outside = indices[(indices < -self._length) | (indices >= self._length)]
        if len(outside):
            raise ConfigError(
                f"The sampler {self._name} gives row {outside[0]:,}, and the dataset has {plural(self._length, 'row')}."
            )
        return torch.from_numpy(indices % max(1, self._length))

    def _laid_out(self, rows: Tensor, sizes: list[int]) -> Tensor:
        largest = max(sizes, default=0)
        if not self.has_gaps and largest <= self.batch and all(size == self.batch for size in sizes[:-1]):
            return rows
        if not self.has_gaps or largest > self.batch:
            told = " and ".join(map(str, sorted({min(sizes), largest})))
            raise ConfigError(
                f"The sampler {self._name} gave batches of {told} rows in a later epoch, and of"
                f" {'up to ' * self.has_gaps}{self.batch:,} in the first. Let the first epoch have batches of many"
                " sizes and the largest of all, if any has."
            )
        order = torch.full((len(sizes) * self.batch,), EMPTY, dtype=torch.int64)
        for number, batch in enumerate(torch.split(rows, sizes)):
            order[number * self.batch + torch.arange(len(batch)) * self.batch // len(batch)] = batch
        return order


def _samplers_of(loader: "DataLoader[Any]") -> list[Any]:
    """The one that gives batches, and the one that it takes rows from."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    found = [loader.batch_sampler, inner if loader.batch_sampler is not None else loader.sampler]
    return [each for each in found if each is not None]


def _check_samplers(loader: "DataLoader[Any]") -> None:
    for sampler in _samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "The DataLoader has a DistributedSampler, which gives each worker a part of the rows. They are shared"
                " out here: give the DataLoader shuffle=True, or a sampler of the whole dataset."
            )


def _generators_of(loader: "DataLoader[Any]") -> list[torch.Generator]:
    held: list[Any] = [loader.generator]
    for sampler in _samplers_of(loader):
        held += list(getattr(sampler, "__dict__", {}).values())
    return list({id(each): each for each in held if isinstance(each, torch.Generator)}.values())


@contextmanager
def _as_they_stood(generators: list[torch.Generator], states: list[Tensor]) -> Iterator[None]:
    now = [each.get_state() for each in generators]
    try:
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        yield
    finally:
        for each, state in zip(generators, now, strict=True):
            each.set_state(state)


def _ask_as_a_loader_does(loader: "DataLoader[Any]", *, is_first: bool) -> list[list[Any]]:
    """One pass over its sampler, with all that a pass over the loader draws from its generator on the way."""
    sampler: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batches: Iterator[Any] = iter(sampler)
    if is_first or not loader.persistent_workers:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the base seed of its processes
        if loader.num_workers:
            batches = iter(sampler)
    return [list(batch) if loader.batch_sampler is not None else [batch] for batch in batches]


def _set_epoch(held: Any, epoch: int) -> None:
    tell: Callable[[int], None] | None = getattr(held, "set_epoch", None)
    if callable(tell):
        tell(epoch)
