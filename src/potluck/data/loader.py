"""An epoch to ranges, ranges to micro-batches, and where an epoch stands.

Knows nothing of models. A batch is the rows of one step over all workers; each worker gets a range of it,
in micro-batches.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from potluck.data.plan import BatchConfig, BatchShare, MicroBatch, Position, plan_step
from potluck.data.rows import (
    Batches,
    _as_it_is,
    arrived,
    as_dataset,
    is_plain,
    mix,
    read_batch,
    seed_everything,
)
from potluck.errors import ConfigError


class Loader:
    """This worker's micro-batches. Each pass gives the rest of the current epoch.

    `current` is the micro-batch that was given last; its trainer moves `position` when its step is done.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchConfig,
        share: BatchShare = BatchShare(),
        *,
        device: torch.device,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset = as_dataset(dataset)
        self.batch = batch
        self.rows = len(self.dataset)
        self.position = Position()
        self.seed = seed
        self.current: MicroBatch | None = None
        self.given = 0
        """Batches that were given so far."""
        self.on_stand_in: Callable[[], None] = lambda: None
        """Called before rows that do not count."""
        self.on_epoch_end: Callable[[], None] = lambda: None
        self.is_stopped: Callable[[], bool] = lambda: False
        self.shares = share.shares
        """The weights by which each batch is divided. They may change between two steps."""
        self._share = share
        self._device = device
        self.collate = collate
        self._fetched: Iterator[Any] = iter(())
        self._ahead: Any = None
        if self.rows == 0:
            raise ConfigError("The dataset is empty.")

    def __iter__(self) -> Iterator[Any]:
        if self.position.row >= self.rows:  # a loop that took exactly len() batches has not asked for the end
            self.end_epoch()
        yield from self._rest_of_epoch()
        self._check_step()
        if self.is_stopped() and self.position.row < self.rows:
            return
        self.end_epoch()

    def end_epoch(self) -> None:
        """Ends the epoch: all of its rows are done."""
        self.current = None
        self.on_epoch_end()
        self.position = Position(self.position.epoch + 1)

    def _rest_of_epoch(self) -> Iterator[Any]:
        order, shares = self._order(), None
        fetched: Iterator[Any] = iter(())
        try:
            while self.position.row < self.rows and not self.is_stopped():
                self._check_step()
                if shares != self.shares:  # also at first: rows are fetched ahead, for shares as they are
                    shares = self.shares
                    fetched = self._fetched = iter(self._fetch(order, self.position.row))
                    self._ahead = None
                for micro in self._step_at(self.position.row):
                    self.current = micro
                    if not micro.counts:
                        self.on_stand_in()
                    batch, self._ahead = self._ahead, None
                    self.given += 1
                    yield arrived(next(fetched), self._device) if batch is None else batch
        finally:
            if fetched is self._fetched:  # else the processes that fetch would live for as long as we do
                self._fetched, self._ahead = iter(()), None

    def fetch_ahead(self) -> None:
        """Sends the next batch to a GPU that still computes; if rows are mere tensors, which draw no random numbers."""
        if self._ahead is None and self._is_plain:
            self._ahead = arrived(next(self._fetched, None), self._device)

    def once(self) -> Iterator[Any]:
        """This worker's rows of the dataset in their own order, for looking and not for training."""
        for micro, batch in zip(self._micro_batches(0), self._fetch(torch.arange(self.rows), 0), strict=True):
            self.current = micro
            yield arrived(batch, self._device)

    def __len__(self) -> int:
        """How many micro-batches the rest of this epoch has for this worker.

        A step in which it has no rows has one, too, of rows that do not count.
        """
        return sum(1 for _ in self._micro_batches(self._next_row))

    @property
    def is_even(self) -> bool:
        """Whether all of this worker's micro-batches have as many rows, as shares are now."""
        return len({micro.end - micro.start for micro in self._micro_batches(0)}) == 1

    @property
    def _next_row(self) -> int:
        """Where the next pass begins: after the last row of an epoch, with the first of the next."""
        return self.position.row if self.position.row < self.rows else 0

    def _micro_batches(self, row: int) -> Iterator[MicroBatch]:
        shares = self.shares
        while row < self.rows:
            planned = self._step_at(row, shares)
            yield from planned
            row = planned[-1].step_end

    def _step_at(self, row: int, shares: tuple[float, ...] | None = None) -> list[MicroBatch]:
        share = self._share
        together = {"in_step": share.in_step, "in_pairs": share.in_pairs}
        return plan_step(row, self.rows, self.batch, shares or self.shares, share.rank, **together)

    def _order(self) -> Tensor:
        """The epoch's shuffled order: the same on every rank, and after a restart."""
        generator = torch.Generator().manual_seed(mix(self.seed, self.position.epoch))
        order = torch.randperm(self.rows, generator=generator)
        if not self.position.left:
            return order
        is_left = torch.zeros(self.rows, dtype=torch.bool)
        for start, end in self.position.left:
            is_left[start:end] = True
        return torch.cat([order[~is_left], order[is_left]])

    def pass_rows(self, rows: int) -> int:
        """Counts `rows` more of the epoch as done. Returns how many batches, the short last one included, ended."""
        before, self.position.row = self.position.row, self.position.row + rows
        return -(-self.position.row // self.batch.size) - -(-before // self.batch.size)

    def left_after(self, ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Ranges of this pass's order that are still to do, as Position keeps them; empty if they are its end."""
        if not self.position.left:
            rows = sum(end - start for start, end in ranges)
            return () if list(ranges) in ([], [(self.rows - rows, self.rows)]) else tuple(ranges)
        found: list[tuple[int, int]] = []
        for start, end in ranges:
            at = self.rows - sum(b - a for a, b in self.position.left)
            for a, b in self.position.left:
                low, high = max(start, at), min(end, at + b - a)
                if low < high:
                    found.append((a + low - at, a + high - at))
                at += b - a
        return tuple(found)

    def _fetch(self, order: Tensor, row: int) -> DataLoader[Any]:
        parts = self._micro_batches(row)
        indices: Iterator[list[int]] = (order[m.start : m.end].tolist() for m in parts)
        if self.batch.fetchers:
            epoch = self.position.epoch
            indices = ([mix(self.seed, epoch, m.start), *order[m.start : m.end].tolist()] for m in parts)
        return self._reader(indices)

    def _reader(self, indices: Iterable[list[int]], *, persistent: bool = False) -> DataLoader[Any]:
        # A generator of its own: a DataLoader draws its seed from the default one, and a resumed run would draw
        # once more often than a run that was never stopped.
        options: dict[str, Any] = {
            "generator": torch.Generator(),
            # Only rows that came from other processes: a tensor that is on the GPU already cannot be pinned.
            "pin_memory": self._device.type == "cuda" and self.batch.fetchers > 0,
            "num_workers": self.batch.fetchers,
            "persistent_workers": persistent,
        }
        batches = Batches(self.dataset, self.collate, seeded=self.batch.fetchers > 0)
        return DataLoader(batches, batch_size=None, sampler=indices, collate_fn=_as_it_is, **options)

    @property
    def _is_plain(self) -> bool:
        return is_plain(self.dataset, self.collate)

    def _check_step(self) -> None:
        """A forgotten step() would leave the other workers waiting for this one's gradients."""
        done = self.current
        if done is not None and done.last and self.position.row < done.step_end:
            raise ConfigError(
                f"The batch that ends at row {done.step_end} was given out, but step() was not called after it."
                " Call backward() and step() for every batch of the loader."
            )


class SliceLoader(Loader):
    """The slices that a host hands out, one by one. `plan` gives them until the epoch ends or the run stops."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.plan: Callable[[], Iterator[MicroBatch]] = lambda: iter(())
        self.seed_of: Callable[[MicroBatch], int] = lambda micro: 0
        self._ordered: tuple[tuple[int, int, tuple[tuple[int, int], ...]], Tensor] | None = None
        self._planned: Iterator[MicroBatch] | None = None
        """What is left of a pass: rows that were handed out belong to this worker, also if its loop took a break."""
        self._expected: list[list[int]] = []
        self._coming: deque[MicroBatch] = deque()
        """What the processes that fetch have been asked for."""
        self._fetchers: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.position.row >= self.rows:
            self.end_epoch()
        planned = self._planned = self._planned or self.plan()
        for micro in planned:
            self.given += 1
            self.current = micro
            batch = self._rows_of(micro)
            seed_everything(self.seed_of(micro))
            if not micro.counts:
                self.on_stand_in()
            yield arrived(batch, self._device)
        self.forget()
        if self.position.row >= self.rows:
            self.end_epoch()

    def forget(self) -> None:
        """The next pass begins where the run stands then."""
        self._planned = self._fetchers = None
        self._fetched = iter(())
        self._coming.clear()

    def expect(self, micros: Iterable[MicroBatch]) -> None:
        """What the plan gives from here on, though it may end early: it is fetched ahead, if there is anybody to."""
        if not self.batch.fetchers:
            return
        self._coming = deque(micros)
        self._expected[:] = [[self._seed_of_rows(micro), *self._rows_in(micro)] for micro in self._coming]
        # One for all windows of a pass: its processes stay, and drop what is no longer wanted.
        self._fetchers = self._fetchers or self._reader(self._expected, persistent=True)
        self._fetched = iter(self._fetchers)

    def end_epoch(self) -> None:
        self.forget()
        super().end_epoch()

    def __len__(self) -> int:
        """How many steps the rest of this epoch has; which slices of them are this worker's is not known before."""
        return -(-(self.rows - self._next_row) // self.batch.size)

    @property
    def is_even(self) -> bool:
        return False

    def _rows_of(self, micro: MicroBatch) -> Any:
        if self._coming and self._coming[0] == micro:
            self._coming.popleft()
            return next(self._fetched)
        if not self._is_plain:
            seed_everything(self._seed_of_rows(micro))
        return read_batch(self.dataset, self._rows_in(micro), self.collate)

    def _seed_of_rows(self, micro: MicroBatch) -> int:
        """Differs from the model's seed: what the model draws must not depend on which process reads rows."""
        return mix(self.seed_of(micro), 1)

    def _rows_in(self, micro: MicroBatch) -> list[int]:
        key = (self.seed, self.position.epoch, self.position.left)
        if self._ordered is None or self._ordered[0] != key:
            self._ordered = key, self._order()
        return self._ordered[1][micro.start : micro.end].tolist()
