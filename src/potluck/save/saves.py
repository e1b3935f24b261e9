"""Saves where a run stands, and finds it again on any number of workers, however its model is split.

A model that is split is written and read by all of its workers, each its own part, in a folder that they share. One
that each worker has whole is a single part: rank 0 alone touches the disk, and tells the others what it reads. What all
must do alike is agreed over the link, in the foreground; the disk is written in the background.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from potluck.errors import CheckpointError
from potluck.events import CheckpointPassedOver, CheckpointSaved, EventLog
from potluck.link.link import Alone, Link, ask_first
from potluck.save import checkpoint, checkpoint_folder, parts, state
from potluck.save.checkpoint import Share, write_share, write_together
from potluck.sharding.ranges import Ranges
from potluck.sharding.sharded import Sharded
from potluck.sharding.stored import Piece, Stored
from potluck.tensor_bytes import from_bytes, to_bytes

if TYPE_CHECKING:
    from potluck.replica.replica import Replica

T = TypeVar("T")
Standing = dict[str, Any]
"""Where a run stands, as JSON: step, rows, epoch, position; what is kept beside the model."""
KeptTensors = dict[str, Tensor]
"""Tensors of the scheduler and of fleet.state in host memory, which the position names."""
TENSORS = "kept tensors"
"""Key under which a position that was loaded has its tensors."""


class Saves:
    def __init__(self, link: Link, events: EventLog, is_gone: Callable[[], bool] | None = None) -> None:
        """`is_gone`: whether what another worker has not written by now of a checkpoint will not come."""
        self._link = link
        self._events = events
        self._writers: dict[Path, checkpoint.CheckpointWriter] = {}
        self._gone = threading.Event()  # set by the thread that trains, read by the one that writes
        self._is_gone = is_gone or self._gone.is_set

    def save(self, folder: Path, replica: "Replica", standing: Standing, keep_last: int, kept: KeptTensors) -> None:
        """Returns once the checkpoint is in host memory; the disk is written meanwhile.

        One at a time: it waits for the write before it, if that has not ended yet.
        """
        writer = self._writers.setdefault(folder, checkpoint.CheckpointWriter(folder, keep_last))
        writer.keep_last = keep_last
        writer.wait()
        started = time.perf_counter()
        if (work := self.take(folder, replica, standing, kept)) is not None:
            writer.start(work, self._saved(standing["step"], time.perf_counter() - started))

    def take(
        self, folder: Path, replica: "Replica", standing: Standing, kept: KeptTensors, *, with_randoms: bool = True
    ) -> Callable[[], Path | None] | None:
        """Copies what this worker writes to host memory, and returns what writes it; none if others do.

        `with_randoms`: and each worker's random state.
        """
        link, part = self._link, parts.saved_part(replica)
        randoms = link.gather_bytes(state.random_state()) if with_randoms else []
        if not part.is_split and link.rank:
            return None
        without, base_notes = parts.leave_out(replica, link if part.is_split else Alone())
        standing = standing | base_notes
        if not part.is_split:
            whole = take_snapshot(part, standing, randoms, kept, without)
            return lambda: checkpoint.write(folder, whole)
        share = Share(link.rank, part.writer.world, agree_on_aside(link, folder, standing["step"]))
        if link.rank >= share.world:
            return None  # a node of others holds the same parts, and writes them
        own = take_snapshot(part, standing, randoms, kept, without, share)
        if link.rank:
            return lambda: write_share(share, own)
        return lambda: write_together(folder, share, own, self._is_gone)

    def load(self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]) -> Standing | None:
        """Puts the newest whole checkpoint into the replica and says where it stands; none if there is none.

        `check` may refuse it, before any change. The random state is put back if there are as many workers as there
        were.
        """
        self.wait_together()  # else it would miss one that is being written, or some would see what others do not
        link, part = self._link, parts.saved_part(replica)
        standing = self._find(folder, part)
        if standing is None:
            return None
        path = Path(standing["path"])
        with ExitStack() as stack:
            opened = self._opener(stack, path, standing, part)

            def look() -> tuple[Ranges, Ranges, frozenset[str]]:
                model, optimizer = opened(checkpoint_folder.MODEL), opened(checkpoint_folder.OPTIMIZER)
                without = parts.check_left_out(replica.base, standing, model.tensors, str(path))
                parts.check_part(part, model, optimizer, standing["optimizer"], str(path), without)
                check(path, standing)
                return model, optimizer, without

            model, optimizer, without = together(link, look)

            def fill() -> None:
                parts.load_part(part, model, optimizer, standing["optimizer"], without)

            # Nobody could be told that rank 0 fails while it reads for all: they wait for its numbers then.
            together(link, fill) if part.is_split else fill()
            part.share()
            standing |= {TENSORS: self._load_beside(standing, opened)}
        replica.remember_buffers()
        return standing

    def one_is_gone(self) -> None:
        """Another worker is: what it has not written by now of a checkpoint will not come."""
        self._gone.set()

    def wait(self) -> None:
        """Wait until nothing is being written here."""
        for writer in self._writers.values():
            writer.wait()

    def wait_together(self) -> None:
        """Wait, on every worker alike, until nothing is being written anywhere. What went wrong is raised on all."""
        together(self._link, self.wait)

    def _saved(self, step: int, stall_s: float) -> Callable[[Path], None]:
        def tell(place: Path) -> None:
            size = sum(file.stat().st_size for file in place.iterdir())
            self._events.emit(CheckpointSaved(step=step, folder=str(place), stall_s=stall_s, bytes=size))

        return tell

    def _find(self, folder: Path, part: Sharded) -> Standing | None:
        """Where the newest checkpoint that is whole stands, with its path. Where the first worker alone sees it, it
        tells the others."""
        if part.is_split:
            return self._find_with(self._link, folder)
        found: Standing | None = ask_first(self._link, lambda: self._find_with(Alone(), folder), CheckpointError)
        return found

    def _find_with(self, link: Link, folder: Path) -> Standing | None:
        """Each of these workers, who share a disk, compares the checksums of some files."""
        names = [path.name for path in checkpoint_folder.found(folder)]
        theirs = json.loads(link.gather_bytes(json.dumps(names).encode())[0])
        together(link, lambda: check_shared(link, folder, sees_it=names == theirs))

        def check(path: Path) -> Standing:
            return together(link, lambda: checkpoint_folder.check(path, link.rank, link.world))

        def pass_over(path: Path, error: CheckpointError) -> None:
            if link.rank == 0:
                self._events.emit(CheckpointPassedOver(folder=str(path), reason=str(error)))

        whole = checkpoint_folder.newest([folder / name for name in names], check, pass_over)
        if whole is None and names:
            raise CheckpointError(f"Every checkpoint in {folder} is damaged. Start anew in another folder.")
        return None if whole is None else whole[1] | {"path": str(whole[0])}

    def _opener(self, stack: ExitStack, path: Path, standing: Standing, part: Sharded) -> Callable[[str], Ranges]:
        """What opens a checkpoint's files of one kind, until the stack is closed."""

        def opened(stem: str) -> Ranges:
            files = checkpoint_folder.files_of(path, standing, stem)
            is_shared = part.is_split or self._link.world == 1
            return stack.enter_context(Ranges(files) if is_shared else _ToldRanges(files, self._link))

        return opened

    def _load_beside(self, standing: Standing, opened: Callable[[str], Ranges]) -> KeptTensors:
        """Put back the random state if there are as many workers as there were, and return what is kept."""
        if standing["workers"] == self._link.world:
            source = opened(checkpoint_folder.RANDOM)
            randoms = [source[str(rank)] for rank in range(self._link.world)]
            state.set_random_state(to_bytes(randoms[self._link.rank]))
        kept = opened(checkpoint_folder.KEPT)
        return {name: kept[name] for name in kept.tensors}


class _ToldRanges(Ranges):
    """Rank 0's files on every rank, which need not see them: all ranks read the same numbers, in the same order."""

    def __init__(self, files: Sequence[Path], link: Link) -> None:
        self._link = link

        def describe() -> dict[str, Any]:
            super(_ToldRanges, self).__init__(files)
            return {name: [stored.shape, stored.dtype] for name, stored in self.tensors.items()}

        described = ask_first(link, describe, CheckpointError)
        if link.rank:
            super().__init__(())
            for name, (shape, dtype) in described.items():
                self.tensors[name] = Stored(tuple(shape), dtype, [Piece(0, math.prod(shape), 0, 0)])

    def read_into(self, out: Tensor, name: str, start: int = 0) -> None:
        if self._link.rank == 0:
            super().read_into(out, name, start)
        self._link.broadcast(out)


def take_snapshot(
    part: Sharded,
    standing: Standing,
    randoms: list[bytes],
    kept: KeptTensors,
    without: Container[str] = (),
    share: Share | None = None,
) -> checkpoint.Snapshot:
    """A copy in host memory of what this worker writes. `randoms`: each worker's random state, or none where it does
    not matter. `without`: entries of the model's state_dict that are left out. `share`: where others write too."""
    model, optimizer = parts.model_part(part, without=without), parts.optimizer_part(part)
    pieces = {checkpoint_folder.MODEL: model, checkpoint_folder.OPTIMIZER: optimizer}
    body = standing | {"workers": len(randoms)}
    beside: dict[str, dict[str, Tensor]] = {}
    if share is None or share.rank == 0:
        beside[checkpoint_folder.RANDOM] = {str(rank): from_bytes(data) for rank, data in enumerate(randoms)}
        beside |= {checkpoint_folder.KEPT: kept} if kept else {}
    if share is None:
        files = {stem: each.tensors for stem, each in pieces.items()}
        return checkpoint.Snapshot(body | {"optimizer": optimizer.notes}, files | beside)
    files = {share.stem(stem): each.tensors for stem, each in pieces.items()}
    return checkpoint.Snapshot(body, files | beside, {share.stem(stem): each.notes for stem, each in pieces.items()})


def together(link: Link, work: Callable[[], T]) -> T:
    """Does it on every worker. What one of them cannot do is raised on all."""
    try:
        result = work()
    except Exception as error:
        link.gather_bytes(str(error).encode())
        raise
    if any(errors := [data.decode() for data in link.gather_bytes(b"")]):
        raise CheckpointError(next(sentence for sentence in errors if sentence))
    return result


def agree_on_aside(link: Link, folder: Path, step: int) -> Path:
    """Make a new folder that every worker sees."""
    aside: Path = folder / ask_first(link, lambda: checkpoint.new_aside(folder, step).name, CheckpointError)
    together(link, lambda: check_shared(link, folder, sees_it=aside.is_dir()))
    return aside


def check_shared(link: Link, folder: Path, *, sees_it: bool) -> None:
    if not sees_it:
        raise CheckpointError(
            f"Worker {link.rank} does not see in {folder} what worker 0 sees there. A model that is split over workers"
            " is saved and loaded by all of them: put the folder on a disk that they share."
        )
