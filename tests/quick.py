"""What `make test` runs of many cases that are alike: the first ones. The others are slow ones, of `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int = 1, *, are_single: bool = False) -> list[Any]:
    """All of them for parametrize(), of which those after the first `count` are marked as slow. `are_single`: each is
    one value, also where it is a tuple."""
    every = list(cases)
    return [*every[:count], *(_slow(case, is_single=are_single) for case in every[count:])]


def _slow(case: Any, *, is_single: bool) -> Any:
    found = case if isinstance(case, tuple) and hasattr(case, "marks") else pytest.param(*_values(case, is_single))
    return found._replace(marks=[*found.marks, pytest.mark.slow])


def _values(case: Any, is_single: bool) -> tuple[Any, ...]:
    return case if type(case) is tuple and not is_single else (case,)
