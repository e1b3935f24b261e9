"""Checkpoints: atomic, checksummed, and loadable on another number of workers. Nothing is pickled.

A checkpoint is a folder `step-00000120` with safetensors files and manifest.json, which holds everything else and a
checksum of each file. It is written beside its place and renamed into it, so that a kill at any moment leaves the one
before it whole. Knows nothing of links: rank 0 alone touches the disk.
"""

import hashlib
import itertools
import json
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from potluck.errors import CheckpointError

FORMAT = 1
MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_WRITING, _LEAVING = ".writing-", ".leaving-"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int | None = None
    """Save after each this many steps; none: only at the end, and on Ctrl-C."""
    keep_last: int = 2
    """How many checkpoints stay; older ones are removed once a newer one is whole."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"every must be at least 1 step, not {self.every}")
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {self.keep_last}")


@dataclass
class Snapshot:
    """A checkpoint in host memory. `files` maps a file's stem to its tensors; `body` is all that is no tensor."""

    body: dict[str, Any]
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.body["step"])

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())


# Writing


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Writes a checkpoint below `folder` and returns where it is. Whole or not at all."""
    place = _free_place(folder, snapshot.step)
    aside = folder / f"{_WRITING}{place.name}-{os.getpid()}"
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            _sync(folder.parent)
        _insist_on_space(folder, snapshot.bytes)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        sums = {}
        for stem, tensors in snapshot.files.items():
            file = aside / f"{stem}.safetensors"
            save_file(tensors, file)
            sums[file.name] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            _sync(file)
        body = {"format": FORMAT, "files": sums} | snapshot.body
        manifest = aside / "manifest.json"
        manifest.write_text(json.dumps({"sha256": _body_sha256(body), "body": body}, indent=1), encoding="utf-8")
        _sync(manifest)
        _sync(aside)
        aside.rename(place)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"Cannot write the checkpoint of step {snapshot.step} to {folder}: {reason}. Checkpoints that were there"
            " are whole. Free some space or choose another folder with --out, then go on with --resume."
        ) from None
    return place


def prune(folder: Path, keep_last: int, newest: Path) -> None:
    """Removes all but `newest` and the few before it, and what killed writers left behind.

    What comes after `newest` stays: it is damaged and was passed over, or not ours.
    """
    found = _found(folder)
    for path in found[found.index(newest) + keep_last :]:
        _remove(path)
    for leftover in [*folder.glob(f"{_WRITING}*"), *folder.glob(f"{_LEAVING}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


class Writer:
    """Writes snapshots in the background, one at a time, so that training goes on."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, snapshot: Snapshot, on_saved: Callable[[Path], None]) -> None:
        """Begins to write. Waits for the one before it, if that is still being written."""
        self.wait()

        def work() -> None:
            try:
                place = write(self.folder, snapshot)
                prune(self.folder, self.keep_last, place)
                on_saved(place)
            except Exception as error:  # raised by the next wait(), where somebody hears of it
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises what the writing raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


# Reading


def newest(folder: Path, pass_over: Callable[[Path, str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its manifest's body. `pass_over` hears of each damaged one."""
    for path in _found(folder):
        try:
            return path, check(path)
        except CheckpointError as error:
            pass_over(path, str(error))
    return None


def holds_any(folder: Path) -> bool:
    return bool(_found(folder))


def check(path: Path) -> dict[str, Any]:
    """The manifest's body, once every file's checksum is right."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        body = manifest["body"]
        if manifest["sha256"] != _body_sha256(body):
            raise CheckpointError(f"{path} is damaged: its manifest.json does not match its own checksum.")
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {body['format']}, and this Potluck reads format {FORMAT}.")
        for name, expected in body["files"].items():
            if Path(name).name != name:
                raise CheckpointError(f"{path} is damaged: its manifest names {name!r}, which is not a file in it.")
            if (path / name).stat().st_size != expected["bytes"] or file_sha256(path / name) != expected["sha256"]:
                raise CheckpointError(f"{path} is damaged: {name} does not match its checksum.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__} in its manifest.json"
        raise CheckpointError(f"{path} is damaged: {reason}.") from None
    return dict(body)


def read(path: Path, stem: str) -> dict[str, Tensor]:
    return load_file(path / f"{stem}.safetensors")


def file_sha256(path: Path) -> str:
    # One update over a mapping: a loop over pieces would take the interpreter lock back thousands of times, and wait
    # for it each time while training holds it.
    with path.open("rb") as file:
        if not path.stat().st_size:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return hashlib.sha256(mapped).hexdigest()


def _found(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not folder.is_dir():
        return []
    matches = [(found, path) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(m[1]), int(m[2] or 1)), path) for m, path in matches)][::-1]


def _free_place(folder: Path, step: int) -> Path:
    """A run that went back to an older checkpoint passes a step again: what is there stays until the new one is."""
    name = f"step-{step:08d}"
    numbered = (folder / f"{name}-{number}" for number in itertools.count(2))
    return next(path for path in itertools.chain([folder / name], numbered) if not path.exists())


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle of the removal must not leave something that looks like a checkpoint.
    aside = path.with_name(f"{_LEAVING}{path.name}-{time.time_ns()}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _insist_on_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(28, f"{needed:,} bytes are needed and {free:,} are free")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _body_sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
