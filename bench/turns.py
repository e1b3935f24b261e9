"""Measurements taken in turns, so that whatever else the machine does falls on both sides alike."""

import sys
from collections.abc import Callable, Mapping


def take_turns(
    name: str, rounds: int, sides: Mapping[str, Callable[[], float]], unit: str, *, show: bool = True
) -> dict[str, list[float]]:
    """Measures every side once per round. The order is reversed in every other round: A B, B A, A B."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    tell = say if show else lambda text: None
    tell(f"{name}: {', '.join(sides)}, in turns")
    for index in range(rounds):
        for side in list(sides)[:: -1 if index % 2 else 1]:
            found[side].append(sides[side]())
            tell(f"{name}: round {index + 1} of {rounds}: {side} {found[side][-1]:,.2f} {unit}")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
