"""Pictures of a run, drawn from its events.jsonl; and its timeline: who computed when, and who waited."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.events import read_events
from potluck.words import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A worker's part of one step or window, in seconds since the run started."""

    start_s: float
    busy_until_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimeMean:
    """The mean loss over some rows, which were trained from `start_s` to `end_s`."""

    start_s: float
    end_s: float
    rows: int
    loss: float


@dataclass(slots=True)
class Timeline:
    """A run from its start to the end of its last step; the validation and the checkpoint after that do not count."""

    lanes: list[list[TimeSpan]] = field(default_factory=list)
    """Each worker's spans."""
    losses: list[TimeMean] = field(default_factory=list)
    """Loss of every step or window."""
    seconds: float = 0.0
    rows: int = 0
    rows_of: list[int] = field(default_factory=list)
    """The rows that each worker did, of all."""
    looks: list[tuple[float, float]] = field(default_factory=list)
    """(when the last step before it ended, validation loss)"""

    @property
    def validation_loss(self) -> float | None:
        return self.looks[-1][1] if self.looks else None

    @property
    def typical_rows(self) -> int:
        """Rows of the step or window in which a typical row was trained."""
        passed = 0
        for rows in sorted(mean.rows for mean in self.losses):
            passed += rows
            if 2 * passed >= self.rows:
                return rows
        return 0

    def busy_share(self, worker: int) -> float:
        """The part of the whole time for which a worker computed."""
        return sum(span.busy_until_s - span.start_s for span in self.lanes[worker]) / max(self.seconds, 1e-9)

    def means_over(self, rows: int) -> list[TimeMean]:
        """The losses, averaged over at least this many rows each, so that two runs can be compared."""
        means: list[TimeMean] = []
        taken: list[TimeMean] = []
        left = sum(mean.rows for mean in self.losses)
        for mean in self.losses:
            taken.append(mean)
            left -= mean.rows
            if sum(part.rows for part in taken) >= rows and left >= rows / 2:  # a mean over few rows would say little
                means.append(_joined(taken))
                taken = []
        return [*means, _joined(taken)] if taken else means


def read_timeline(events: Path) -> Timeline:
    """Read the timeline of a run that was not resumed."""
    timeline, began_at = Timeline(), 0.0
    for record in read_events(events):
        match record["event"]:
            case "run_started":
                began_at = record["time"]
            case "step_done":
                _add_step(timeline, record, record["time"] - began_at)
            case "validated" if record["loss"] is not None:
                timeline.looks.append((timeline.seconds, float(record["loss"])))
    return timeline


def gain_sentence(plain: Timeline, other: Timeline) -> str:
    """Say what Cadence gained over Sync, in two runs over the same rows, as measured: to a loss, and in all."""
    what = f"the same {plain.rows:,} rows" if plain.rows == other.rows else plural(other.rows, "row")
    took = f"{plain.seconds:.1f} s" if plain.rows == other.rows else f"{plain.seconds:.1f} s for {plain.rows:,}"
    times = (plain.seconds / max(plain.rows, 1)) / max(other.seconds / max(other.rows, 1), 1e-9)
    losses = ""
    if plain.validation_loss is not None and other.validation_loss is not None:
        losses = f"; validation loss {other.validation_loss:.2f} against {plain.validation_loss:.2f}"
    whole = f"Cadence took {other.seconds:.1f} s for {what}, and Sync {took}: {times:.1f} times as fast{losses}."
    return f"{_to_a_loss(plain, other)}{whole}"


def _to_a_loss(plain: Timeline, other: Timeline) -> str:
    """Compare the time to the lowest validation loss that both have reached, if they looked at it while they
    trained."""
    looks = len(plain.looks), len(other.looks)
    if not min(looks) or max(looks) < 2:
        return ""
    target = max(min(loss for _, loss in each.looks) for each in (plain, other))
    took = [time_to(each.looks, target) for each in (plain, other)]
    if took[0] is None or took[1] is None or not took[1]:
        return ""
    return (
        f"To a validation loss of {target:.2f} Cadence took {took[1]:.1f} s, and Sync {took[0]:.1f} s:"
        f" {took[0] / took[1]:.1f} times as fast. "
    )


def time_to(curve: list[tuple[float, float]], target: float) -> float | None:
    """When the loss first was at the target, in a straight line between two looks."""
    before: tuple[float, float] | None = None
    for seconds, loss in curve:
        if loss <= target:
            if before is None or loss == before[1]:
                return seconds
            return before[0] + (seconds - before[0]) * (before[1] - target) / (before[1] - loss)
        before = seconds, loss
    return None


def _add_step(timeline: Timeline, record: dict[str, Any], now_s: float) -> None:
    start_s = max(now_s - record["seconds"], timeline.seconds)
    workers = record["workers"]
    while len(timeline.lanes) < len(workers):
        timeline.lanes.append([])
        timeline.rows_of.append(0)
    for index, worker in enumerate(workers):
        timeline.lanes[index].append(TimeSpan(start_s, min(start_s + worker["busy_s"], now_s), now_s))
        timeline.rows_of[index] += worker["rows"]
    rows = sum(worker["rows"] for worker in workers)
    timeline.losses.append(TimeMean(start_s, now_s, rows, record["loss"]))
    timeline.rows += rows
    timeline.seconds = now_s


def _joined(parts: list[TimeMean]) -> TimeMean:
    """A step whose loss is not known counts by its rows alone."""
    told = [part for part in parts if math.isfinite(part.loss)]
    weight = sum(part.rows for part in told)
    loss = sum(part.rows * part.loss for part in told) / max(weight, 1) if told else math.nan
    return TimeMean(parts[0].start_s, parts[-1].end_s, sum(part.rows for part in parts), loss)


SYNC, CADENCE = "#d55e00", "#0072b2"
"""Colour-blind eyes can distinguish them, and so can print."""
MOST_LINES = 60
"""The most windows between which lines are drawn: nobody could distinguish more."""


def draw_losses(events: Path, picture: Path) -> Path:
    """The loss of every step, its running mean, and the validation loss, as a PNG. Where a validation has no loss, its
    first figure has an axis of its own."""
    from matplotlib.figure import Figure  # half a second, so only when a picture is wanted

    steps: dict[int, float] = {}
    validations: dict[int, float] = {}
    figure_name, others = "", dict[int, float]()
    title, most = "", 1
    for record in read_events(events):
        match record["event"]:
            case "run_started":
                title = f"{record['name']}: {plural(record['parameters'], 'parameter')}"
            case "step_done":
                steps[record["step"]] = _drawn(record["loss"])
                most = max(most, len(record["workers"]))  # those of a host come and go
            case "validated" if record["loss"] is not None:
                validations[record["step"]] = _drawn(record["loss"])
            case "validated" if record["metrics"]:
                figure_name, value = next(iter(record["metrics"].items()))
                others[record["step"]] = _drawn(value)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(list(steps), list(steps.values()), color="#c9d6ea", linewidth=1, label="loss of each step")
    axes.plot(list(steps), running_mean(list(steps.values())), color="#1f5fa8", linewidth=2, label="running mean")
    if validations:
        axes.plot(list(validations), list(validations.values()), "o-", color="#d9622b", label="validation")
    axes.set(xlabel="step", ylabel="loss", title=f"{title}, {plural(most, 'worker')}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    if others:
        beside = axes.twinx()
        beside.plot(list(others), list(others.values()), "o-", color="#d9622b")
        beside.set_ylabel(f"validation {figure_name}", color="#d9622b")
        beside.spines["top"].set_visible(False)
    figure.savefig(picture)
    return picture


def running_mean(values: list[float], keep: float = 0.9) -> list[float]:
    """An exponential mean that is a plain one as long as there are few values, so that it starts where they do.

    Where a value is not finite the mean stays what it was; before the first that is, there is none.
    """
    means: list[float] = []
    mean, counted = math.nan, 0
    for value in values:
        if math.isfinite(value):
            kept = min(keep, counted / (counted + 1))
            mean = kept * mean + (1 - kept) * value if counted else value
            counted += 1
        means.append(mean)
    return means


def _drawn(loss: float) -> float:
    """A gap where the loss is not finite: a line to infinity has no end to be drawn to."""
    return loss if math.isfinite(loss) else math.nan


def draw_comparison(sync: Timeline, cadence: Timeline, slow: int, picture: Path) -> Path:
    """Draw who computed when and who waited, in both runs; and both losses against time. As a PNG."""
    from matplotlib.figure import Figure

    lanes_inches = 0.42 * max(len(sync.lanes), len(cadence.lanes), 1)
    figure = Figure(figsize=(10, 5 + 2 * lanes_inches), dpi=120, layout="constrained")
    heights = [lanes_inches + 0.4, lanes_inches + 0.4, 2.8]
    above, below, losses = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    _draw_lanes(above, sync, slow, SYNC, f"Sync, {sync.seconds:.1f} s: all wait for the slowest at every step")
    title = f"Cadence, {cadence.seconds:.1f} s: each does what it can until all agree (thin lines)"
    _draw_lanes(below, cadence, slow, CADENCE, title)
    _draw_both_losses(losses, sync, cadence)
    figure.savefig(picture)
    return picture


def _draw_lanes(axes: "Axes", timeline: Timeline, slow: int, colour: str, title: str) -> None:
    """A lane for each worker: strong where it computed, pale where it waited. Thin lines where all agreed."""
    names = []
    for worker, spans in enumerate(timeline.lanes):
        busy = [(span.start_s, span.busy_until_s - span.start_s) for span in spans]
        waited = [(span.busy_until_s, span.end_s - span.busy_until_s) for span in spans]
        labels = ("computing", "waiting") if not worker else (None, None)
        axes.broken_barh(busy, (worker - 0.38, 0.76), facecolors=colour, label=labels[0])
        axes.broken_barh(waited, (worker - 0.38, 0.76), facecolors=colour, alpha=0.2, label=labels[1])
        slowed = ", slowed" if worker == slow else ""
        share = timeline.rows_of[worker] / max(timeline.rows, 1)
        names.append(f"worker {worker}{slowed}\n{timeline.busy_share(worker):.0%} busy, {share:.0%} of the rows")
    if len(timeline.losses) <= MOST_LINES:
        for window in timeline.losses:
            axes.axvline(window.end_s, color="black", linewidth=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=11, loc="left")
    if names:
        axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), borderaxespad=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelbottom=True)


def _draw_both_losses(axes: "Axes", sync: Timeline, cadence: Timeline) -> None:
    """Means over equally many rows, each where it was trained. A dashed line says when a run was over."""
    rows = max(sync.typical_rows, cadence.typical_rows)
    for timeline, name, colour, mark in ((sync, "Sync", SYNC, "s"), (cadence, "Cadence", CADENCE, "o")):
        means = timeline.means_over(rows)
        middles = [(mean.start_s + mean.end_s) / 2 for mean in means]
        final = (
            f"; validation {timeline.validation_loss:.2f} at its end" if timeline.validation_loss is not None else ""
        )
        axes.plot(middles, [m.loss for m in means], f"{mark}-", color=colour, markersize=4, label=f"{name}{final}")
        at = [seconds for seconds, _ in timeline.looks]
        axes.plot(at, [loss for _, loss in timeline.looks], "*:", color=colour, markersize=8)
        axes.axvline(timeline.seconds, color=colour, linewidth=1.2, linestyle="--")
    longest = max(sync.seconds, cadence.seconds, 1e-3)
    axes.set(
        xlabel="seconds",
        ylabel=f"loss: means over {rows:,} rows,\nand of validation (stars)",
        xlim=(0, 1.005 * longest),
    )
    axes.set_title(f"Both losses, over the same {sync.rows:,} rows", fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
