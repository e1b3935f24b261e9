"""Saves and finds a model that is split over workers: each writes and reads its own part, in a folder that they share.

What all must do alike is agreed over the link, in the foreground. The disk is written in the background: each worker
says in a small file, `00001.done`, that it has written its own; rank 0 waits until all have, and only then makes a
checkpoint of it. While they write they tell each other nothing but through that folder.
"""

import contextlib
import json
import time
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from potluck.errors import CheckpointError
from potluck.files import write_whole
from potluck.link.link import Link
from potluck.save import checkpoint, checkpoint_folder, parts, state
from potluck.save.checkpoint import MODEL, OPTIMIZER, Snapshot, failures_told, finish, new_aside, ranges, write_files
from potluck.save.checkpoint_folder import FORMAT_IN_PARTS
from potluck.save.left_out import check_left_out
from potluck.sharding.ranges import Ranges, Spec
from potluck.sharding.sharded import Sharded
from potluck.tensor_bytes import from_bytes, to_bytes

if TYPE_CHECKING:
    from potluck.engine.frozen_base import FrozenBase

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


Standing = dict[str, Any]
"""Where a run stands, as JSON: step, rows, epoch, position; what is kept beside the model."""
KeptTensors = dict[str, Tensor]
"""Tensors of the scheduler and of fleet.state in host memory, which the position names."""
TENSORS = "kept tensors"
"""Key under which a position that was loaded has its tensors."""
ALL_DAMAGED = "Every checkpoint in {} is damaged. Start anew in another folder."


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


def take_part(
    sharded: Sharded,
    standing: Standing,
    randoms: list[bytes],
    share: Share,
    kept: KeptTensors,
    without: Container[str] = (),
) -> checkpoint.Snapshot:
    """A copy in host memory of what this worker writes. `without`: entries of the model's that are left out."""
    model, optimizer = parts.model_part(sharded, without=without), parts.optimizer_part(sharded)
    names = share.stem(checkpoint.MODEL), share.stem(checkpoint.OPTIMIZER)
    files = {names[0]: model.tensors, names[1]: optimizer.tensors}
    if share.rank == 0:
        files |= files_beside(randoms, kept)
    notes = {names[0]: model.notes, names[1]: optimizer.notes}
    return checkpoint.Snapshot(standing | {"workers": len(randoms)}, files, notes)


def files_beside(randoms: list[bytes], kept: KeptTensors) -> dict[str, dict[str, Tensor]]:
    """List the files of a checkpoint beside the model and its optimizer: each worker's random state, and what is
    kept."""
    randoms_by_rank = {str(rank): from_bytes(data) for rank, data in enumerate(randoms)}
    return {checkpoint.RANDOM: randoms_by_rank, **({checkpoint.KEPT: kept} if kept else {})}


def load_beside(link: Link, standing: Standing, opened: Callable[[str], "TensorSource"]) -> Standing:
    """The reverse. The random state is put back if there are as many workers as there were."""
    if standing["workers"] == link.world:
        source = opened(checkpoint.RANDOM)
        randoms = [source[str(rank)] for rank in range(link.world)]
        state.set_random_state(to_bytes(randoms[link.rank]))
    kept = opened(checkpoint.KEPT)
    return standing | {TENSORS: {name: kept[name] for name in kept.specs}}


class TensorSource(state.Tensors, Protocol):
    """Tensors of a file: read here, or sent by the rank that reads them."""

    @property
    def specs(self) -> Mapping[str, Spec]: ...


def agree_on_aside(link: Link, folder: Path, step: int) -> tuple[Path, list[bytes]]:
    """A new folder that every worker sees, and everyone's random state."""
    aside = folder / ask_first(link, lambda: new_aside(folder, step).name)
    together(link, lambda: _check_shared(link, folder, sees_it=aside.is_dir()))
    return aside, link.gather_bytes(state.random_state())


def _check_shared(link: Link, folder: Path, *, sees_it: bool) -> None:
    if not sees_it:
        raise CheckpointError(
            f"Worker {link.rank} does not see in {folder} what worker 0 sees there. A model that is split over workers"
            " is saved and loaded by all of them: put the folder on a disk that they share."
        )


def load(
    link: Link,
    folder: Path,
    sharded: Sharded,
    check: Callable[[Path, Standing], None],
    pass_over: Callable[[Path, str], None],
    base: "FrozenBase | None" = None,
) -> Standing | None:
    """Puts this worker's part of the newest whole checkpoint into its memory. A refusal comes before any change."""
    found = _find(link, folder, pass_over)
    if found is None:
        return None
    path, standing = found
    with ExitStack() as stack:
        sources: list[Ranges] = []
        without: set[str] = set()

        def opened(stem: str) -> Ranges:
            return stack.enter_context(checkpoint.ranges(path, standing, stem))

        def look() -> None:
            sources.extend(map(opened, (checkpoint.MODEL, checkpoint.OPTIMIZER)))
            without.update(check_left_out(base, standing, sources[0].tensors, str(path)))
            parts.check_part(sharded, sources[0], sources[1], standing["optimizer"], str(path), without)
            check(path, standing)

        def fill() -> None:
            parts.load_part(sharded, sources[0], sources[1], standing["optimizer"], without)

        together(link, look)
        together(link, fill)
        sharded.share()
        return load_beside(link, standing, opened)


def _find(link: Link, folder: Path, pass_over: Callable[[Path, str], None]) -> tuple[Path, Standing] | None:
    """The newest that is whole. Each worker compares the checksums of some of its files."""
    names = [path.name for path in checkpoint_folder.found(folder)]
    theirs = json.loads(link.gather_bytes(json.dumps(names).encode())[0])
    together(link, lambda: _check_shared(link, folder, sees_it=names == theirs))
    for name in names:
        standing, complaint = {}, ""
        try:
            standing = checkpoint_folder.check(folder / name, link.rank, link.world)
        except CheckpointError as error:
            complaint = str(error)
        complaints = [data.decode() for data in link.gather_bytes(complaint.encode())]
        if not any(complaints):
            return folder / name, standing | {"path": str(folder / name)}
        if link.rank == 0:
            pass_over(folder / name, next(told for told in complaints if told))
    if names:
        raise CheckpointError(ALL_DAMAGED.format(folder))
    return None
