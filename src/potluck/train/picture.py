"""Pictures of a run, drawn from its events.jsonl."""

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.events import read_events
from potluck.train.timeline import Timeline

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
    title = ""
    for record in read_events(events):
        match record["event"]:
            case "run_started":
                title = f"{record['name']}: {record['parameters']:,} parameters, {record['workers']} workers"
            case "step_done":
                steps[record["step"]] = record["loss"]
            case "validated":
                validations[record["step"]] = record["loss"]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(list(steps), list(steps.values()), color="#c9d6ea", linewidth=1, label="loss of each step")
    axes.plot(list(steps), running_mean(list(steps.values())), color="#1f5fa8", linewidth=2, label="running mean")
    if validations:
        axes.plot(list(validations), list(validations.values()), "o-", color="#d9622b", label="validation")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    return picture


def running_mean(values: list[float], keep: float = 0.9) -> list[float]:
    """An exponential mean that is a plain one as long as there are few values, so that it starts where they do."""
    means: list[float] = []
    for index, value in enumerate(values):
        kept = min(keep, index / (index + 1))
        means.append(kept * (means[-1] if means else 0.0) + (1 - kept) * value)
    return means


def draw_comparison(sync: Timeline, cadence: Timeline, picture: Path) -> Path:
    """Who computed when and who waited, in both runs; and both losses against time. As a PNG."""
    from matplotlib.figure import Figure

    lanes = max(len(sync.lanes), 1)
    lane_inches = 0.32
    figure = Figure(figsize=(10, 4.2 + 2 * lane_inches * lanes), dpi=120, layout="constrained")
    heights = [lane_inches * lanes + 0.3, lane_inches * lanes + 0.3, 2.8]
    above, below, losses = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    _draw_lanes(above, sync, SYNC, f"Sync: all wait for the slowest at every step. {sync.seconds:.1f} s")
    _draw_lanes(below, cadence, CADENCE, f"Cadence: each does what it can until all agree. {cadence.seconds:.1f} s")
    rows = max(sync.typical_rows, cadence.typical_rows)
    for timeline, name, colour, mark in ((sync, "Sync", SYNC, "s"), (cadence, "Cadence", CADENCE, "o")):
        means = timeline.means_over(rows)
        middles = [(mean.start_s + mean.end_s) / 2 for mean in means]
        final = f", validation at its end {timeline.validation_loss:.2f}" if timeline.validation_loss else ""
        losses.plot(middles, [m.loss for m in means], f"{mark}-", color=colour, markersize=4, label=f"{name}{final}")
        losses.axvline(timeline.seconds, color=colour, linewidth=1, linestyle="--")
    losses.set(xlabel="seconds", ylabel=f"loss, over {rows:,} rows each", title="The same rows, the same model")
    losses.title.set_fontsize(11)
    losses.set_xlim(0, max(sync.seconds, cadence.seconds, 1e-3))
    losses.grid(alpha=0.3)
    losses.legend(frameon=False)
    losses.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture)
    return picture


def _draw_lanes(axes: "Axes", timeline: Timeline, colour: str, title: str) -> None:
    """A lane for each worker: strong where it computed, pale where it waited. Thin lines where all agreed."""
    for worker, spans in enumerate(timeline.lanes):
        busy = [(span.start_s, span.busy_until_s - span.start_s) for span in spans]
        waited = [(span.busy_until_s, span.end_s - span.busy_until_s) for span in spans]
        axes.broken_barh(busy, (worker - 0.38, 0.76), facecolors=colour, label="computing" if not worker else None)
        axes.broken_barh(
            waited, (worker - 0.38, 0.76), facecolors=colour, alpha=0.2, label="waiting" if not worker else None
        )
    if len(timeline.window_ends) <= MOST_LINES:
        for end_s in timeline.window_ends:
            axes.axvline(end_s, color="black", linewidth=0.6)
    axes.set_yticks(
        range(len(timeline.lanes)),
        [f"worker {w}\n{timeline.busy_share(w):.0%} busy" for w in range(len(timeline.lanes))],
    )
    axes.invert_yaxis()
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.98), borderaxespad=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
