"""ElChe: measured speeds to batches per rank. The slowest anchors the cadence; the others fill the same time. Pure.

As published, to the last bit, also where another rule would be better: `tests/vectors/elche*.json*` hold whole traces.
Divisions come first where the published ones do, since the other order rounds differently; counts end at 2^64 - 1. What
Potluck does better is in `windows.py`. One thing differs: an anchor above `max_anchor` begins at `max_anchor`; the
published one keeps it, and panics when it is tuned for the first time.
"""

import math
from collections.abc import Callable, Sequence

from potluck.agree.shares import share_out
from potluck.words import check_at_least

LEAST_TARGET, MOST_TARGET = 0.01, 0.50
LEAST_MS = 0.001
MOST_COUNT = 2**64 - 1


class ElChe:
    """Measured speeds to batches per rank: the slowest rank does `anchor` batches, the others fill the same time.

    Cadence and Async size their windows by it. By itself: report_timing() after each window, then read batch_counts.
    """

    def __init__(
        self,
        world_size: int,
        anchor: int = 10,
        max_anchor: int = 200,
        overhead_target: float = 0.10,
        max_batch_diff: int | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"a world needs at least one rank, not {world_size}")
        check_at_least(1, anchor=anchor, max_anchor=max_anchor)
        check_at_least(0, max_batch_diff=max_batch_diff)
        if not math.isfinite(overhead_target):
            raise ValueError(f"overhead_target must be a number, not {overhead_target}")
        self.world_size = world_size
        self.anchor = min(anchor, max_anchor)
        """Batches of the slowest rank in one window."""
        self.batch_counts = [anchor] * world_size
        """Batches of each rank in the next window."""
        self.ms_per_batch = [0.0] * world_size
        """Measured, and smoothed; 0: not measured yet."""
        self.overhead_target = clamp_target(overhead_target)
        self.max_anchor = max_anchor
        self.max_batch_diff = max_batch_diff
        self.initial_anchor = self.anchor
        self.is_measured = False

    @classmethod
    def with_speed_ratio(
        cls, world_size: int, slow_rank: int, ratio: float, anchor: int = 10, **options: float | None
    ) -> "ElChe":
        """A first guess: the others do `ratio` times as many batches as the slow rank."""
        made = cls(world_size, anchor, **options)  # type: ignore[arg-type]
        if not 0 <= slow_rank < world_size:
            raise ValueError(f"there is no rank {slow_rank} in a world of {world_size}")
        if not math.isfinite(ratio):
            raise ValueError(f"ratio must be a number, not {ratio}")
        others = max(1, _round(made.anchor * max(1.0, ratio)))
        made.batch_counts = [made.anchor if rank == slow_rank else others for rank in range(world_size)]
        return made

    @property
    def anchor_wall_ms(self) -> float:
        """How long a window should last: `anchor` batches at the slowest rank's speed."""
        return self.anchor * max(self.ms_per_batch)

    @property
    def speeds(self) -> list[float]:
        """Batches per millisecond of each rank; all equal before anything was measured."""
        return [1 / ms if ms > 0 else 0.0 for ms in self.ms_per_batch] if self.is_measured else [1.0] * self.world_size

    def report_timing(self, wall_ms: Sequence[float], batches: Sequence[int], sync_ms: float) -> None:
        """Call it after each window with the time each rank computed, the batches it did, and what averaging cost."""
        for name, given in (("wall_ms", wall_ms), ("batches", batches)):
            if len(given) != self.world_size:
                raise ValueError(f"{name} has {len(given)} numbers, and the world {self.world_size} ranks")
        for rank, (wall, done) in enumerate(zip(wall_ms, batches, strict=True)):
            if done > 0 and wall > 0:
                new, old = wall / done, self.ms_per_batch[rank]
                if old > 0:
                    alpha = min(0.8, max(0.1, abs(new - old) / old))
                    new = alpha * new + (1 - alpha) * old
                self.ms_per_batch[rank] = new
        if max(self.ms_per_batch) <= 0:  # nothing was measured yet: what agreeing took says nothing of windows
            return
        longest = max(wall_ms)
        if longest > 0 and sync_ms > 0:
            overhead = sync_ms / longest
            if overhead > self.overhead_target:
                wanted = _count_of(self.anchor * (overhead / self.overhead_target), math.ceil)
                self.anchor = min(self.max_anchor, max(self.initial_anchor, wanted))
            elif overhead < self.overhead_target / 2 and self.anchor > self.initial_anchor:
                self.anchor -= 1
        self._count()
        self.is_measured = True

    def nudge_anchor_down(self, factor: float) -> None:
        """Shortens windows by `factor`, because the replicas drift apart."""
        factor = min(1.0, max(0.1, factor))
        self.anchor = min(self.anchor, max(1, math.ceil(self.anchor * factor)))
        self._count()

    def parts(self, total: int) -> list[int]:
        """`total` samples in proportion to speed: rounded down, and the fastest ranks get one more of the remainder.

        As published: in floats, and a rank that was never measured counts as one of 0.001 ms per batch. Potluck itself
        shares by `share_out`, which is exact.
        """
        if not self.is_measured:
            return share_out(total, [1] * self.world_size)
        speeds = [1 / max(ms, LEAST_MS) for ms in self.ms_per_batch]
        batches = [math.floor(speed / sum(speeds) * total) for speed in speeds]
        by_speed = sorted(range(self.world_size), key=lambda rank: -speeds[rank])
        for rank in by_speed[: total - sum(batches)]:
            batches[rank] += 1
        return batches

    def clamp_total(self, most: int) -> list[int]:
        """batch_counts, scaled down if their sum is above `most`; each rank keeps at least one batch."""
        total = sum(self.batch_counts)
        if total <= most:
            return list(self.batch_counts)
        scale = most / total
        clamped = [max(1, math.floor(count * scale)) for count in self.batch_counts]
        for rank in range(self.world_size):
            if sum(clamped) >= most:
                break
            clamped[rank] += 1
        return clamped

    def _count(self) -> None:
        slowest = max(self.ms_per_batch)
        if slowest <= 0:
            return
        for rank, own in enumerate(self.ms_per_batch):
            # A rank that was never measured does as many as the slowest.
            is_anchor = own <= 0 or abs(own - slowest) < 1e-6
            wanted = self.anchor if is_anchor else max(1, _round(self.anchor * (slowest / own)))
            current = self.batch_counts[rank]
            if self.is_measured and abs(wanted - current) <= 0.1 * current:
                continue
            if self.is_measured and self.max_batch_diff is not None:
                wanted = min(current + self.max_batch_diff, max(current - self.max_batch_diff, wanted))
            self.batch_counts[rank] = wanted


def clamp_target(overhead_target: float) -> float:
    return min(MOST_TARGET, max(LEAST_TARGET, overhead_target))


def _round(value: float) -> int:
    """Halves up. `value + 0.5` would round by itself: just below 0.5 it is 1."""
    whole = _count_of(value, math.floor)
    return min(MOST_COUNT, whole + (value - whole >= 0.5))


def _count_of(value: float, rounded: Callable[[float], int]) -> int:
    """A float as a count: as large as there are, for one that is larger or infinite, and 0 for no number."""
    if math.isnan(value):
        return 0
    return rounded(value) if value < MOST_COUNT else MOST_COUNT
