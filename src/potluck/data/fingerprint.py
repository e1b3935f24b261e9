"""A fingerprint of data: what two workers compare to see that they hold the same rows, and a checkpoint keeps.

Of text it is a hash of all of it. Of any other dataset it is made of a few rows, spread over it by a fixed rule, the
first and the last among them: whole numbers, strings and bytes count exactly, floats to about one part in a thousand,
since two machines may decode or scale a sample differently in the last bits. It does not depend on a tensor's device or
width. Data that say themselves what they are, by a method potluck_fingerprint() that gives a string, are believed.

What it cannot see: a change in rows that were not looked at; and data whose rows cannot be repeated, which have none.
"""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from potluck.agree.terms import ALL, Fingerprint, Mark, differs
from potluck.data.content import mark_of
from potluck.data.rows import Fetcher, FetchOptions, TensorRows, mix, random_numbers_kept, seed_everything

ROWS = 32
"""How many rows are looked at, each twice."""
BUDGET_S = 2.0
"""No further row is looked at after this; the rows that two workers have both looked at are compared."""
WHOLE_BYTES = 1 << 24
"""Tensors in memory of no more than this are looked at as a whole."""
_GOLDEN = 0x9E3779B97F4A7C15


def fingerprint(dataset: Any, *, elsewhere: FetchOptions | None = None) -> Fingerprint:
    """`elsewhere`: rows are fetched in a process of its own, as they will be: what a dataset opens must stay there.

    The process's random numbers are as they were. Empty if rows cannot be repeated, or have no content we know.
    """
    told = getattr(dataset, "potluck_fingerprint", None)
    if callable(told):
        origin = str(getattr(dataset, "origin", ""))
        return {"origin": origin, "marks": {ALL: [_sha256(str(told()).encode()), []]}}
    with random_numbers_kept():
        marks = _marks_of(dataset, elsewhere=elsewhere)
    return {"origin": "", "marks": marks} if marks else {}


def positions(rows: int) -> list[int]:
    """Spread evenly, however many of them are used: the first row, the last, and a golden section of the rest."""
    spread = (((index * _GOLDEN) % (1 << 64)) * rows >> 64 for index in range(1, ROWS - 1))
    return list(dict.fromkeys([0, rows - 1, *spread]))


def _marks_of(dataset: Any, *, elsewhere: FetchOptions | None) -> dict[str, Mark]:
    marks: dict[str, Mark] = {}
    if isinstance(dataset, TensorRows) and sum(tensor.nbytes for tensor in dataset.tensors) <= WHOLE_BYTES:
        whole = mark_of(dataset.tensors, most=WHOLE_BYTES)
        return {ALL: whole} if whole is not None else {}
    wanted, ends = list(getattr(dataset, "looked_at", ())) or positions(len(dataset)), time.monotonic() + BUDGET_S
    for position, pair in zip(wanted, _looks(_Looks(dataset), wanted, elsewhere=elsewhere), strict=False):
        if pair is not None:
            if differs(*pair):
                return {}  # rows that cannot be repeated would differ between any two workers
            marks[str(position)] = pair[0]
        if time.monotonic() > ends:
            break
    return marks


def _looks(looks: "_Looks", wanted: list[int], *, elsewhere: FetchOptions | None) -> Iterator[tuple[Mark, Mark] | None]:
    if elsewhere is None:
        return (looks[position] for position in wanted)
    return Fetcher(looks, 1, elsewhere, torch.device("cpu")).read(wanted)


class _Looks(Dataset[Any]):
    """A row as it looks twice, drawn from the same random numbers; none if it raises, or is nothing that we know."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, position: int) -> tuple[Mark, Mark] | None:
        marks = []
        for _ in range(2):
            seed_everything(mix(ROWS, position))
            try:
                row = self._row(position)
            except Exception:  # raised again when a row is trained on
                return None
            mark = mark_of(row)
            if mark is None:
                return None
            marks.append(mark)
        return marks[0], marks[1]

    def _row(self, position: int) -> Any:
        if isinstance(self.dataset, TensorRows):
            return self.dataset[[position]]
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__([position]))
        return self.dataset[position]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
