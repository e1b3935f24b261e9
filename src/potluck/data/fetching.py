"""Batches that are read: here, when they are needed; or ahead, in processes of this worker's.

Knows neither which rows are a worker's nor why: it is told what will be wanted, one batch after the other.
"""

import ctypes
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from potluck.data.rows import BatchWithNews
from potluck.errors import ConfigError, PotluckError
from potluck.tensor_bytes import from_bytes, to_bytes

Request = list[int]
"""Rows of a batch; for processes, with the seed of what reading them draws before them."""


MOST_IN_LINE = 64 << 10
"""Bytes of a tensor up to which it travels with its batch. Measured: a third of the time at 32 KiB, as long at 512."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchOptions:
    """How processes fetch, as a DataLoader says it."""

    on_start: Callable[[int], None] | None = None
    """Called in each process with its number, before it reads."""
    ahead: int | None = None
    """Batches that each process reads ahead; None: 2."""
    context: Any = None
    """How processes are started; None: as the system does."""
    persistent: bool = False
    """Whether they live on between two epochs."""
    timeout_s: float = 0.0
    """How long one batch may take; 0: as long as it takes."""

    @classmethod
    def of(cls, loader: "DataLoader[Any]") -> "FetchOptions":
        return cls(
            on_start=loader.worker_init_fn,
            ahead=loader.prefetch_factor,
            context=loader.multiprocessing_context,
            persistent=loader.persistent_workers,
            timeout_s=loader.timeout,
        )


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
            prefetch_factor=options.ahead,
            multiprocessing_context=options.context,
            timeout=options.timeout_s,
            worker_init_fn=_OnStart(options.on_start),
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
        ForkingPickler.register(torch.Tensor, _sent)
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


def _sent(tensor: torch.Tensor) -> Any:
    """A small tensor goes through the pipe with its batch: torch opens shared memory for each, and who reads it waits
    until the process that fetched it has answered once more, which takes longer than most small batches do."""
    is_plain = tensor.layout is torch.strided and not tensor.requires_grad and tensor.device.type == "cpu"
    if not is_plain or tensor.is_quantized or tensor.nbytes > MOST_IN_LINE:
        return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return _received, (to_bytes(tensor.resolve_conj().resolve_neg()), tensor.dtype, tensor.shape)


def _received(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
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
