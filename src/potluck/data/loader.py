"""Loader: this worker's micro-batches of an epoch, read and moved to where they are used; and where the epoch stands.

Knows nothing of models. SliceLoader is for rounds that say themselves which rows come next.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from potluck.agree.records import Position
from potluck.agree.terms import Fingerprint
from potluck.agree.turns import Turns
from potluck.data.fetching import Fetcher, Request
from potluck.data.order import EMPTY
from potluck.data.plan import BatchConfig, BatchShare, MicroBatch, plan_step
from potluck.data.rows import Batches, arrived, is_plain, mix, seed_everything
from potluck.data.source import AskedData, Collate, source_of
from potluck.data.stream import StreamRows
from potluck.errors import ConfigError


class Loader:
    """This worker's micro-batches. Each pass gives the rest of the current epoch.

    `current` is the micro-batch that was given last; its trainer calls seek() when its step is done.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchConfig,
        share: BatchShare = BatchShare(),
        *,
        device: torch.device,
        seed: int = 0,
        collate: Collate = None,
    ) -> None:
        """`dataset`: anything that source_of() takes."""
        source = source_of(dataset, AskedData(batch_size=batch.size, collate=collate, seed=seed))
        self.dataset = source.dataset
        self.collate = source.collate
        self.order = source.order
        self.batch = batch
        self.rows = self.order.rows
        """Places of an epoch: of most orders, its rows."""
        self._at = Position()
        self._read_position: Callable[[], Position] = lambda: self._at
        self.seek: Callable[[Position], None] = self._stand_at
        self.seed = seed
        self.current: MicroBatch | None = None
        self.given = 0
        """Batches that were given so far."""
        self.on_stand_in: Callable[[], None] = lambda: None
        """Called before rows that do not count."""
        self.on_step: Callable[[], None] = lambda: None
        """Called before the batches of each step."""
        self.on_epoch_end: Callable[[], None] = lambda: None
        self.fault: str | None = None
        """Why the next epoch cannot be: workers would see it in different orders."""
        self.is_stopped: Callable[[], bool] = lambda: False
        self.shares = share.shares
        """The weights by which each batch is divided. They may change between two steps."""
        self._share = share
        self._device = device
        self._is_plain = is_plain(self.dataset, self.collate)
        self.fetching = source.fetching
        self._batches = Batches(self.dataset, self.collate, seeded=batch.fetchers > 0)
        self._fetcher = Fetcher(self._batches, batch.fetchers, source.fetching, device)
        self._fetched: Iterator[Any] = iter(())
        self._ahead: Any = None
        self.turns = Turns()
        """Each batch is given once for each of them; the one that steps says whose it is."""
        self._turn_given = 0
        if self.rows == 0:
            raise ConfigError("The dataset is empty.")

    @property
    def position(self) -> Position:
        """Where the epoch stands: the run's position, or that of a loader which no run has."""
        return self._read_position()

    def _stand_at(self, position: Position) -> None:
        self._at = position

    def follow_run(self, read: Callable[[], Position], seek: Callable[[Position], None]) -> None:
        """From now on the position is a run's."""
        self._read_position, self.seek = read, seek

    @property
    def steps_of_epoch(self) -> int:
        return -(-self.rows // self.batch.size)

    def __iter__(self) -> Iterator[Any]:
        if self.position.row >= self.rows:  # a loop that took exactly len() batches has not asked for the end
            self.end_epoch()
        self.check_epoch()
        yield from self._rest_of_epoch()
        self._check_step()
        if self.is_stopped() and self.position.row < self.rows:
            return
        self.end_epoch()

    def check_epoch(self, keep: Callable[[], None] = lambda: None) -> None:
        """Raises ConfigError if the epoch that comes has no order, or not the same on all workers; `keep` is called
        before."""
        try:
            if self.fault is not None:
                raise ConfigError(self.fault)
            self.order.of(self.position.epoch, self.seed)
        except ConfigError:
            keep()
            raise

    def end_epoch(self) -> None:
        """Ends the epoch: all of its rows are done."""
        self.current = None
        self.on_epoch_end()
        self.seek(self.position.next_epoch())

    def _rest_of_epoch(self) -> Iterator[Any]:
        order, shares = self._order(), None
        fetched: Iterator[Any] = iter(())
        self.order.begin(self.position.epoch)
        try:
            while self.position.row < self.rows and not self.is_stopped():
                self._check_step()
                if shares != self.shares:  # also at first: rows are fetched ahead, for shares as they are
                    shares = self.shares
                    fetched = self._fetched = self._fetch(order, self.position.row)
                    self._ahead = None
                self.on_step()
                yield from self._in_turns(self._step_at(self.position.row), order, fetched)
        finally:
            if fetched is self._fetched:
                self._fetched, self._ahead = iter(()), None
                if not self.fetching.persistent:  # they would live for as long as we do
                    self._fetcher.close()

    def _give(self, micro: MicroBatch, order: Tensor) -> MicroBatch:
        if self.order.has_gaps and bool((order[micro.start : micro.end] == EMPTY).all()):
            micro = replace(micro, is_empty=True)
        self.current = micro
        self.given += 1
        return micro

    def _rows_at(self, order: Tensor, micro: MicroBatch) -> list[int]:
        """List the rows of a micro-batch; if all of its places are empty, two others, which will weigh nothing."""
        rows = order[micro.start : micro.end]
        if self.order.has_gaps:
            rows = rows[rows != EMPTY]
            rows = rows if len(rows) else order[order != EMPTY][:2]
        return list(rows.tolist())

    def _in_turns(self, planned: list[MicroBatch], order: Tensor, fetched: Iterator[Any]) -> Iterator[Any]:
        """A step's micro-batches, once for each turn that is left of it: fetched once, and the same in each."""
        kept: list[Any] = []
        first = self.turns.now
        for turn in range(first, self.turns.count):
            for number, micro in enumerate(planned):
                self._turn_given = turn
                if not self._give(micro, order).weighs:
                    self.on_stand_in()
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
        order = torch.arange(self.rows) if not self.order.has_gaps else self.order.of(0, self.seed)
        for micro, batch in zip(self._micro_batches(0), self._fetch(order, 0), strict=True):
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
        return not self.order.has_gaps and len({micro.end - micro.start for micro in self._micro_batches(0)}) == 1

    @property
    def _next_row(self) -> int:
        """Return where the next pass begins: after the last row of an epoch, with the first of the next."""
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
        """The epoch's order: the same on every rank, and after a restart."""
        order = self.order.of(self.position.epoch, self.seed)
        if not self.position.left:
            return order
        is_left = torch.zeros(self.rows, dtype=torch.bool)
        for start, end in self.position.left:
            is_left[start:end] = True
        return torch.cat([order[~is_left], order[is_left]])

    def saved_stream(self) -> list[list[Any]]:
        """Return what a checkpoint keeps of a stream; for other data, nothing."""
        if not isinstance(self.dataset, StreamRows):
            return []
        left = self._order()[self.position.row :]
        return self.dataset.saved(int(left.min()) if len(left) else (self.position.epoch + 1) * self.rows)

    def restore_stream(self, saved: list[list[Any]]) -> None:
        if isinstance(self.dataset, StreamRows):
            self.dataset.seed = self.seed
            self.dataset.restore(saved)

    def seen(self) -> Fingerprint:
        """Return the content of some rows of this epoch, as this worker has read them from a stream."""
        return self.dataset.seen(self.position.epoch) if isinstance(self.dataset, StreamRows) else {}

    def digest_of_next(self) -> str:
        """Return the digest of the next epoch's order; empty where the seed determines it, and where it cannot be made
        yet."""
        try:
            return self.order.digest(self.position.epoch + 1, self.seed)
        except ConfigError:  # said when that epoch begins
            return ""

    def left_after(self, ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Ranges of this pass's order that are still to do, as Position keeps them; empty if they are its end."""
        if not self.position.left:
            rows = sum(end - start for start, end in ranges)
            return () if list(ranges) in ([], [(self.rows - rows, self.rows)]) else tuple(ranges)
        left: list[tuple[int, int]] = []
        for start, end in ranges:
            at = self.rows - sum(b - a for a, b in self.position.left)
            for a, b in self.position.left:
                low, high = max(start, at), min(end, at + b - a)
                if low < high:
                    left.append((a + low - at, a + high - at))
                at += b - a
        return tuple(left)

    def _fetch(self, order: Tensor, row: int) -> Iterator[Any]:
        """This worker's batches from this place on."""
        epoch, is_seeded = self.position.epoch, self.batch.fetchers > 0
        return self._fetcher.read(
            [*([mix(self.seed, epoch, micro.start)] if is_seeded else []), *self._rows_at(order, micro)]
            for micro in self._micro_batches(row)
        )

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
        self._coming: deque[tuple[Request, int]] = deque()
        """What the processes that fetch have been asked for, and where it begins."""
        self._kept: dict[tuple[int, ...], Any] = {}
        """Of the batch that is under way, if it comes in several turns."""
        self._thread: tuple[int, ...] = ()
        self._aside: Fetcher | None = None
        """For what nobody expected, if rows can be read only in processes that were prepared for it."""
        if self.batch.fetchers and self.fetching.on_start is not None:
            self._aside = Fetcher(self._batches, 1, self.fetching, self._device)

    def __iter__(self) -> Iterator[Any]:
        if self.position.row >= self.rows:
            self.end_epoch()
        self.check_epoch()
        planned = self._planned = self._planned or self.plan()
        self.order.begin(self.position.epoch)
        for micro in planned:
            micro = self._give(micro, self._order_now())
            batch = self._read_in_turn(self._request(micro, self.seed_of(micro)))
            seed_everything(self._seed_in_turn(micro))
            if not micro.weighs:
                self.on_stand_in()
            yield arrived(batch, self._device)
        self.forget()
        if self.position.row >= self.rows:
            self.end_epoch()

    def forget(self) -> None:
        """The next pass begins where the run stands then."""
        self._planned = None
        self._fetched = iter(())
        self._coming.clear()
        self._thread = ()
        if not self.fetching.persistent:
            self._fetcher.close()
            if self._aside is not None:
                self._aside.close()

    def expect(self, micros: Iterable[MicroBatch]) -> None:
        """Begin to fetch ahead what the plan gives from here on, if there are fetchers; it may end early."""
        if self.batch.fetchers:
            self._coming.clear()
            self._fetched = self._fetcher.read(self._asked((micro, self.seed_of(micro)) for micro in list(micros)))

    def follow(
        self, thread: tuple[int, ...], row: int, expected: Callable[[], Iterable[tuple[MicroBatch, int]]]
    ) -> None:
        """Fetch ahead as expect() does, for work that is handed out bit by bit. `expected` gives micro-batches with
        their seeds, of which some may never come. It is called again where another thread of them begins; else what
        lies before `row` is dropped."""
        if not self.batch.fetchers:
            return
        if self._thread == thread:
            while self._coming and self._coming[0][1] < row:
                self._coming.popleft()
                next(self._fetched)
            return
        self._thread = thread
        self._coming.clear()
        self._fetched = self._fetcher.read(self._asked(expected()))

    def _asked(self, expected: Iterable[tuple[MicroBatch, int]]) -> Iterator[Request]:
        """Note each request as it is made: the fetchers' processes ask as far as they may read ahead."""
        for micro, seed in expected:
            request = self._request(micro, seed)
            self._coming.append((request, micro.start))
            yield request

    def end_epoch(self) -> None:
        self.forget()
        super().end_epoch()

    def __len__(self) -> int:
        """How many steps the rest of this epoch has; which slices of them are this worker's is not known before."""
        return self.turns.count * -(-(self.rows - self._next_row) // self.batch.size) - self.turns.now

    @property
    def is_even(self) -> bool:
        return False

    def _read_in_turn(self, request: Request) -> Any:
        """Read a request; in later turns, return what this worker read in the turn before."""
        if self.turns.count == 1:
            return self._read(request)
        if not self.turns.now and self._turn_given:
            self._kept.clear()
        self._turn_given, key = self.turns.now, tuple(request)
        if key not in self._kept:
            self._kept[key] = self._read(request)
        return self._kept[key]

    def _seed_in_turn(self, micro: MicroBatch) -> int:
        """The model draws other numbers in each turn; the rows, which draw by seed_of(), the same."""
        seed = self.seed_of(micro)
        return mix(seed, self.turns.now) if self.turns.now else seed

    def _read(self, request: Request) -> Any:
        if any(coming == request for coming, _ in self._coming):
            while self._coming.popleft()[0] != request:
                next(self._fetched)  # nobody wants it any more
            return next(self._fetched)
        if self._aside is not None:
            return next(self._aside.read([request]))
        seed, *rows = request
        if not self._is_plain:
            seed_everything(seed)
        return self._batches.read(rows)

    def _request(self, micro: MicroBatch, seed: int) -> Request:
        """Make a request with a seed that differs from the model's: what the model draws must not depend on which
        process reads rows."""
        return [mix(seed, 1), *self._rows_at(self._order_now(), micro)]

    def _order_now(self) -> Tensor:
        key = (self.seed, self.position.epoch, self.position.left)
        if self._ordered is None or self._ordered[0] != key:
            self._ordered = key, self._order()
        return self._ordered[1]
