"""The run's folder in memory: what ranks keep there for each other, and what is left of it after a loss.

    start-0/rank-2/own-00000004/         rank 2's part of the model, as it was at the fourth refresh
    start-0/rank-2/neighbour-00000004/   its copy of rank 1's part

A rank's folder stands for the memory of its machine, and goes with it. Workers that are started anew fill themselves
from the parts of the start before. Imports no torch, so that the launcher can look.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.system import lock

MEMORY = "POTLUCK_MEMORY"
"""Tells workers the folder of their start."""
PLACE = Path("/dev/shm")
OWN, NEIGHBOUR, STANDING = "own", "neighbour", "standing.json"
_HELD = "held"
"""Locked by the launcher, as long as there is one."""
_PREFIX = "potluck-"
_RECOVERY = "recovery.json"
_NAME = re.compile(rf"{OWN}-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Some workers were lost, and the others can resume."""

    step: int
    """The step from which they resume."""
    ranks: tuple[int, ...]
    """Those who resume, by their ranks in the first start; their place here is their new rank."""
    lost: tuple[int, ...]
    parts: tuple[str, ...]
    """Folders that hold the whole model and its optimizer's state between them."""
    standing: dict[str, Any]
    """Where the run stood, and in which run folder."""

    def of_those_left(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Of a setting that has a number for each rank of the first start."""
        if len(numbers) <= len(self.ranks):  # made for those who are left already
            return tuple(numbers)
        return tuple(numbers[rank] for rank in self.ranks)

    def forget(self) -> None:
        """The start before is needed no more: all have what they want of it."""
        shutil.rmtree(Path(self.parts[0]).parents[1], ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the workers, the first or one after a loss."""

    folder: Path
    ranks: tuple[int, ...]
    """By their ranks in the first start."""
    from_step: int = -1
    """The step that they resumed from; -1 for the first start."""

    def plan_recovery(self, lost: Sequence[int]) -> Recovery | str:
        """What those who are left can resume from; or why they cannot, as a sentence that is empty where all is said.

        Nothing that a lost rank had kept is looked at.
        """
        world = len(self.ranks)
        kept_by = {rank: rank_folder(self.folder, rank) / OWN for rank in range(world) if rank not in lost}
        numbers = {
            int(m[1]) for own in kept_by.values() for path in _listed(own.parent) if (m := _NAME.match(path.name))
        }
        if not numbers or len(lost) == world:
            return ""
        for rank in lost:
            if (keeper := (rank + 1) % world) in lost:
                return f"Worker {keeper}, which kept a copy of worker {rank}'s part, was lost with it."
            kept_by[rank] = rank_folder(self.folder, keeper) / NEIGHBOUR
        for number in sorted(numbers, reverse=True):
            parts = [numbered(kept_by[rank], number) for rank in sorted(kept_by, key=lambda rank: rank in lost)]
            if all(part.is_dir() for part in parts):
                return self._recovery(lost, parts)
        return "No refresh of the copies that workers keep for each other was whole."

    def _recovery(self, lost: Sequence[int], parts: list[Path]) -> Recovery | str:
        standing = json.loads((parts[0] / STANDING).read_text(encoding="utf-8"))
        if standing["step"] <= self.from_step:
            return f"They had continued from step {self.from_step} before, and had kept no later step since."
        return Recovery(
            step=standing["step"],
            ranks=tuple(first for rank, first in enumerate(self.ranks) if rank not in lost),
            lost=tuple(lost),
            parts=tuple(map(str, parts)),
            standing=standing,
        )

    def next(self, recovery: Recovery) -> "Start":
        """Makes the folder of those who resume, and says there what from."""
        folder = self.folder.with_name(f"start-{int(self.folder.name.removeprefix('start-')) + 1}")
        folder.mkdir()
        (folder / _RECOVERY).write_text(json.dumps(asdict(recovery)), encoding="utf-8")
        return Start(folder, recovery.ranks, recovery.step)

    def lose(self, ranks: Sequence[int]) -> None:
        """What they had in memory is lost with them."""
        for rank in ranks:
            shutil.rmtree(rank_folder(self.folder, rank), ignore_errors=True)


@contextmanager
def first_start(world: int) -> Iterator[Start | None]:
    """A folder in memory that is gone when the run is; none where the system has no place for it."""
    _sweep()
    try:
        memory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=PLACE))
        held = (memory / _HELD).open("w")
    except OSError:
        yield None
        return
    try:
        lock(held, wait=True)
        start = Start(memory / "start-0", tuple(range(world)))
        start.folder.mkdir()
        yield start
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        held.close()


def _sweep() -> None:
    """Folders of runs that were killed with all their workers: nobody holds them any more."""
    for memory in PLACE.glob(f"{_PREFIX}*"):
        with suppress(OSError), (memory / _HELD).open("r+") as held:
            lock(held)
            shutil.rmtree(memory, ignore_errors=True)


def my_folder() -> Path | None:
    """Of the start that this worker belongs to; none if our launcher did not start it."""
    told = os.environ.get(MEMORY)
    return Path(told) if told else None


def my_recovery() -> Recovery | None:
    """What this worker resumes from, if somebody was lost."""
    folder = my_folder()
    if folder is None or not (folder / _RECOVERY).exists():
        return None
    told: dict[str, Any] = json.loads((folder / _RECOVERY).read_text(encoding="utf-8"))
    return Recovery(**told | {name: tuple(told[name]) for name in ("ranks", "lost", "parts")})


def clear_away() -> None:
    """The launcher is gone, and can no longer do it."""
    folder = my_folder()
    if folder is not None and folder.parent.parent == PLACE and folder.parent.name.startswith(_PREFIX):
        shutil.rmtree(folder.parent, ignore_errors=True)


def rank_folder(start: Path, rank: int) -> Path:
    return start / f"rank-{rank}"


def numbered(path: Path, number: int) -> Path:
    """The place of a refresh: of one's own part, or of the neighbour's."""
    return path.with_name(f"{path.name}-{number:08d}")


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
