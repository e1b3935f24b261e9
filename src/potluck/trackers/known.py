"""Lists the trackers, what each needs, and what each is asked to do. Imports none of them."""

import importlib.util
import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from potluck.errors import ConfigError
from potluck.files import read_table, write_whole

LIBRARIES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "otel": "opentelemetry.sdk",
}
"""The module that each tracker imports, by its name, which is also that of its extra."""
MOST_BYTES = 4096
PROJECT = "potluck"
"""Project in which runs are kept together, unless the tracker's own variable says otherwise."""

Ended = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class TrackedRun:
    """The facts that a tracker gets of a run when it begins or resumes."""

    tracker: str
    folder: Path
    """The run's folder; a tracker keeps there what it must find again."""
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The recipe, if there is one, and what the run's beginning tells; flat, with names such as optimizer.lr."""
    from_step: int = 0

    def kept_id(self) -> str | None:
        """Return the id by which the tracker knew this run before, if it did."""
        own = read_table(self._place, MOST_BYTES).get("id")
        return str(own) if own is not None else None

    def keep_id(self, own: str) -> str:
        self._place.parent.mkdir(exist_ok=True)
        write_whole(self._place, json.dumps({"id": own}) + "\n")
        return own

    def id_to_use(self) -> str:
        """Return this run's id, which stays after every restart."""
        return self.kept_id() or self.keep_id(uuid.uuid4().hex[:12])

    @property
    def _place(self) -> Path:
        return self.folder / "trackers" / f"{self.tracker}.json"


class Tracker(Protocol):
    """One tracker's side of a run, in a process of its own; it may take its time, hang or fail."""

    def start(self, run: TrackedRun) -> str:
        """Returns where the run is to be seen, for a person; empty: nowhere yet."""

    def log(self, step: int, time_s: float, scalars: dict[str, float]) -> None: ...

    def finish(self, how: Ended) -> None: ...


def check_trackers(names: Iterable[str]) -> tuple[str, ...]:
    """ConfigError for one that is not known, or whose library is not installed here: before anything is trained."""
    known = check_names(names)
    for name in known:
        if not _is_installed(LIBRARIES[name]):
            raise ConfigError(f"The tracker {name} is not installed here: pip install './potluck[{name}]'.")
    return known


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Each once. ConfigError for one that is not known; whether it is installed is the affair of who reports."""
    unique = tuple(dict.fromkeys(names))
    for name in unique:
        if fault := name_fault(name):
            raise ConfigError(f"{fault}.")
    return unique


def name_fault(name: str) -> str:
    """Why there is no such tracker; empty if there is."""
    return "" if name in LIBRARIES else f"track takes {', '.join(map(repr, LIBRARIES))}, not {name!r}"


def _is_installed(library: str) -> bool:
    """Tell whether a library is installed, without importing it. A folder of that name in the working directory, as
    wandb leaves one, is not it."""
    try:
        spec = importlib.util.find_spec(library)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None


def from_environment(variable: str) -> str:
    return os.environ.get(variable) or PROJECT
