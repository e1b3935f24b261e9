"""The figures of a run as Prometheus reads them: text, with names by its conventions. Pure."""

from collections.abc import Iterator

from potluck.page.fold import Fold
from potluck.page.view import head_of, rows_of
from potluck.show.sentences import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(fold: Fold, now: Record, time: float) -> str:
    lines: list[str] = []
    for name, kind, text, values in _families(fold, now, time):
        told = [(labels, value) for labels, value in values if value is not None]
        if told:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labelled(labels)} {value!r}" for labels, value in told]
    return "\n".join(lines) + "\n"


Values = list[tuple[dict[str, str], float | int | None]]


def _families(fold: Fold, now: Record, time: float) -> Iterator[tuple[str, str, str, Values]]:
    head, run = head_of(fold, now), fold.run
    info = {name: str(run.get(name) or "") for name in ("name", "unit", "strategy", "policy", "wire")}
    yield "potluck_run_info", "gauge", "What is trained, and how; always 1.", [(info, 1 if run else None)]
    look = next((look for look in reversed(fold.looks) if look[2] is not None), None)
    sent = head["bytes"] or {}
    left = head["left"]
    for name, kind, text, value in (
        ("steps_total", "counter", "Steps that were applied.", head["step"]),
        ("planned_steps", "gauge", "Steps of the whole run, if it is known how many.", head["total"] or None),
        ("rows_total", "counter", "Rows of all epochs that were trained.", head["rows"]),
        ("skipped_steps_total", "counter", "Steps that all workers left out.", head["skipped"]),
        ("epochs_total", "counter", "Epochs that have ended.", fold.epochs_done),
        ("loss", "gauge", "Mean loss of the last step.", head["loss"]),
        ("learning_rate", "gauge", "Of the last step.", head["lr"]),
        ("gradient_norm", "gauge", "Of the last step, before clipping.", head["norm"]),
        ("validation_loss", "gauge", "Of the last validation.", look[2] if look else None),
        ("step_duration_seconds", "gauge", "Of the last step.", head["step_s"]),
        ("samples_per_second", "gauge", "Over the last steps, in the run's unit.", head["rate"]),
        ("remaining_seconds", "gauge", "Until the end, as far as it can be told.", left[0] if left else None),
        ("model_flops_utilization_ratio", "gauge", "Of the devices' peak, where that is known.", head["mfu"]),
        ("workers", "gauge", "Workers that take part.", head["workers"]),
        ("sent_bytes_total", "counter", "From the host to workers, or within a group.", sent.get("sent")),
        ("received_bytes_total", "counter", "From workers to the host.", sent.get("received")),
        ("paused", "gauge", "1 while a person has paused the run.", int(head["paused"])),
        ("ended", "gauge", "1 once the run has ended.", int(bool(head["ended"]))),
    ):
        yield f"potluck_{name}", kind, text, [({}, value)]
    yield from _of_workers(fold, now, time)


def _of_workers(fold: Fold, now: Record, time: float) -> Iterator[tuple[str, str, str, Values]]:
    rows = {id: row for id, row in rows_of(fold, now).items() if row[13]}
    for name, place, text in (
        ("share_ratio", 3, "Its part of the rows of the last step."),
        ("samples_per_second", 4, "While it computes."),
        ("busy_ratio", 5, "Of its time, computing."),
        ("waiting_ratio", 6, "Of its time, waiting for the others."),
    ):
        yield f"potluck_worker_{name}", "gauge", text, [(_label(id, row), row[place]) for id, row in rows.items()]
    silent: Values = [(_label(id, row), round(max(0.0, time - row[11]), 1)) for id, row in rows.items()]
    yield "potluck_worker_silence_seconds", "gauge", "Since it was last heard of.", silent


def _label(id: int, row: list[object]) -> dict[str, str]:
    return {"worker": str(id), "name": str(row[0])}


def _labelled(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
