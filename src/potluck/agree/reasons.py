"""Says why rows are shared among workers as they are: by their measured speeds. Pure."""

from collections.abc import Sequence

from potluck.words import in_list, percent

ALIKE = 1.1
"""Workers of which none has more rows than this many times another's count as equally fast."""
MOST_LISTED = 8
"""The most workers of whom each one's part is listed."""
UNMEASURED = "Nothing was measured yet, so all count as equally fast"


def why_shared(names: Sequence[str], rows: Sequence[int], speeds: Sequence[float]) -> str:
    """Say why each worker has these rows, as a sentence without its end.

    `speeds`: rows a second while each computes; 0 where it was not measured.
    """
    if len(names) == 1:
        return f"Only {names[0]} is here"
    ranks = [rank for rank, speed in enumerate(speeds) if speed > 0]
    if not ranks:
        return UNMEASURED
    slowest, fastest = min(ranks, key=lambda rank: speeds[rank]), max(ranks, key=lambda rank: speeds[rank])
    if max(rows) <= max(ALIKE * min(rows), min(rows) + 1):
        paces = dict.fromkeys([_pace(speeds[slowest]), _pace(speeds[fastest])])
        return f"All are about equally fast, at {' to '.join(paces)} rows/s"
    others = f"{names[fastest]} {_pace(speeds[fastest])}"
    if len(names) > 2:
        others = f"{names[fastest]}, the fastest, {_pace(speeds[fastest])}"
    share = percent(rows[slowest] / max(1, sum(rows)))
    return f"{names[slowest]} has {share} of the rows: it does {_pace(speeds[slowest])} rows/s, and {others}"


def each_part(numbers: Sequence[int]) -> str:
    """List each worker's part; of many workers the least and the most."""
    if len(numbers) <= MOST_LISTED:
        return in_list([f"{number:,}" for number in numbers])
    return f"{min(numbers):,} to {max(numbers):,}"


def _pace(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
