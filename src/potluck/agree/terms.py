"""Compares what all workers of a run must have alike, settings and data, and says how two of them differ. Pure."""

import math
from collections.abc import Mapping
from typing import Any

MAX_MARKS = 64
Mark = list[Any]
"""[a hash of what is no float, three numbers that say what the floats are like; none if there are none]."""
Fingerprint = dict[str, Any]
"""Fingerprint of data: `marks` by position, and `origin`, words for people. Empty: there is none, and nothing is
compared."""

ALL = "all"
"""The mark of data as a whole; others are of one row, by its position."""

LIKE = 1e-3
"""How far apart floats may be that are the same sample, on two machines."""

BUILD = "Build the same model, data and settings on every worker."

SAME_DATA = (
    "Give every worker the same data in the same order: with --data PATH, or the same script; and where the built-in"
    " text is used, which is Python's own library, with the same version of Python."
)

UNCOMPARED = ", counted by their places: what is in them could not be compared between workers"


def differing_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By name: what one has, and the other. Where one of them has nothing at all, it is not known."""
    if not mine or not theirs:
        return {}
    found = {name: (mine.get(name), theirs.get(name)) for name in sorted({*mine, *theirs})}
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def differing_data(
    own: Fingerprint, other: Fingerprint, whose: tuple[str, str] = ("this run's", "yours")
) -> str | None:
    """How two fingerprints tell of other data, as the end of a sentence; none if they do not, or cannot say."""
    marks, others = own.get("marks", {}), other.get("marks", {})
    both = [name for name in marks if name in others]
    different = [name for name in both if differs(marks[name], others[name])]
    if not different:
        return None
    origins = [str(each.get("origin") or "") for each in (own, other)]
    of = "; ".join(f"{who}: {origin}" for who, origin in zip(whose, origins, strict=True))
    where = "what is in them is not the same"
    if ALL not in different:
        where += f": row {min(map(int, different)):,} is another"
        where += f", and so are {len(different) - 1} more of the {len(both)} that were compared" * (len(different) > 1)
    return where + f" ({of})" * (all(origins) and origins[0] != origins[1])


def differs(mine: Mark, theirs: Mark) -> bool:
    """Whether two marks are of other content."""
    (exact, floats), (other_exact, other_floats) = mine, theirs
    if exact != other_exact or len(floats) != len(other_floats):
        return True
    size = max([*map(abs, floats), *map(abs, other_floats)], default=0.0)
    return any(abs(a - b) > LIKE * size for a, b in zip(floats, other_floats, strict=True))


def check_fingerprint(data: Any) -> None:
    if data == {}:
        return
    if not isinstance(data, dict) or {*data} != {"origin", "marks"} or not isinstance(data["marks"], dict):
        raise ValueError("data has an origin and marks")
    if not isinstance(data["origin"], str) or len(data["origin"]) > 200 or not data["origin"].isprintable():
        raise ValueError("data.origin is a few words")
    if len(data["marks"]) > MAX_MARKS:
        raise ValueError(f"data has at most {MAX_MARKS} marks")
    for name, (exact, floats) in data["marks"].items():
        is_name = name == ALL or (name.isascii() and name.isdigit() and len(name) <= 15)
        is_exact = isinstance(exact, str) and len(exact) <= 64 and isinstance(floats, list) and len(floats) <= 3
        if not is_name or not is_exact or not all(type(number) is float and math.isfinite(number) for number in floats):
            raise ValueError("a mark of data is a hash and up to three numbers, of a row or of all")
