"""Records of events to numbers by name, as trackers draw them. Knows no tracker, no clock and no file."""

import re
from collections.abc import Iterator
from typing import Any

GROUPS = {"step_done": "train", "validated": "validation", "decided": "agree", "checkpoint_saved": "checkpoint"}
"""Word before the slash in the names of an event's numbers, if not the event's own."""
NO_CURVES = {"run_started", "run_ended"}
"""Events that are told as settings, and as the end."""
NO_NUMBERS = {"step", "time", "schema", "worker", "from_step"}
"""Fields that say which one, not how much."""
MOST_WORKERS = 64
"""The most workers that are told one by one; with more of them, or more names over the run, their least, mean and most
are."""
OF_WORKERS = ("rows", "samples", "busy_s", "wait_s", "send_s")


class Scalars:
    def __init__(self) -> None:
        self._step = 0
        self._names: set[str] = set()

    def of(self, record: dict[str, Any]) -> tuple[int, dict[str, float]]:
        """Return the step of the run, and the numbers to log there."""
        event = record["event"]
        self._step = int(record.get("step", record.get("from_step", self._step)))
        if event in NO_CURVES:
            return self._step, {}
        group = GROUPS.get(event, event)
        curves = {f"{group}/{name}": float(value) for name, value in record.items() if _is_number(name, value)}
        if event == "validated":
            curves |= {f"{group}/{_plain(name)}": float(value) for name, value in record.get("metrics", {}).items()}
        if event == "step_done":
            curves |= self._of_workers(record["workers"])
        return self._step, curves

    def _of_workers(self, workers: list[dict[str, Any]]) -> dict[str, float]:
        names = [_plain(worker["name"] or str(worker["rank"])) for worker in workers]
        if len(self._names | set(names)) <= MOST_WORKERS:
            self._names.update(names)
            pairs = zip(names, workers, strict=True)
            return {f"workers/{name}/{what}": float(worker[what]) for name, worker in pairs for what in OF_WORKERS}
        return dict(_summed_up(workers))


def _summed_up(workers: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for what in OF_WORKERS:
        values = [float(worker[what]) for worker in workers]
        yield f"workers/least/{what}", min(values)
        yield f"workers/mean/{what}", sum(values) / len(values)
        yield f"workers/most/{what}", max(values)


def _is_number(name: str, value: Any) -> bool:
    return name not in NO_NUMBERS and isinstance(value, int | float) and not isinstance(value, bool)


def _plain(name: str) -> str:
    """Letters that every tracker takes."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:64] or "-"


def flat(table: dict[str, Any], before: str = "") -> dict[str, Any]:
    """{"optimizer": {"lr": 1}} to {"optimizer.lr": 1}."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found
