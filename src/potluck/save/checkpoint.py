"""Checkpoints: atomic, checksummed, and loadable on another number of workers. Nothing is pickled.

A checkpoint is a folder `step-00000120` with safetensors files and manifest.json, which holds everything else and a
checksum of each file. It is written beside its place and renamed into it, so that a kill at any moment leaves the one
before it whole. Knows nothing of links.

Of a model that is split over workers each writes its own part, into a folder that they share. It says in a small file,
`00001.done`, that it has written its own; rank 0 waits until all have, and only then makes a checkpoint of it. While
they write they tell each other nothing but through that folder.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from potluck.environment import PATIENCE_S
from potluck.errors import CheckpointError
from potluck.files import publish, write_whole
from potluck.save.checkpoint_folder import (
    FORMAT,
    FORMAT_IN_PARTS,
    MODEL,
    OPTIMIZER,
    WRITING,
    best_loss,
    body_sha256,
    check_space,
    files_of,
    free_place,
    prune,
)
from potluck.save.run_folder import make_private
from potluck.sharding.ranges import Ranges, type_name
from potluck.sharding.stored import make_header, write_all
from potluck.system import sync
from potluck.tensor_bytes import buffer
from potluck.words import check_at_least

GRACE_S = 5.0
"""How long rank 0 waits for the files of the others, once it is known that one of them is gone."""
LOOK_S = 0.02
"""Seconds between two looks for the others' files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When a run saves, and how many checkpoints it keeps."""

    every: int | None = None
    """Steps between two checkpoints; None: only at the end, and on Ctrl-C."""
    keep_last: int = 2
    """How many checkpoints stay; older ones are removed once a newer one is whole."""
    best: bool = False
    """Also save whenever the validation loss is the lowest so far; the last such checkpoint stays."""

    def __post_init__(self) -> None:
        check_at_least(1, every=self.every, keep_last=self.keep_last)


@dataclass
class Snapshot:
    """A checkpoint in host memory. `files` maps a file's stem to its tensors; `body` is all that is no tensor."""

    body: dict[str, Any]
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Notes on each file's tensors, by its stem, where they are pieces."""

    @property
    def step(self) -> int:
        return int(self.body["step"])

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())


# Writing


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Writes a checkpoint below `folder` and returns where it is. Whole or not at all."""
    aside = new_aside(folder, snapshot.step)
    with failures_told(folder, aside, snapshot.step):
        return finish(aside, FORMAT, write_files(aside, snapshot), snapshot.body)


def new_aside(folder: Path, step: int) -> Path:
    """A new folder to write a checkpoint into, before it has its place."""
    aside = folder / f"{WRITING}step-{step:08d}-{os.getpid()}-{time.time_ns()}"
    with failures_told(folder, aside, step):
        if not folder.exists():
            make_private(folder)
            sync(folder.parent)  # else a power cut could leave checkpoints in a folder that has no name
        aside.mkdir()
    return aside


def write_files(aside: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write the files, and return their sizes and checksums, by name."""
    check_space(aside, snapshot.bytes)
    sums = {}
    for stem, tensors in snapshot.files.items():
        name = f"{stem}.safetensors"
        sums[name] = write_tensors(aside / name, tensors, snapshot.notes.get(stem))
    return sums


@contextmanager
def failures_told(folder: Path, aside: Path, step: int) -> Iterator[None]:
    """Whatever goes wrong, nothing is left of what was being written, and a sentence says why."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).removesuffix(".")
        raise CheckpointError(
            f"Cannot write the checkpoint of step {step} to {folder}: {reason}. Checkpoints that were there"
            " are whole. Free some space or choose another folder with --out, then continue with --resume."
        ) from None


def finish(aside: Path, form: int, sums: dict[str, Any], said: dict[str, Any]) -> Path:
    """The manifest, and the name under which it is found: from then on it is a checkpoint. Returns where that is."""
    body: dict[str, Any] = {"format": form, "files": sums} | said
    # The manifest after the files and the name last: a kill in between leaves a folder that nobody takes for one.
    text = json.dumps({"sha256": body_sha256(body), "body": body})
    (aside / "manifest.json").write_text(text, encoding="utf-8")
    place = free_place(aside.parent, body["step"])
    publish(aside, place)
    return place


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Writes tensors in host memory as a safetensors file, without another copy of them; says its size and checksum."""
    size, digest = 0, hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for data in tensor_chunks(tensors, notes):
            write_all(file, data)
            digest.update(data)
            size += len(data)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def tensor_chunks(tensors: Mapping[str, Tensor], notes: Mapping[str, Any] | None = None) -> Iterator[memoryview]:
    """The bytes of a safetensors file of tensors in host memory, in the tensors' own memory."""
    header = make_header({name: (type_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}, notes)
    yield memoryview(header.data)
    yield from (buffer(tensors[name]) for name in header.order)


class CheckpointWriter:
    """Writes snapshots in the background, one at a time, so that training continues."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last
        # One thread: two would each remove what the other is writing.
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._writing: Future[None] | None = None

    def start(self, work: Callable[[], Path | None], on_saved: Callable[[Path], None]) -> None:
        """Begins to write; `work` says where it is, or nothing if that is another's to say.

        Waits for the one before it, if that is still being written.
        """
        self.wait()
        self._writing = self._thread.submit(self._write, work, on_saved)

    def _write(self, work: Callable[[], Path | None], on_saved: Callable[[Path], None]) -> None:
        if (place := work()) is not None:  # only once it stands may older ones go: a kill in between must leave one
            prune(self.folder, self.keep_last, place)
            if best_loss(place) is not None:
                from potluck.save.export import write_best  # only a run that keeps its best waits for rich

                write_best(place)
            on_saved(place)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what the writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


# Writing together


@dataclass(frozen=True, slots=True)
class Share:
    """One of those who write a checkpoint together."""

    rank: int
    world: int
    """How many write."""
    aside: Path
    """The folder that all of them write into."""

    def stem(self, stem: str) -> str:
        """Return the stem of this rank's own file of a kind."""
        return f"{stem}-{self.rank:05d}-of-{self.world:05d}"

    def done(self, rank: int) -> Path:
        """There when a rank has written all of its files; holds their checksums."""
        return self.aside / f"{rank:05d}.done"

    def failed(self, rank: int) -> Path:
        """There when a rank could not; says why."""
        return self.aside / f"{rank:05d}.failed"


def write_share(share: Share, snapshot: Snapshot) -> None:
    """Write the files of a rank other than 0."""
    try:
        _write_share(share, snapshot)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or str(error).removesuffix(".")
        with suppress(OSError):  # then it is missed all the same
            write_whole(share.failed(share.rank), reason)
        raise CheckpointError(
            f"Cannot write the checkpoint of step {snapshot.step} to {share.aside.parent}: {reason}."
        ) from None


def write_together(folder: Path, share: Share, snapshot: Snapshot, is_one_gone: Callable[[], bool]) -> Path:
    """Write rank 0's files, and make the files of all ranks a checkpoint. Returns where it is."""
    with failures_told(folder, share.aside, snapshot.step):
        _write_share(share, snapshot)
        sums = _await_all(share, is_one_gone)
        files = {"files": sums}
        model, optimizer = (Ranges(files_of(share.aside, files, stem)) for stem in (MODEL, OPTIMIZER))
        with model, optimizer:
            model.check_whole("it")
            optimizer.check_whole("it")
            said = snapshot.body | {"optimizer": optimizer.notes}
        for rank in range(share.world):  # before it has its name: nothing is in it then but what the manifest names
            share.done(rank).unlink()
        return finish(share.aside, FORMAT_IN_PARTS, sums, said)


def _write_share(share: Share, snapshot: Snapshot) -> None:
    sums = write_files(share.aside, snapshot)
    # The last that is done there: as soon as rank 0 sees it, it may give the folder another name.
    write_whole(share.done(share.rank), json.dumps(sums))


def _await_all(share: Share, is_one_gone: Callable[[], bool]) -> dict[str, Any]:
    """The checksums of all ranks' files, once all are there."""
    started = time.monotonic()
    deadline = started + PATIENCE_S  # else a rank that dies unseen would keep rank 0, and the next save, for ever
    while missing := [rank for rank in range(share.world) if not share.done(rank).exists()]:
        if failed := [rank for rank in missing if share.failed(rank).exists()]:
            raise CheckpointError(f"worker {failed[0]} says: {share.failed(failed[0]).read_text(encoding='utf-8')}")
        if is_one_gone():
            deadline = min(deadline, time.monotonic() + GRACE_S)  # from when that was first known
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"nothing came from {_workers(missing)} within {time.monotonic() - started:.0f} s; all write into the"
                " same folder, which must be on a disk that they share"
            )
        time.sleep(LOOK_S)
    sums: dict[str, Any] = {}
    for rank in range(share.world):
        sums |= json.loads(share.done(rank).read_text(encoding="utf-8"))
    return sums


def _workers(ranks: list[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
