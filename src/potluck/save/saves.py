"""Saves where a run stands, and finds it again on any number of workers, however its model is split.

Of a model that each worker has whole, rank 0 alone touches the disk; what the others need of a checkpoint reaches them
over the link. A model that is split is written and read by all of them, each its own part, in a folder that they share.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from potluck.errors import CheckpointError
from potluck.events import CheckpointPassedOver, CheckpointSaved, EventLog
from potluck.link.link import Link
from potluck.save import checkpoint, checkpoint_folder, split_saves, state
from potluck.save.checkpoint_folder import BASE
from potluck.save.left_out import check_left_out, leave_out
from potluck.save.split_saves import (
    ALL_DAMAGED,
    TENSORS,
    KeptTensors,
    Share,
    Standing,
    together,
    write_share,
    write_together,
)
from potluck.sharding.absent import own_state
from potluck.sharding.ranges import Ranges, Spec
from potluck.sharding.sharded import Sharded

if TYPE_CHECKING:
    from potluck.engine.replica import Replica

__all__ = ["TENSORS", "KeptTensors", "Saves", "Standing", "take_snapshot"]


class Saves:
    def __init__(self, link: Link, events: EventLog, is_gone: Callable[[], bool] | None = None) -> None:
        """`is_gone`: whether what another worker has not written by now of a checkpoint will not come."""
        self._link = link
        self._events = events
        self._writers: dict[Path, checkpoint.CheckpointWriter] = {}
        self._gone = threading.Event()
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
        rank, sharded = self._link.rank, sharded_of(replica)
        if sharded is None:
            randoms = self._link.gather_bytes(state.random_state()) if with_randoms else []
            if rank:
                return None
            whole = take_snapshot(replica, standing, randoms, kept)
            return lambda: checkpoint.write(folder, whole)
        without, base_notes = leave_out(replica, self._link)
        aside, randoms = split_saves.agree_on_aside(self._link, folder, standing["step"])
        share = Share(rank, sharded.collectives.world, aside)
        if rank >= share.world:
            return None  # a node of others holds the same parts, and writes them
        standing |= base_notes
        part = split_saves.take_part(sharded, standing, randoms if with_randoms else [], share, kept, without)
        if rank:
            return lambda: write_share(share, part)
        return lambda: write_together(folder, share, part, self._is_gone)

    def load(self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]) -> Standing | None:
        """Puts the newest whole checkpoint into the replica and says where it stands; none if there is none.

        `check` may refuse it. The random state is put back if there are as many workers as there were.
        """
        self.wait_together()  # else it would miss one that is being written, or some would see what others do not
        if (sharded := sharded_of(replica)) is not None:
            standing = split_saves.load(self._link, folder, sharded, check, self._pass_over, replica.base)
        else:
            standing = self._load_whole(folder, replica, check)
        if standing is not None:
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

    def _pass_over(self, path: Path, reason: str) -> None:
        self._events.emit(CheckpointPassedOver(folder=str(path), reason=reason))

    # A model that each worker has whole

    def _load_whole(self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]) -> Standing | None:
        path, standing = self._find(folder, replica, check)
        if standing is None:
            return None
        if path is not None:
            with checkpoint.ranges(path, standing, checkpoint.MODEL) as source:
                without = check_left_out(replica.base, standing, source.tensors, str(path))
                state.load_model(replica.model, source, without)
        replica.align(with_base=BASE not in standing)
        with ExitStack() as stack:

            def opened(stem: str) -> _Told:
                files = checkpoint_folder.files_of(path, standing, stem) if path is not None else ()
                return _Told(self._link, stack.enter_context(Ranges(files)), replica)

            told = opened(checkpoint.OPTIMIZER)
            state.load_optimizer(replica.optimizer, replica.names, told, standing["optimizer"])
            return split_saves.load_beside(self._link, standing, opened)

    def _find(
        self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]
    ) -> tuple[Path | None, Standing | None]:
        """Where it stands, on every rank, and on rank 0 its path.

        A refusal is raised on every rank alike, before anything is changed.
        """

        def look() -> Standing | None:
            if (found := self._newest(folder)) is None:
                return None
            path, standing = found
            self._check_whole(path, standing, replica)
            check(path, standing)
            return standing | {"path": str(path)}

        standing: Standing | None = split_saves.ask_first(self._link, look)
        return Path(standing["path"]) if standing is not None and self._link.rank == 0 else None, standing

    def _newest(self, folder: Path) -> tuple[Path, Standing] | None:
        """On rank 0."""
        found = checkpoint_folder.newest(folder, self._pass_over)
        if found is None and checkpoint_folder.holds_any(folder):
            raise CheckpointError(ALL_DAMAGED.format(folder))
        return found

    def _check_whole(self, path: Path, standing: Standing, replica: "Replica") -> None:
        """Check that it is of this model and this optimizer, and that nothing is missing."""
        with (
            checkpoint.ranges(path, standing, checkpoint.MODEL) as model,
            checkpoint.ranges(path, standing, checkpoint.OPTIMIZER) as optimizer,
        ):
            without = check_left_out(replica.base, standing, model.tensors, str(path))
            mine = {name: own for name, own in own_state(replica.model).items() if name not in without}
            state.check_model(mine, model.specs, str(path))
            names = [[replica.names[id(p)] for p in group["params"]] for group in replica.optimizer.param_groups]
            state.check_optimizer(replica.optimizer, names, standing["optimizer"])
            model.check_whole(str(path))
            optimizer.check_whole(str(path))


class _Told:
    """Rank 0's tensors on every rank, each when it is asked for: by all ranks in the same order."""

    def __init__(self, link: Link, source: Ranges, replica: "Replica") -> None:
        self._link = link
        self._source = source
        held = [parameter for group in replica.optimizer.param_groups for parameter in group["params"]]
        self._parameters = {replica.names[id(parameter)]: parameter for parameter in held}
        mine = {name: [list(spec.shape), str(spec.dtype).removeprefix("torch.")] for name, spec in source.specs.items()}
        told = json.loads(link.gather_bytes(json.dumps(mine).encode())[0])
        self.specs = {name: Spec(tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in told.items()}

    def __getitem__(self, name: str, /) -> Tensor:
        spec = self.specs[name]
        tensor = self._source.tensor(name) if self._link.rank == 0 else torch.empty(spec.shape, dtype=spec.dtype)
        self._link.broadcast(tensor)
        owner = self._parameters.get(name.rpartition("/")[0])
        is_like_it = owner is not None and owner.dim() > 0 and owner.shape == tensor.shape
        return tensor.to(owner.device) if owner is not None and is_like_it else tensor  # none waits in host memory


def sharded_of(replica: "Replica") -> Sharded | None:
    """Return this worker's part of a model that is split; None if it has all of it."""
    return replica.part or replica.sharded


def take_snapshot(
    replica: "Replica", standing: Standing, randoms: list[bytes], kept: KeptTensors
) -> checkpoint.Snapshot:
    """A copy in host memory. `randoms`: each worker's random state, or none where it does not matter."""
    tensors, skeleton = state.optimizer_state(replica.optimizer, replica.names)
    without, told = leave_out(replica)
    return checkpoint.Snapshot(
        standing | told | {"optimizer": skeleton, "workers": len(randoms)},
        {
            checkpoint.MODEL: state.model_state(replica.model, without),
            checkpoint.OPTIMIZER: tensors,
            **split_saves.files_beside(randoms, kept),
        },
    )
