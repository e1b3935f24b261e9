"""What prepare() was given to train on, as one thing: rows, their order, how they are fetched and put together.

A map-style dataset, tensors, or a DataLoader of torch, whose parts are taken over. Knows nothing of workers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Subset, default_collate

from potluck.data.fetching import FetchOptions
from potluck.data.order import EMPTY, Order, SamplerOrder, Shuffled
from potluck.data.rows import as_dataset
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


def source_of(
    data: Any, *, batch_size: int | None = None, collate: Collate = None, fetchers: int = 0, seed: int = 0
) -> DataSource:
    """From what a caller has, and says beside it. `seed`: for an order that takes none from elsewhere."""
    if isinstance(data, DataSource):
        return data
    if isinstance(data, DataLoader):
        return _of_loader(data, batch_size, collate, fetchers, seed)
    dataset = as_dataset(data)
    order = Shuffled(len(dataset))
    return DataSource(dataset=dataset, order=order, collate=collate, batch_size=batch_size or 0, fetchers=fetchers)


def _of_loader(
    loader: "DataLoader[Any]", batch_size: int | None, collate: Collate, fetchers: int, seed: int
) -> DataSource:
    dataset = as_dataset(loader.dataset)
    own = loader.collate_fn if loader.collate_fn is not default_collate and loader.batch_sampler is not None else None
    if own is not None and collate is not None and own is not collate:
        raise ConfigError("The DataLoader has a collate_fn, and collate= was given too. Leave one of them out.")
    order = SamplerOrder(loader, len(dataset), seed)
    size = order.batch if loader.batch_sampler is not None else 0
    if not order.rows:
        raise ConfigError(
            "The DataLoader gives no batch: its dataset or sampler is empty, or drop_last leaves out the only one."
        )
    if not size and not batch_size:
        raise ConfigError(
            "The DataLoader has batch_size=None, and gives rows one by one. Give it a batch_size, or give one to"
            " prepare(): the rows of one step over all workers together."
        )
    size = _agreed_size(loader, size, batch_size) if size else batch_size or 0
    return DataSource(
        dataset=dataset,
        order=order,
        collate=collate or own,
        batch_size=size,
        fetchers=fetchers or loader.num_workers,
        fetching=FetchOptions.of(loader),
    )


def _agreed_size(loader: "DataLoader[Any]", size: int, given: int | None) -> int:
    """`size`: of its largest batch, which an epoch of one short batch does not say."""
    told = getattr(loader.batch_sampler, "batch_size", None)
    size = told if isinstance(told, int) and told > size else size
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
    source = source_of(data, batch_size=batch_size if not isinstance(data, DataLoader) else None)
    size = batch_size or source.batch_size
    if not size:
        raise ConfigError("evaluate() needs a batch_size: how many rows go through the models of all workers at once.")
    rows = source.dataset
    if isinstance(data, DataLoader):
        order = source.order.of(0, 0)
        rows, collate = Subset(rows, order[order != EMPTY].tolist()), source.collate
    return HeldOut(rows=rows, batch_size=size, collate=collate)
