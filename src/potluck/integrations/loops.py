"""Loops of others on a fleet: its end with their script, their schedulers, and loaders of whole steps.

A batch of a trainer that accumulates gradients is several of its own. It is shared out over the fleet, and goes through
each model in parts of the size that the trainer was given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, Sampler

from potluck import Engine, init
from potluck.data.source import ONE_BY_ONE, HeldOut
from potluck.errors import ConfigError


def check_no_stages(options: Mapping[str, Any], loop: str) -> None:
    """Refuse stages where a loop calls the model and then backward(): stages go forward and backward by turns."""
    if options.get("stages") is not None:
        raise ConfigError(
            f"{loop} computes the loss by itself, and a model that is cut into stages needs it as a function."
            " Use Hugging Face's Trainer with potluck.hf.Elastic, or a loop of fleet.train(); or split the model with"
            " strategy=potluck.FullShard()."
        )


def fleet_until_exit(**options: Any) -> Engine:
    """Call init(), and close the fleet when the script ends; if by an exception, with its reason. A host has the last
    weights then."""
    fleet = init(**options)
    fleet.close_at_exit()
    return fleet


def by_epochs(scheduler: LRScheduler, per_epoch: int) -> LRScheduler:
    """One that is stepped with every step of the run, and moves with every epoch."""
    kind: Any = type(scheduler)

    def step(self: Any, *told: Any, **more: Any) -> None:
        self.steps_of_run += 1
        if self.steps_of_run % per_epoch == 0:
            kind.step(self)

    scheduler.steps_of_run = 0  # type: ignore[attr-defined]
    return _with_step(scheduler, step)


def heard(scheduler: LRScheduler, hear: Callable[[], None]) -> LRScheduler:
    """A prepared one, whose step() does nothing: `hear` is called when the script calls it."""
    return _with_step(scheduler, lambda self, *told, **more: hear())


def _with_step(scheduler: LRScheduler, step: Callable[..., None]) -> LRScheduler:
    """Replace step() by way of the class: what lies in the object is a part of its state."""
    kind: Any = type(scheduler)
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})
    return scheduler


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
