"""Adds up the ranges of an epoch that were trained, and proves that each sample was used exactly once. Pure.

A range is a half-open interval of positions in the epoch's shuffled order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from potluck.agree.records import Range
from potluck.words import plural


@dataclass(frozen=True, slots=True)
class Proof:
    """Sums up the ranges of all workers."""

    total: int
    used: int
    """Positions that were trained at least once."""
    repeated: int
    """Positions that were trained more than once."""
    outside: int
    """Positions that the epoch does not have."""
    counted: str = ""
    """Words for a position, if it is not one sample: several."""

    @property
    def holds(self) -> bool:
        return self.used == self.total and not self.repeated and not self.outside

    def __str__(self) -> str:
        if self.holds and self.counted:
            return f"each of the {self.total:,} {self.counted} was used exactly once"
        if self.holds:
            samples = "its one sample" if self.total == 1 else f"each of its {self.total:,} samples"
            return f"{samples} was used exactly once"
        faults = {
            "not used": self.total - self.used,
            "used more than once": self.repeated,
            "outside the epoch": self.outside,
        }
        whole = f"the {self.total:,} {self.counted}" if self.counted else f"its {plural(self.total, 'sample')}"
        return f"of {whole}, " + ", ".join(f"{count:,} {fault}" for fault, count in faults.items() if count)


class Ledger:
    """One worker's own record of an epoch. Neighbouring ranges are kept as one."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges: list[Range] = []
        for start, end in ranges:
            self.record(start, end)

    def record(self, start: int, end: int) -> None:
        if start >= end:
            return
        if self.ranges and self.ranges[-1][1] == start:
            start = self.ranges.pop()[0]
        self.ranges.append((start, end))


def prove(ranges: Iterable[Range], total: int, counted: str = "") -> Proof:
    """Every worker's ranges against the epoch's [0, total). `counted`: as Proof has it."""
    used = repeated = outside = 0
    reached = 0
    twice_until = 0
    for start, end in sorted(ranges):
        outside += max(0, end - max(start, total))
        start, end = min(start, total), min(end, total)
        used += max(0, end - max(start, reached))
        again_from, again_until = max(start, twice_until), min(end, reached)
        repeated += max(0, again_until - again_from)
        twice_until = max(twice_until, again_until)
        reached = max(reached, end)
    return Proof(total, used, repeated, outside, counted)
