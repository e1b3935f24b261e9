"""Who computed when and who waited, read from a run's events.jsonl; and what one run gained over another."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.events import read_events
from potluck.words import plural


@dataclass(frozen=True, slots=True)
class Span:
    """A worker's part of one step or window, in seconds since the run started."""

    start_s: float
    busy_until_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean loss over some rows, which were trained from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    rows: int
    loss: float


@dataclass(slots=True)
class Timeline:
    """A run from its start to the end of its last step; the validation and the checkpoint after that do not count."""

    lanes: list[list[Span]] = field(default_factory=list)
    """Each worker's spans."""
    losses: list[Mean] = field(default_factory=list)
    """Of every step or window."""
    seconds: float = 0.0
    rows: int = 0
    rows_of: list[int] = field(default_factory=list)
    """The rows that each worker did, of all."""
    validation_loss: float | None = None

    @property
    def typical_rows(self) -> int:
        """Rows of the median step or window."""
        return sorted(mean.rows for mean in self.losses)[len(self.losses) // 2] if self.losses else 0

    def busy_share(self, worker: int) -> float:
        """The part of the whole time for which a worker computed."""
        return sum(span.busy_until_s - span.start_s for span in self.lanes[worker]) / max(self.seconds, 1e-9)

    def means_over(self, rows: int) -> list[Mean]:
        """The losses, averaged over at least this many rows each, so that two runs can be compared."""
        return list(_means_over(self.losses, rows))


def read_timeline(events: Path) -> Timeline:
    """Of a run that was not resumed."""
    timeline, began_at = Timeline(), 0.0
    for record in read_events(events):
        match record["event"]:
            case "run_started":
                began_at = record["time"]
            case "step_done":
                _add_step(timeline, record, record["time"] - began_at)
            case "validated":
                timeline.validation_loss = record["loss"]
    return timeline


def gain_sentence(plain: Timeline, other: Timeline, names: tuple[str, str] = ("Sync", "Cadence")) -> str:
    """What the second of two runs over the same rows gained over the first, as measured."""
    what = f"the same {plain.rows:,} rows" if plain.rows == other.rows else plural(other.rows, "row")
    took = f"{plain.seconds:.1f} s" if plain.rows == other.rows else f"{plain.seconds:.1f} s for {plain.rows:,}"
    times = (plain.seconds / max(plain.rows, 1)) / max(other.seconds / max(other.rows, 1), 1e-9)
    losses = ""
    if plain.validation_loss is not None and other.validation_loss is not None:
        losses = f"; validation loss {other.validation_loss:.2f} against {plain.validation_loss:.2f}"
    return (
        f"{names[1]} took {other.seconds:.1f} s for {what}, and {names[0]} {took}: {times:.1f} times as fast{losses}."
    )


def _add_step(timeline: Timeline, record: dict[str, Any], now_s: float) -> None:
    start_s = max(now_s - record["seconds"], timeline.seconds)
    workers = record["workers"]
    while len(timeline.lanes) < len(workers):
        timeline.lanes.append([])
        timeline.rows_of.append(0)
    for index, worker in enumerate(workers):
        timeline.lanes[index].append(Span(start_s, min(start_s + worker["busy_s"], now_s), now_s))
        timeline.rows_of[index] += worker["rows"]
    rows = sum(worker["rows"] for worker in workers)
    timeline.losses.append(Mean(start_s, now_s, rows, record["loss"]))
    timeline.rows += rows
    timeline.seconds = now_s


def _means_over(losses: list[Mean], rows: int) -> Iterator[Mean]:
    taken: list[Mean] = []
    left = sum(mean.rows for mean in losses)
    for mean in losses:
        taken.append(mean)
        left -= mean.rows
        if sum(part.rows for part in taken) >= rows and left >= rows / 2:  # a mean over few rows would say little
            yield _joined(taken)
            taken = []
    if taken:
        yield _joined(taken)


def _joined(parts: list[Mean]) -> Mean:
    """A step whose loss nobody told counts by its rows alone."""
    told = [part for part in parts if math.isfinite(part.loss)]
    weight = sum(part.rows for part in told)
    loss = sum(part.rows * part.loss for part in told) / max(weight, 1) if told else math.nan
    return Mean(parts[0].start_s, parts[-1].end_s, sum(part.rows for part in parts), loss)
