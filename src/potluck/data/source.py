"""DataSource: the data that prepare() trains on, as rows, their order, and how they are fetched and collated.

A map-style dataset, tensors, a stream, or a DataLoader of torch, whose parts are taken over. Knows nothing of workers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Subset, default_collate

from potluck.data.order import EMPTY, Order, SamplerOrder, Shuffled
from potluck.data.rows import FetchOptions, as_dataset
from potluck.data.stream import StreamOrder, StreamRows, is_stream, length_of
from potluck.errors import ConfigError

Collate = Callable[[list[Any]], Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    dataset: Any
    """Map-style."""
    order: Order
    collate: Collate = None
    """None: as torch's DataLoader does."""
    batch_size: int = 0
    """Rows of one step over all workers; 0: not said."""
    fetchers: int = 0
    fetching: FetchOptions = FetchOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedData:
    """A caller's options beside the data."""

    batch_size: int | None = None
    collate: Collate = None
    fetchers: int = 0
    seed: int = 0
    """Seed for an order that takes none from elsewhere, and for what a stream draws."""
    rows: int | None = None
    """How many rows of a stream are an epoch."""
    notice: Callable[[str], None] = lambda sentence: None


def source_of(data: Any, options: AskedData = AskedData()) -> DataSource:
    if isinstance(data, DataSource):
        return data
    if isinstance(data, DataLoader):
        return _of_loader(data, options)
    if is_stream(data):
        return _of_stream(data, options)
    _check_no_stream(options)
    dataset = as_dataset(data)
    size, fetchers = options.batch_size or 0, options.fetchers
    order = Shuffled(len(dataset))
    return DataSource(dataset=dataset, order=order, collate=options.collate, batch_size=size, fetchers=fetchers)


def _check_no_stream(options: AskedData) -> None:
    if options.rows is not None:
        raise ConfigError("rows= says how many rows of a stream are an epoch. A dataset has the rows that it has.")


def _of_stream(stream: Any, options: AskedData, *, drops_last: bool = False) -> DataSource:
    """`drops_last`: an epoch ends before a batch that is not whole."""
    if options.rows is not None and options.rows < 1:
        raise ConfigError(f"rows= is how many rows of the stream are an epoch, at least 1, not {options.rows}.")
    rows, size = options.rows or length_of(stream, options.notice), options.batch_size or 0
    if drops_last and size:
        rows -= rows % size
    if not rows:
        raise ConfigError("The stream gives no row, or fewer than one batch.")
    # Another worker's part of a step may become this one's: as much is kept.
    dataset = StreamRows(stream, rows, is_endless=options.rows is not None, seed=options.seed, keep=max(1, 2 * size))
    dataset.notice = options.notice
    return DataSource(
        dataset=dataset,
        order=StreamOrder(stream, rows),
        collate=options.collate,
        batch_size=size,
        fetchers=min(1, options.fetchers),  # it can only be read in turn
    )


def _of_loader(loader: "DataLoader[Any]", options: AskedData) -> DataSource:
    batch_size, collate, fetchers = options.batch_size, options.collate, options.fetchers or loader.num_workers
    has_batches = loader.batch_size is not None or loader.batch_sampler is not None
    own = loader.collate_fn if loader.collate_fn is not default_collate and has_batches else None
    if own is not None and collate is not None and own is not collate:
        raise ConfigError("The DataLoader has a collate_fn, and collate= was given too. Leave one of them out.")
    options = replace(options, collate=collate or own, fetchers=fetchers)
    if is_stream(loader.dataset):
        if loader.batch_size is not None:
            options = replace(options, batch_size=_agreed_size(loader.batch_size, batch_size))
        elif not batch_size:
            raise ConfigError(ONE_BY_ONE)
        source = _of_stream(loader.dataset, options, drops_last=loader.drop_last)
        return replace(source, fetching=FetchOptions.of(loader))
    _check_no_stream(options)
    dataset = as_dataset(loader.dataset)
    order = SamplerOrder(loader, len(dataset), options.seed)
    size = order.batch if loader.batch_sampler is not None else 0
    if not order.rows:
        raise ConfigError(
            "The DataLoader gives no batch: its dataset or sampler is empty, or drop_last leaves out the only one."
        )
    if not size and not batch_size:
        raise ConfigError(ONE_BY_ONE)
    if size:  # an epoch of one short batch does not say how large they are
        told = getattr(loader.batch_sampler, "batch_size", None)
        size = told if isinstance(told, int) and told > size else size
    size = _agreed_size(size, batch_size) if size else batch_size or 0
    return DataSource(
        dataset=dataset,
        order=order,
        collate=options.collate,
        batch_size=size,
        fetchers=fetchers,
        fetching=FetchOptions.of(loader),
    )


ONE_BY_ONE = (
    "The DataLoader has batch_size=None, and gives rows one by one. Give it a batch_size, or give one to prepare(): the"
    " rows of one step over all workers together."
)


def _agreed_size(size: int, given: int | None) -> int:
    if given and given != size:
        raise ConfigError(
            f"batch_size = {given:,} was given, and the DataLoader has batches of {size:,}. Both are the rows of one"
            " step over all workers together: leave batch_size out, or make them alike."
        )
    return size


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Rows to look at and not to train on."""

    rows: Any
    batch_size: int
    """How many go through the models of all workers at once."""
    collate: Collate = None


def held_out(data: Any, batch_size: int | None, collate: Collate = None) -> HeldOut:
    """`collate`: of the data that are trained on, for data that say nothing of one."""
    if isinstance(data, HeldOut):
        return data
    source = source_of(data, AskedData(batch_size=batch_size if not isinstance(data, DataLoader) else None))
    size = batch_size or source.batch_size
    if not size:
        raise ConfigError("evaluate() needs a batch_size: how many rows go through the models of all workers at once.")
    rows = source.dataset
    if isinstance(data, DataLoader):
        collate = source.collate
        if not isinstance(rows, StreamRows):
            order = source.order.of(0, 0)
            rows = Subset(rows, order[order != EMPTY].tolist())
    return HeldOut(rows=rows, batch_size=size, collate=collate)
