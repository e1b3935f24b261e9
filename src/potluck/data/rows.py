"""Rows of a dataset: read one by one or many at once, as batches, on their device; and what seeds them.

Batches are read here, when they are needed, or ahead, in processes of this worker's. Knows neither which rows are a
worker's nor why: it is told what will be wanted, one batch after the other.
"""

import ctypes
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from potluck.batch_shapes import to_device
from potluck.devices import seed_gpus
from potluck.errors import ConfigError, PotluckError
from potluck.tensor_bytes import from_bytes, to_bytes


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
    """Tensors of one length: a list of rows is read from each at once. `is_bare`: a row is no tuple."""

    def __init__(self, *tensors: Tensor, is_bare: bool = False) -> None:
        self.tensors = tensors
        self.is_bare = is_bare

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: list[int]) -> Any:
        found = tuple(tensor[rows] for tensor in self.tensors)
        return found[0] if self.is_bare else found


def as_dataset(data: Any) -> Any:
    """A map-style dataset as it is; a tensor, or several of one length, as one."""
    if isinstance(data, Tensor) and data.dim():
        return TensorRows(data, is_bare=True)
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


# Read ahead


Request = list[int]
"""Rows of a batch; for processes, with the seed of what reading them draws before them."""


MOST_IN_LINE = 64 << 10
"""Bytes of a tensor up to which it travels with its batch. Measured: a third of the time at 32 KiB, as long at 512."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchOptions:
    """How processes fetch, as a DataLoader says it."""

    worker_init_fn: Callable[[int], None] | None = None
    """Called in each process with its number, before it reads."""
    prefetch_factor: int | None = None
    """Batches that each process reads ahead; None: 2."""
    multiprocessing_context: Any = None
    """How processes are started; None: as the system does."""
    persistent_workers: bool = False
    """Whether they live on between two epochs."""
    timeout: float = 0.0
    """Seconds that one batch may take; 0: as long as it takes."""

    @classmethod
    def of(cls, loader: "DataLoader[Any]") -> "FetchOptions":
        return cls(**{each.name: getattr(loader, each.name) for each in fields(cls)})


class Fetcher:
    """Reads what it is told to, in that order. Its processes live from the first read() to close()."""

    def __init__(self, batches: Dataset[Any], processes: int, options: FetchOptions, device: torch.device) -> None:
        self._batches = batches
        self._processes = processes
        self._options = options
        self._device = device
        self._wanted = _Wanted()
        self._loader: DataLoader[Any] | None = None

    def read(self, wanted: Iterable[Any]) -> Iterator[Any]:
        """A batch for each; what was asked for before is dropped. `wanted` is asked for more as batches are taken."""
        if not self._processes:
            return map(self._batches.__getitem__, wanted)
        self._wanted.now = wanted
        if self._loader is None:
            self._loader = self._start()
        with _in_words():
            started = iter(self._loader)  # from here on they read
            _keep_quiet(started)
        return self._guarded(started)

    def close(self) -> None:
        """Ends the processes."""
        self._loader = None
        self._wanted.now = ()

    def _start(self) -> "DataLoader[Any]":
        options = self._options
        return DataLoader(
            self._batches,
            batch_size=None,
            sampler=self._wanted,
            collate_fn=_as_it_is,
            # A generator of its own: a DataLoader draws its seed from the default one, and a resumed run would draw
            # once more often than a run that was never stopped.
            generator=torch.Generator(),
            pin_memory=self._device.type == "cuda",
            num_workers=self._processes,
            prefetch_factor=options.prefetch_factor,
            multiprocessing_context=options.multiprocessing_context,
            timeout=options.timeout,
            worker_init_fn=_OnStart(options.worker_init_fn),
            persistent_workers=True,  # what is wanted may change, and they must not start again
        )

    def _guarded(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with _in_words():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if isinstance(batch, BatchWithNews):
                self._batches.dataset.learn(batch.news)  # type: ignore[attr-defined]
                batch = batch.batch
            yield batch


@contextmanager
def _in_words() -> Iterator[None]:
    """A sentence in place of torch's error where a process fails."""
    try:
        yield
    except PotluckError:
        raise
    except Exception as error:
        raise ConfigError(_sentence(error)) from None


class _Wanted:
    """A sampler of what to read next, which may be asked again."""

    def __init__(self) -> None:
        self.now: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.now)


class _OnStart:
    """A worker_init_fn, to which its process looks as if the DataLoader were the caller's."""

    def __init__(self, call: Callable[[int], None] | None) -> None:
        self._call = call

    def __call__(self, number: int) -> None:
        _end_with_parent()
        ForkingPickler.register(Tensor, _sent)
        if self._call is None:
            return
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "dataset", getattr(info.dataset, "dataset", info.dataset))
        self._call(number)


def _end_with_parent() -> None:
    """Else a process outlives a worker that is killed by some seconds, and so do the connections that it has a copy of:
    nobody would hear of the loss before."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _sent(tensor: Tensor) -> Any:
    """A small tensor goes through the pipe with its batch: torch opens shared memory for each, and who reads it waits
    until the process that fetched it has answered once more, which takes longer than most small batches do."""
    is_plain = tensor.layout is torch.strided and not tensor.requires_grad and tensor.device.type == "cpu"
    if not is_plain or tensor.is_quantized or tensor.nbytes > MOST_IN_LINE:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return _received, (to_bytes(tensor.resolve_conj().resolve_neg()), tensor.dtype, tensor.shape)


def _received(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return from_bytes(data).view(dtype).reshape(shape)


def _as_it_is(batch: Any) -> Any:
    return batch


def _keep_quiet(iterator: Any) -> None:
    """Has torch tell of a process that died when a batch of it is awaited, and not wherever this process then is."""
    if getattr(iterator, "_worker_pids_set", False):
        from torch.utils.data._utils import signal_handling

        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False


def _sentence(error: Exception) -> str:
    text = str(error).strip()
    if found := re.search(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly", text):
        return (
            f"A process that fetches rows has ended by itself (process {found[1]}): the dataset ended it, or it was"
            " killed, as happens where memory is short. With 0 fetchers (num_workers=0) rows are read in the process"
            " that trains, and tell more."
        )
    if "timed out after" in text:
        return f"The processes that fetch rows gave nothing for the timeout of the DataLoader: {text.splitlines()[-1]}."
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    frames = "\n".join(line for line in lines[1:-1] if line.startswith("  "))
    return f"A process that fetches rows has failed: {lines[-1]}.\n{frames}".rstrip()
