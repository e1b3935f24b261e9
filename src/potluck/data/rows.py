"""Rows of a dataset: read one by one or many at once, as batches, on their device; and what seeds them."""

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from potluck.batch_shapes import to_device
from potluck.devices import seed_gpus
from potluck.errors import ConfigError, PotluckError


@dataclass(frozen=True, slots=True)
class UnreadableBatch:
    """Stands in for a batch that could not be read: a DataLoader would wrap an error into its own stack of frames."""

    sentence: str


@dataclass(frozen=True, slots=True)
class BatchWithNews:
    """A batch from a process that fetches, and what reading it has shown of a stream."""

    batch: Any
    news: list[Any]


class Batches(Dataset[Any]):
    """A batch for each list of rows. `seeded`: the first of a list is the seed of what reading the others draws.

    So in a fetching process random numbers depend on the rows asked for, and on nothing before them.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, *, seeded: bool) -> None:
        self.dataset, self.collate, self.seeded = dataset, collate, seeded

    def __getitem__(self, rows: list[int]) -> Any:
        if not self.seeded:
            return self.read(rows)
        seed_everything(rows[0])
        try:
            batch = self.read(rows[1:])
        except PotluckError as error:  # in another process, torch would wrap it
            batch = UnreadableBatch(str(error))
        news: list[Any] = getattr(self.dataset, "take_news", list)()
        return BatchWithNews(batch, news) if news else batch

    def read(self, rows: list[int]) -> Any:
        return read_batch(self.dataset, rows, self.collate)


def is_plain(dataset: Any, collate: object) -> bool:
    """Whether its batches are mere rows of tensors."""
    return isinstance(dataset, TensorRows) and collate is None


def read_batch(dataset: Any, rows: list[int], collate: Callable[[list[Any]], Any] | None) -> Any:
    """These rows as one batch; or what the person who wrote the dataset needs to know."""
    if is_plain(dataset, collate):
        return dataset[rows]
    samples: list[Any] = []
    try:
        if hasattr(dataset, "__getitems__"):
            samples = list(dataset.__getitems__(rows))
        else:
            for row in rows:
                samples.append(dataset[row])
    except PotluckError:
        raise
    except Exception as error:
        which = f"Rows {rows}" if hasattr(dataset, "__getitems__") else f"Row {rows[len(samples)]}"
        return UnreadableBatch(f"{which} of the dataset could not be read: {_words(error)}.\n{_own_frames(error)}")
    try:
        return (collate or default_collate)(samples)
    except PotluckError:
        raise
    except Exception as error:
        advice = "Mend collate" if collate else "Rows of different sizes or kinds need a collate= of yours"
        told = f"Rows {rows} of the dataset could not be put into one batch: {_words(error)}. {advice}."
        return UnreadableBatch(f"{told}\n{_own_frames(error)}" if collate else told)


def _words(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _own_frames(error: Exception, most: int = 6) -> str:
    """Show the last few frames of an error's stack, and none of ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return "".join(traceback.format_list(frames[-most:])).rstrip()


def mix(*numbers: int) -> int:
    """One seed from several numbers, the same on every machine."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number) % (1 << 63)
    return mixed


def seed_everything(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() takes a quarter of a millisecond
    seed_gpus(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """The process's random numbers are as they were, after this. A GPU that nobody uses is not woken."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class TensorRows(Dataset[Any]):
    """Tensors of one length: a list of rows is read from each at once."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: list[int]) -> Any:
        found = tuple(tensor[rows] for tensor in self.tensors)
        return found if len(found) > 1 else found[0]


def as_dataset(data: Any) -> Any:
    """A map-style dataset as it is; a tensor, or several of one length, as one."""
    if isinstance(data, Tensor) and data.dim():
        return TensorRows(data)
    if isinstance(data, tuple) and data and all(isinstance(item, Tensor) and item.dim() for item in data):
        if len({len(item) for item in data}) > 1:
            raise ConfigError(f"The tensors differ in length: {', '.join(str(len(item)) for item in data)}.")
        return TensorRows(*data)
    not_rows = isinstance(data, IterableDataset | Mapping | tuple | str | bytes | Tensor)
    if not_rows or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"A dataset needs __len__ and __getitem__ (map-style), or is a tensor or a tuple of tensors;"
            f" {type(data).__name__} is neither. A stream is an IterableDataset, or a generator"
            " function."
        )
    return data


def arrived(batch: Any, device: torch.device) -> Any:
    """A batch that was read, where it is used."""
    if isinstance(batch, UnreadableBatch):
        raise ConfigError(batch.sentence)
    return to_device(batch, device)
