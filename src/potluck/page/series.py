"""Series of bounded length: however many steps a run has, a page draws at most so many points of it. Pure.

A point stands for `span` steps that follow each other. Once there are too many, each two become one and the span
doubles, so that the cost of a step does not depend on how many there were, and no figure of any step is lost from the
least, the most and the mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

MOST_POINTS = 1024
MOST_CELLS = 256
"""The most cells of a timeline, along its time."""


@dataclass(slots=True)
class Point:
    """Some steps that follow each other, of which the last one's place is the point's."""

    first: int
    last: int
    rows: int
    """Rows seen after the last of them."""
    at_s: float
    """Seconds of training after the last of them, pauses left out."""
    lr: float
    norm: float
    seconds: float
    steps: int = 1
    loss_sum: float = 0.0
    losses: int = 0
    """How many of the steps have a finite loss."""
    least: float = math.inf
    most: float = -math.inf
    most_norm: float = -math.inf

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.losses if self.losses else None

    def join(self, other: "Point") -> "Point":
        return replace(
            other,
            first=self.first,
            seconds=self.seconds + other.seconds,
            steps=self.steps + other.steps,
            loss_sum=self.loss_sum + other.loss_sum,
            losses=self.losses + other.losses,
            least=min(self.least, other.least),
            most=max(self.most, other.most),
            most_norm=max(self.most_norm, other.most_norm),
        )

    def told(self) -> list[float | int | None]:
        """List the figures as the page reads them: rows, seconds, loss, its least and most, rate, norm, its most, first
        and last step."""
        figures = (self.at_s, self.loss, self.least, self.most, self.lr, self.norm, self.most_norm)
        return [self.rows, *(short(figure) for figure in figures), self.first, self.last]


@dataclass(slots=True)
class Cell:
    """Who computed and who waited in some steps that follow each other."""

    start_s: float
    """Seconds of training at its beginning, and at its end."""
    end_s: float
    done: dict[int, list[float]]
    """Seconds that each worker, by its id, was busy, waiting and sending."""
    steps: int = 1

    def join(self, other: "Cell") -> "Cell":
        done = {worker: list(seconds) for worker, seconds in self.done.items()}
        for worker, seconds in other.done.items():
            had = done.setdefault(worker, [0.0] * len(seconds))
            done[worker] = [a + b for a, b in zip(had, seconds, strict=True)]
        return Cell(self.start_s, other.end_s, done, self.steps + other.steps)


P = TypeVar("P", Point, Cell)


@dataclass(slots=True)
class Series(Generic[P]):
    most: int
    span: int = 1
    points: list[P] = field(default_factory=list)
    generation: int = 0
    """Changes whenever points that were told are no longer what they were, but for the last."""

    def add(self, point: P) -> None:
        if self.points and self.points[-1].steps < self.span:
            self.points[-1] = self.points[-1].join(point)
            return
        self.points.append(point)
        if len(self.points) > self.most:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[-1:] if len(self.points) % 2 else []
            self.points = [first.join(second) for first, second in pairs] + odd
            self.span *= 2
            self.generation += 1

    def drop(self, is_void: Callable[[P], bool]) -> None:
        """Drop the last ones, as far as they are done again."""
        while self.points and is_void(self.points[-1]):
            self.points.pop()
            self.generation += 1


def short(figure: float | None) -> float | None:
    """Round to six digits, for JSON: what is not finite is None."""
    return float(f"{figure:.6g}") if figure is not None and math.isfinite(figure) else None
