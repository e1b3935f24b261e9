"""Where checkpoints stand: folders `step-00000120`, each with a manifest that holds a checksum of every file.

Finds the newest that is whole, gives a new one its place, and removes old ones. Imports no torch, so that a host can
keep what its workers send; what is in the files is checkpoint.py's to know.
"""

import hashlib
import json
import mmap
import re
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from potluck.errors import CheckpointError
from potluck.files import first_free

FORMAT, FORMAT_IN_PARTS = 1, 2
"""Format of a checkpoint with whole tensors; and of one whose files each hold some pieces (sharding/stored.py)."""
MODEL, OPTIMIZER, RANDOM, KEPT = "model", "optimizer", "random", "kept"
"""Stems of a checkpoint's files."""
AVERAGE = "outer_average"
"""Key of a parameter's average, beside the optimizer's state of it."""
BEST = "best"
"""Key of a manifest: the validation loss, in a checkpoint that was saved because it was the best so far."""
BEST_FILE = "best.safetensors"
"""The model of the best checkpoint, in the run folder, as plain PyTorch and others read it."""
BASE = "base"
"""Key of a manifest: the hash of the frozen base, which was left out, and how much that was."""
T = TypeVar("T")
WRITING, LEAVING = ".writing-", ".leaving-"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def prune(folder: Path, keep_last: int, newest: Path) -> None:
    """Removes all but `newest`, the few before it and the best, and what killed writers left behind.

    What comes after `newest` stays: it is damaged and was passed over, or not ours.
    """
    standing = found(folder)
    first = standing.index(newest)
    best = best_of(standing[first:])
    for path in standing[first + keep_last :]:
        if path != best:
            _remove(path)
    for leftover in [*folder.glob(f"{WRITING}*"), *folder.glob(f"{LEAVING}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def best_of(standing: list[Path]) -> Path | None:
    """Return the last checkpoint, of these from newest to oldest, that was the best when it was saved."""
    return next((path for path in standing if best_loss(path) is not None), None)


def best_loss(path: Path) -> float | None:
    """The validation loss of a checkpoint, if that was the best so far; none if it was not, or the file is damaged."""
    try:
        loss = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["body"].get(BEST)
        return float(loss) if loss is not None else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def newest(
    standing: Iterable[Path], read: Callable[[Path], T], pass_over: Callable[[Path, CheckpointError], None]
) -> tuple[Path, T] | None:
    """The first of these checkpoints that can be read, with what that gives. `pass_over` hears of each damaged one."""
    for path in standing:
        try:
            return path, read(path)
        except CheckpointError as error:
            pass_over(path, error)
    return None


def holds_any(folder: Path) -> bool:
    return bool(found(folder))


def check(path: Path, part: int = 0, parts: int = 1, tell: Callable[[int], None] | None = None) -> dict[str, Any]:
    """The manifest's body, once every file's checksum is right: of all files, or of part `part` of `parts`.

    `tell` hears how many bytes each file had that was read.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        body = manifest["body"]
        if manifest["sha256"] != body_sha256(body):
            raise CheckpointError(f"{path} is damaged: its manifest.json does not match its own checksum.")
        if body["format"] not in (FORMAT, FORMAT_IN_PARTS):
            raise CheckpointError(
                f"{path} has format {body['format']}, and this Potluck reads formats {FORMAT} and {FORMAT_IN_PARTS}."
            )
        for index, (name, expected) in enumerate(body["files"].items()):
            if Path(name).name != name:
                raise CheckpointError(f"{path} is damaged: its manifest names {name!r}, which is not a file in it.")
            if (path / name).stat().st_size != expected["bytes"]:
                raise CheckpointError(f"{path} is damaged: {name} does not match its checksum.")
            if index % parts == part:
                if file_sha256(path / name) != expected["sha256"]:
                    raise CheckpointError(f"{path} is damaged: {name} does not match its checksum.")
                if tell is not None:
                    tell(expected["bytes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__} in its manifest.json"
        raise CheckpointError(f"{path} is damaged: {reason}.") from None
    return dict(body)


def files_of(path: Path, body: dict[str, Any], stem: str) -> list[Path]:
    """The files that hold the model, or the optimizer's state: one, or one for each of those who wrote it."""
    pattern = re.compile(re.escape(stem) + r"(-\d+-of-\d+)?\.safetensors")
    return [path / name for name in body["files"] if pattern.fullmatch(name)]


def file_sha256(path: Path) -> str:
    # One update over a mapping: a loop over pieces would take the interpreter lock back thousands of times, and wait
    # for it each time while training holds it.
    with path.open("rb") as file:
        if not path.stat().st_size:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return hashlib.sha256(mapped).hexdigest()


def found(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not folder.is_dir():
        return []
    matches = [(named, path) for path in folder.iterdir() if (named := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(m[1]), int(m[2] or 1)), path) for m, path in matches)][::-1]


def free_place(folder: Path, step: int) -> Path:
    """A run that went back to an older checkpoint passes a step again: what is there stays until the new one is."""
    return first_free(folder / f"step-{step:08d}", Path.exists)


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle of the removal must not leave something that looks like a checkpoint.
    aside = path.with_name(f"{LEAVING}{path.name}-{time.time_ns()}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(28, f"{needed:,} bytes are needed and {free:,} are free")


def body_sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
