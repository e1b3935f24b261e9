"""Pictures of a run, drawn from its events.jsonl."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.events import read_events
from potluck.show.timeline import Timeline
from potluck.words import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SYNC, CADENCE = "#d55e00", "#0072b2"
"""Told apart by colour-blind eyes, and in print."""
MOST_LINES = 60
"""More windows than these are not told apart, and have no lines between them."""


def draw_losses(events: Path, picture: Path) -> Path:
    """The loss of every step, its running mean, and the validation loss, as a PNG."""
    from matplotlib.figure import Figure  # half a second, so only when a picture is wanted

    steps: dict[int, float] = {}
    validations: dict[int, float] = {}
    title, most = "", 1
    for record in read_events(events):
        match record["event"]:
            case "run_started":
                title = f"{record['name']}: {plural(record['parameters'], 'parameter')}"
            case "step_done":
                steps[record["step"]] = _drawn(record["loss"])
                most = max(most, len(record["workers"]))  # those of a host come and go
            case "validated":
                validations[record["step"]] = _drawn(record["loss"])
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
    figure.savefig(picture)
    return picture


def running_mean(values: list[float], keep: float = 0.9) -> list[float]:
    """An exponential mean that is a plain one as long as there are few values, so that it starts where they do.

    Where a value is not finite the mean stays what it was; before the first that is, there is none.
    """
    means: list[float] = []
    mean, found = math.nan, 0
    for value in values:
        if math.isfinite(value):
            kept = min(keep, found / (found + 1))
            mean = kept * mean + (1 - kept) * value if found else value
            found += 1
        means.append(mean)
    return means


def _drawn(loss: float) -> float:
    """A gap where the loss is not finite: a line to infinity has no end to be drawn to."""
    return loss if math.isfinite(loss) else math.nan


def draw_comparison(sync: Timeline, cadence: Timeline, slow: int, picture: Path) -> Path:
    """Who computed when and who waited, in both runs; and both losses against time. As a PNG."""
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
        axes.axvline(timeline.seconds, color=colour, linewidth=1.2, linestyle="--")
    longest = max(sync.seconds, cadence.seconds, 1e-3)
    axes.set(xlabel="seconds", ylabel=f"training loss,\nmeans over {rows:,} rows", xlim=(0, 1.005 * longest))
    axes.set_title(f"Both losses, over the same {sync.rows:,} rows", fontsize=11, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
