"""Pictures of a run, drawn from its events.jsonl."""

from pathlib import Path

from potluck.events import read_events


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
