"""Loader: this worker's micro-batches of an epoch, read and moved to where they are used; and where the epoch stands.

Knows nothing of models. Which rows come next is said by the round (engine/round.py).
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
from potluck.data.order import EMPTY
from potluck.data.plan import BatchConfig, BatchShare, MicroBatch, plan_step
from potluck.data.rows import Batches, Fetcher, Request, arrived, is_plain, mix, seed_everything
from potluck.data.source import AskedData, Collate, source_of
from potluck.data.stream import StreamRows
from potluck.errors import ConfigError


class Loader:
    """This worker's micro-batches. Each pass gives the rest of the current epoch.

    `current` is the micro-batch that was given last.
    """

    def __init__(
        self,
        dataset: Any,
        batch: BatchConfig,
        share: BatchShare | None = BatchShare(),
        *,
        device: torch.device,
        seed: int = 0,
        collate: Collate = None,
    ) -> None:
        """`dataset`: anything that source_of() takes. `share`: none where `plan` alone knows which rows come next."""
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
        self.on_epoch_end: Callable[[], None] = lambda: None
        self.fault: str | None = None
        """Why the next epoch cannot be: workers would see it in different orders."""
        self.plan: Callable[[], Iterator[MicroBatch]] = self._own_plan
        """Gives this worker's micro-batches of the rest of the epoch, or until the run stops."""
        self.seeds_of: Callable[[MicroBatch], tuple[int, int | None]] = self.seeds_of_place
        """Of a micro-batch: the seed of its rows, and the model's; none: the model draws on, as in one process."""
        self._is_shared, share = share is not None, share or BatchShare()
        self.shares = share.shares
        """The weights by which each batch is divided. They may change between two steps."""
        self._share = share
        self._device = device
        self._is_plain = is_plain(self.dataset, self.collate)
        self.fetching = source.fetching
        self._batches = Batches(self.dataset, self.collate, seeded=batch.fetchers > 0)
        self._fetcher = Fetcher(self._batches, batch.fetchers, source.fetching, device)
        self._fetched: Iterator[Any] = iter(())
        self._coming: deque[tuple[Request, int]] = deque()
        """What the processes that fetch have been asked for, and where it begins."""
        self._thread: tuple[Any, ...] = ()
        self._ahead: tuple[Request, Any] | None = None
        """A batch that is where it will be used already."""
        self._kept: dict[tuple[int, ...], Any] = {}
        """Of the batch that is under way, if it comes in several turns."""
        self._ordered: tuple[tuple[int, int, tuple[tuple[int, int], ...]], Tensor] | None = None
        self._aside: Fetcher | None = None
        """For what nobody expected, if rows can be read only in processes that were prepared for it."""
        if batch.fetchers and source.fetching.worker_init_fn is not None:
            self._aside = Fetcher(self._batches, 1, source.fetching, device)
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

    def seeds_of_place(self, micro: MicroBatch) -> tuple[int, None]:
        """The seeds of a run whose model draws as it would in one process: of its rows, where processes read them."""
        return mix(self.seed, self.position.epoch, micro.start), None

    @property
    def steps_of_epoch(self) -> int:
        return -(-self.rows // self.batch.size)

    def __iter__(self) -> Iterator[Any]:
        if self.position.row >= self.rows:  # a loop that took exactly len() batches has not asked for the end
            self.end_epoch()
        self.check_epoch()
        self.order.begin(self.position.epoch)
        try:
            for planned in self.plan():
                micro = self._give(planned)
                row_seed, model_seed = self.seeds_of(micro)
                batch = self._read_in_turn(self._request(micro, row_seed), is_seeded=model_seed is not None)
                if model_seed is not None:  # the model draws other numbers in each turn; the rows draw the same
                    seed_everything(mix(model_seed, self.turns.now) if self.turns.now else model_seed)
                if not micro.weighs:
                    self.on_stand_in()
                yield batch
        finally:
            self.forget()
        if self.position.row >= self.rows:
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

    def _own_plan(self) -> Iterator[MicroBatch]:
        """For a loader that no run has: the steps that are left, as whoever uses it moves the position."""
        while self.position.row < self.rows:
            self.expect_rest()
            yield from self.step_at(self.position.row)

    def _give(self, micro: MicroBatch) -> MicroBatch:
        if self.order.has_gaps and bool((self._order_now()[micro.start : micro.end] == EMPTY).all()):
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

    def fetch_ahead(self, micro: MicroBatch) -> None:
        """Sends a batch that comes next to a GPU that still computes, if rows are mere tensors, which draw no random
        numbers."""
        if self._is_plain:
            request = self._request(micro, self.seeds_of(micro)[0])
            self._ahead = request, arrived(self._read(request), self._device)

    def forget(self) -> None:
        """The pass is over, or the run stands elsewhere: nothing is expected any more."""
        self._fetched, self._ahead = iter(()), None
        self._coming.clear()
        self._thread = ()
        if not self.fetching.persistent_workers:  # they would live for as long as we do
            self._fetcher.close()
            if self._aside is not None:
                self._aside.close()

    def follow(
        self, thread: tuple[Any, ...], row: int, expected: Callable[[], Iterable[tuple[MicroBatch, int]]]
    ) -> None:
        """Begin to fetch ahead what comes, if there are fetchers. `expected` gives micro-batches with the seeds of
        their rows, of which some may never come. It is called again where another thread of them begins; else what lies
        before `row` is dropped."""
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

    def expect_rest(self) -> None:
        """Begin to fetch ahead the rest of the epoch, as shares are now."""
        thread, row = (self.position.epoch, self.position.left, self.shares), self.position.row
        self.follow(thread, row, lambda: ((each, self.seeds_of(each)[0]) for each in self.expected_from(row)))

    def _asked(self, expected: Iterable[tuple[MicroBatch, int]]) -> Iterator[Request]:
        """Note each request as it is made: the fetchers' processes ask as far as they may read ahead."""
        for micro, seed in expected:
            request = self._request(micro, seed)
            self._coming.append((request, micro.start))
            yield request

    def _read_in_turn(self, request: Request, *, is_seeded: bool) -> Any:
        """Read a request; in later turns, return what this worker read in the turn before."""
        if self.turns.count == 1:
            return self._arrive(request, is_seeded=is_seeded)
        if not self.turns.now and self._turn_given:
            self._kept.clear()
        self._turn_given, key = self.turns.now, tuple(request)
        if key not in self._kept:
            self._kept[key] = self._arrive(request, is_seeded=is_seeded)
        return self._kept[key]

    def _arrive(self, request: Request, *, is_seeded: bool) -> Any:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == request:
            return ahead[1]
        return arrived(self._read(request, is_seeded=is_seeded), self._device)

    def _read(self, request: Request, *, is_seeded: bool = False) -> Any:
        if any(coming == request for coming, _ in self._coming):
            while self._coming.popleft()[0] != request:
                next(self._fetched)  # nobody wants it any more
            return next(self._fetched)
        if self._aside is not None:
            return next(self._aside.read([request]))
        seed, *rows = request
        if is_seeded and not self._is_plain:
            seed_everything(seed)
        return self._batches.read(rows)

    def _request(self, micro: MicroBatch, seed: int) -> Request:
        return [seed, *self._rows_at(self._order_now(), micro)]

    def _order_now(self) -> Tensor:
        key = (self.seed, self.position.epoch, self.position.left)
        if self._ordered is None or self._ordered[0] != key:
            self._ordered = key, self._order()
        return self._ordered[1]

    def once(self) -> Iterator[Any]:
        """This worker's rows of the dataset in their own order, for looking and not for training."""
        order = torch.arange(self.rows) if not self.order.has_gaps else self.order.of(0, self.seed)
        for micro in self.expected_from(0):
            self.current = micro
            yield arrived(self._batches.read(self._rows_at(order, micro)), self._device)

    def __len__(self) -> int:
        """How many micro-batches the rest of this epoch has for this worker; where it is not known before which rows
        are its, how many steps.

        A step in which it has no rows has one, too, of rows that do not count.
        """
        if not self._is_shared:
            return self.turns.count * -(-(self.rows - self._next_row) // self.batch.size) - self.turns.now
        rest = sum(1 for _ in self.expected_from(self._next_row))
        done = self.turns.now * len(self.step_at(self._next_row)) if self.turns.now else 0
        return rest * self.turns.count - done

    def __bool__(self) -> bool:
        """Always: to count what is left, for `if loader:`, would take as long as an epoch has steps."""
        return True

    @property
    def is_even(self) -> bool:
        """Whether all of this worker's micro-batches have as many rows, as shares are now."""
        if not self._is_shared:
            return False
        return not self.order.has_gaps and len({micro.end - micro.start for micro in self.expected_from(0)}) == 1

    @property
    def _next_row(self) -> int:
        """Return where the next pass begins: after the last row of an epoch, with the first of the next."""
        return self.position.row if self.position.row < self.rows else 0

    def expected_from(self, row: int) -> Iterator[MicroBatch]:
        """This worker's micro-batches of the epoch from this place on, as shares are now."""
        shares = self.shares
        while row < self.rows:
            planned = self.step_at(row, shares)
            yield from planned
            row = planned[-1].step_end

    def step_at(self, row: int, shares: tuple[float, ...] | None = None) -> list[MicroBatch]:
        """This worker's micro-batches of the step that begins there."""
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

    def restore(self, seed: int, stream: list[list[Any]]) -> None:
        """The run stands elsewhere. `stream`: what saved_stream() gave there."""
        self.seed, self.current = seed, None
        if isinstance(self.dataset, StreamRows):
            self.dataset.seed = self.seed
            self.dataset.restore(stream)

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
