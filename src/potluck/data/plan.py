"""Cuts an epoch into batches, a batch into each worker's part, and a part into micro-batches. Knows no data."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.agree.shares import share_out, without_singles
from potluck.fleet.tree import slice_rows
from potluck.words import check_at_least, check_at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How large batches are, and how each is cut."""

    size: int = 32
    """Rows per step, over all workers together."""
    micro_size: int | None = None
    """Rows that go through the model at once on one worker; none: a worker's whole part."""
    fetchers: int = 0
    """Processes on each worker that fetch rows ahead of the model; 0: rows are fetched when they are needed."""
    slices: int | None = None
    """Under a host, with the Sync policy: the fixed parts of a step's batch that are handed out, at least; none: 8.
    More of them share out more finely among workers of mixed speeds, and each is computed by itself."""

    def __post_init__(self) -> None:
        check_at_least(1, size=self.size, micro_size=self.micro_size)
        check_at_least(0, fetchers=self.fetchers)
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
        """Count the slices of a step, but fewer where a slice would have only one row."""
        return min(self.slice_count, max(1, self.size // 2, self._fewest_slices))

    @property
    def _fewest_slices(self) -> int:
        return -(-self.size // self.micro_size) if self.micro_size else 1


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
    """Index of this part among this worker's parts of the step."""
    counts: bool = True
    """False: somebody else's rows, with which this worker takes part in what all must do together."""
    is_empty: bool = False
    """All of its places are empty: they are done with rows that weigh nothing."""

    @property
    def weighs(self) -> bool:
        """Whether its rows have a part in the step."""
        return self.counts and not self.is_empty


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
    """List where the micro-batches of a part begin, and where the last one ends."""
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
    """Whether it does as many micro-batches as the others, if need be with rows that do not count."""
    in_pairs: bool = False
    """None of a single row, where that can be had."""
