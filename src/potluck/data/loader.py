"""An epoch to ranges, ranges to micro-batches, and where an epoch stands.

Knows nothing of models. A batch is the rows of one step over all workers; each worker gets a range of it,
in micro-batches.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from potluck.agree.shares import share_out, without_singles
from potluck.agree.turns import Turns
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
from potluck.fleet.tree import slice_rows
from potluck.words import check_at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    size: int = 32
    """Rows per step, over all workers together."""
    micro_size: int | None = None
    """Rows that go through the model at once on one worker; none: a worker's whole part."""
    fetchers: int = 0
    """Processes on each worker that fetch rows ahead of the model; 0: rows are fetched when they are needed. Workers
    of a host always do so."""
    slices: int | None = None
    """Under a host, with the Sync policy: the fixed parts of a step's batch that are handed out, at least; none: 8.
    More of them share out more finely among workers of mixed speeds, and each is computed by itself."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, not {self.size}")
        if self.micro_size is not None and self.micro_size < 1:
            raise ValueError(f"micro_size must be at least 1, not {self.micro_size}")
        if self.fetchers < 0:
            raise ValueError(f"fetchers must be at least 0, not {self.fetchers}")
        check_at_most("size", self.size, 1 << 31, "it is the rows of one step, such as 32")
        check_at_most("fetchers", self.fetchers, 1 << 10, "each is a process, and a few keep a model busy")
        if self.slices is not None and not 1 <= self.slices <= 1 << 16:
            raise ValueError(f"slices must be between 1 and 65,536, not {self.slices}")

    @property
    def slice_count(self) -> int:
        """Enough that no slice has more rows than go through the model at once."""
        return min(self.size, max(self.slices or 8, self._fewest_slices))

    @property
    def slices_in_pairs(self) -> int:
        """The same, but fewer where a slice would have but one row."""
        return min(self.slice_count, max(1, self.size // 2, self._fewest_slices))

    @property
    def _fewest_slices(self) -> int:
        return -(-self.size // self.micro_size) if self.micro_size else 1


@dataclass(slots=True)
class Position:
    """Where an epoch stands, no matter which workers have trained it so far."""

    epoch: int = 0
    row: int = 0
    """Rows of this epoch's shuffled order that are done."""
    left: tuple[tuple[int, int], ...] = ()
    """If what was left to do when this pass began was not one range, its ranges: they then follow what is done."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A range of the epoch's shuffled order that goes through the model at once."""

    start: int
    end: int
    last: bool
    """Whether this worker's part of the step ends here."""
    step_end: int
    """Where the whole step ends, over all workers."""
    number: int = 0
    """Which of this worker's parts of the step it is."""
    counts: bool = True
    """False: somebody else's rows, with which this worker takes part in what all must do together."""


def plan_step(
    row: int,
    rows: int,
    batch: BatchConfig,
    shares: Sequence[float],
    rank: int,
    *,
    in_step: bool = False,
    in_pairs: bool = False,
) -> list[MicroBatch]:
    """This rank's micro-batches of the step that starts at `row`. Where it has no rows, it gets some that do not count:
    so the loop of every rank sees every step, and may end after any of them.

    `in_step`: all ranks get equally many, and for each that has no rows there are some that do not count.
    `in_pairs`: none of a single row, of which BatchNorm can take no mean, wherever that can be had.
    """
    step_end = min(row + batch.size, rows)
    parts = share_out(step_end - row, shares)
    # A whole batch of so few rows was asked for: half of the workers would be idle in every step.
    if in_pairs and (step_end - row >= 2 * len(parts) or step_end - row < batch.size):
        parts = without_singles(parts)
    start = row + sum(parts[:rank])
    size = batch.micro_size or max(1, parts[rank])
    if not in_step and parts[rank]:
        cuts = _cut_part(start, parts[rank], size, in_pairs=in_pairs)
        return [MicroBatch(a, b, b == cuts[-1], step_end) for a, b in itertools.pairwise(cuts)]
    many = max(-(-part // (batch.micro_size or part or 1)) for part in parts) if in_step else 1
    own = max(1, min(many, parts[rank] // 2)) if in_pairs else many
    if -(-parts[rank] // own) > size:
        own = many
    cuts = [start + parts[rank] * number // own for number in range(own + 1)]
    bounds = [*itertools.pairwise(cuts), *[(start, start)] * (many - own)]
    # Two, also where the step has one: of one alone BatchNorm has no variance.
    stand_in = max(0, step_end - 2), step_end
    return [
        MicroBatch(a, b, number == many, step_end)
        if a < b
        else MicroBatch(*stand_in, number == many, step_end, counts=False)
        for number, (a, b) in enumerate(bounds, start=1)
    ]


def even_batches(start: int, end: int, size: int, most: int, *, in_pairs: bool = False) -> list[tuple[int, int]]:
    """These rows in batches of at most `size`, as even as can be: a last one of a single row would say little.

    `in_pairs`: none of a single row; so some may be larger by one, if that is not more than `most`.
    """
    rows = end - start
    count = -(-rows // max(1, size))
    if in_pairs and size > 1:
        pairs = max(1, rows // 2)
        count = pairs if pairs < count and -(-rows // pairs) <= most else count
    return slice_rows(start, rows, count)


def _cut_part(start: int, rows: int, size: int, *, in_pairs: bool) -> list[int]:
    """Where its micro-batches begin, and where the last one ends."""
    end = start + rows
    cuts = [*range(start, end, size), end]
    if in_pairs and rows > size > 2 and cuts[-1] - cuts[-2] == 1:
        cuts[-2] -= 1
    return cuts


@dataclass(frozen=True, slots=True)
class BatchShare:
    """How each batch is shared out, and which part is this worker's."""

    shares: tuple[float, ...] = (1.0,)
    rank: int = 0
    in_step: bool = False
    """It does as many micro-batches as the others, if need be with rows that do not count."""
    in_pairs: bool = False
    """None of a single row, where that can be had."""


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
        self.turns = Turns()
        """Each batch is given once for each of them; whoever steps says whose it is."""
        self._turn_given = 0
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
                yield from self._in_turns(self._step_at(self.position.row), fetched)
        finally:
            if fetched is self._fetched:  # else the processes that fetch would live for as long as we do
                self._fetched, self._ahead = iter(()), None

    def _in_turns(self, planned: list[MicroBatch], fetched: Iterator[Any]) -> Iterator[Any]:
        """A step's micro-batches, once for each turn that is left of it: fetched once, and the same in each."""
        kept: list[Any] = []
        first = self.turns.now
        for turn in range(first, self.turns.count):
            for number, micro in enumerate(planned):
                self.current, self._turn_given = micro, turn
                if not micro.counts:
                    self.on_stand_in()
                self.given += 1
                if turn > first:
                    batch = kept[number]
                else:
                    batch, self._ahead = self._ahead, None
                    batch = arrived(next(fetched), self._device) if batch is None else batch
                    kept += [batch] if self.turns.count > 1 else []
                yield batch
            self._check_turn(turn)
            if self.is_stopped():
                return

    def _check_turn(self, turn: int) -> None:
        if self.turns.now == turn < self.turns.count - 1:
            raise ConfigError(
                "The batch was given out for one optimizer's turn, but step() was not called after it. Call backward()"
                " and step() for every batch of the loader: with several optimizers each batch comes once for each."
            )

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
        rest = sum(1 for _ in self._micro_batches(self._next_row))
        done = self.turns.now * len(self._step_at(self._next_row)) if self.turns.now else 0
        return rest * self.turns.count - done

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
        """Counts `rows` more of the epoch as done. Returns how many batches, the short last one included, ended: one
        that comes in several turns counts as many times."""
        before, self.position.row = self.position.row, self.position.row + rows
        return self.turns.count * (-(-self.position.row // self.batch.size) - -(-before // self.batch.size))

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
        is_given = done is not None and done.last and self.turns.now == self._turn_given
        if done is not None and is_given and self.position.row < done.step_end:
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
        self._kept: dict[tuple[int, int], Any] = {}
        """Of the batch that is under way, if it comes in several turns."""

    def __iter__(self) -> Iterator[Any]:
        if self.position.row >= self.rows:
            self.end_epoch()
        planned = self._planned = self._planned or self.plan()
        for micro in planned:
            self.given += 1
            self.current = micro
            batch = self._rows_in_turn(micro)
            seed_everything(self._seed_in_turn(micro))
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
        return self.turns.count * -(-(self.rows - self._next_row) // self.batch.size) - self.turns.now

    @property
    def is_even(self) -> bool:
        return False

    def _rows_in_turn(self, micro: MicroBatch) -> Any:
        """As they were in the turn before, if this worker had them."""
        if self.turns.count == 1:
            return self._rows_of(micro)
        if not self.turns.now and self._turn_given:
            self._kept.clear()
        self._turn_given, key = self.turns.now, (micro.start, micro.end)
        if key not in self._kept or not self.turns.now:
            self._kept[key] = self._rows_of(micro)
        return self._kept[key]

    def _seed_in_turn(self, micro: MicroBatch) -> int:
        """The model draws other numbers in each turn; the rows, which draw by seed_of(), the same."""
        seed = self.seed_of(micro)
        return mix(seed, self.turns.now) if self.turns.now else seed

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
