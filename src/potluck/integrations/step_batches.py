"""A DataLoader whose batches are what one step takes: of a trainer that accumulates gradients, several of its own.

A batch is then shared out over the fleet, and goes through each model in parts of the size that the trainer was given.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from potluck.data.source import ONE_BY_ONE, HeldOut
from potluck.errors import ConfigError


class StepBatches(Sampler[list[int]]):
    """Several batches of a sampler as one. `most`: how many of the sampler's batches an epoch has, as a trainer counts
    them; what the sampler would draw after them is never drawn. None: the sampler is asked until it has no more."""

    def __init__(self, batches: Iterable[list[int]], together: int, *, most: int | None = None) -> None:
        self.batches, self.together, self.most = batches, together, most
        self.sampler = getattr(batches, "sampler", None)  # whose generators are found there
        own = getattr(batches, "batch_size", None)
        self.batch_size = own * together if isinstance(own, int) else None

    def __iter__(self) -> Iterator[list[int]]:
        left = islice(self.batches, self.most)
        while several := list(islice(left, self.together)):
            yield [row for batch in several for row in batch]

    def __len__(self) -> int:
        count = len(self.batches) if self.most is None else self.most  # type: ignore[arg-type]
        return -(-count // self.together)

    def set_epoch(self, epoch: int) -> None:
        if callable(tell := getattr(self.batches, "set_epoch", None)):
            tell(epoch)


def step_loader(loader: "DataLoader[Any]", together: int, *, most: int | None = None) -> "DataLoader[Any]":
    """Return a DataLoader of which one batch is `together` batches of this one. `most`: as StepBatches has it; a stream
    has all."""
    if together == 1 and most is None:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        by: dict[str, Any] = {"batch_size": (loader.batch_size or 1) * together, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        raise ConfigError(ONE_BY_ONE)
    else:
        by = {"batch_sampler": StepBatches(loader.batch_sampler, together, most=most)}
    return DataLoader(
        loader.dataset,
        **by,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        generator=loader.generator,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
    )


class WholeBatches:
    """The batches of a DataLoader as rows, each collated as the DataLoader would: so figures that are means of batches
    do not depend on who looks at which."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self._rows = [list(rows) for rows in loader.batch_sampler or ()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._collate([self._dataset[row] for row in self._rows[number]])

    @property
    def rows(self) -> int:
        return sum(map(len, self._rows))


def one_by_one(batches: WholeBatches, at_once: int) -> HeldOut:
    """Yield rows one by one for fleet.evaluate(): each goes through a model by itself. `at_once`: over all workers."""
    return HeldOut(rows=batches, batch_size=at_once, collate=lambda several: several[0])
