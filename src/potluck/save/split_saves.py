"""Writes a checkpoint of a model that is split over workers: each its own part, into a folder that they share.

What all must do alike is agreed over the link, in the foreground. The disk is written in the background: each worker
says in a small file, `00001.done`, that it has written its own; rank 0 waits until all have, and only then makes a
checkpoint of it. While they write they tell each other nothing but through that folder.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.errors import CheckpointError
from potluck.files import write_whole
from potluck.link.link import Link
from potluck.save.checkpoint import MODEL, OPTIMIZER, Snapshot, failures_told, finish, new_aside, ranges, write_files
from potluck.save.checkpoint_folder import FORMAT_IN_PARTS

PATIENCE_S = 600.0
"""How long rank 0 waits for the files of the others, once its own are written."""
GRACE_S = 5.0
"""How long rank 0 waits for the files of the others, once it is known that one of them is gone."""
LOOK_S = 0.02
"""Seconds between two looks for the others' files."""


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
        _write_files(share, snapshot)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or str(error).removesuffix(".")
        with contextlib.suppress(OSError):  # then it is missed all the same
            write_whole(share.failed(share.rank), reason)
        raise CheckpointError(
            f"Cannot write the checkpoint of step {snapshot.step} to {share.aside.parent}: {reason}."
        ) from None


def write_together(folder: Path, share: Share, snapshot: Snapshot, is_one_gone: Callable[[], bool]) -> Path:
    """Write rank 0's files, and make the files of all ranks a checkpoint. Returns where it is."""
    with failures_told(folder, share.aside, snapshot.step):
        _write_files(share, snapshot)
        sums = _await_all(share, is_one_gone)
        files = {"files": sums}
        with ranges(share.aside, files, MODEL) as model, ranges(share.aside, files, OPTIMIZER) as optimizer:
            model.check_whole("it")
            optimizer.check_whole("it")
            said = snapshot.body | {"optimizer": optimizer.notes}
        for rank in range(share.world):
            share.done(rank).unlink()
        return finish(share.aside, FORMAT_IN_PARTS, sums, said)


def _write_files(share: Share, snapshot: Snapshot) -> None:
    sums = write_files(share.aside, snapshot)
    write_whole(share.done(share.rank), json.dumps(sums), durable=True)


def _await_all(share: Share, is_one_gone: Callable[[], bool]) -> dict[str, Any]:
    """The checksums of all ranks' files, once all are there."""
    started = time.monotonic()
    deadline = started + PATIENCE_S
    while missing := [rank for rank in range(share.world) if not share.done(rank).exists()]:
        if failed := [rank for rank in missing if share.failed(rank).exists()]:
            raise CheckpointError(f"worker {failed[0]} says: {share.failed(failed[0]).read_text(encoding='utf-8')}")
        if is_one_gone():
            deadline = min(deadline, time.monotonic() + GRACE_S)
            is_one_gone = _no
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


def _no() -> bool:
    return False


def _workers(ranks: list[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"


def together(link: Link, work: Callable[[], None]) -> None:
    """Does it on every worker. What one of them cannot do is raised on all."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    errors = [data.decode() for data in link.gather_bytes(str(error or "").encode())]
    if error is not None:
        raise error
    if any(errors):
        raise CheckpointError(next(sentence for sentence in errors if sentence))


def ask_first(link: Link, work: Callable[[], Any]) -> Any:
    """Return on every rank what rank 0 finds out, as JSON. A refusal there is raised on all."""
    answer = {}
    if link.rank == 0:
        try:
            answer = {"answer": work()}
        except CheckpointError as error:
            answer = {"refusal": str(error)}
    heard = json.loads(link.gather_bytes(json.dumps(answer).encode())[0])
    if "refusal" in heard:
        raise CheckpointError(heard["refusal"])
    return heard["answer"]


def agree_on_aside(link: Link, folder: Path, step: int) -> Path:
    """Make a new folder that every worker sees."""
    aside: Path = folder / ask_first(link, lambda: new_aside(folder, step).name)
    together(link, lambda: check_shared(link, folder, sees_it=aside.is_dir()))
    return aside


def check_shared(link: Link, folder: Path, *, sees_it: bool) -> None:
    if not sees_it:
        raise CheckpointError(
            f"Worker {link.rank} does not see in {folder} what worker 0 sees there. A model that is split over workers"
            " is saved and loaded by all of them: put the folder on a disk that they share."
        )
