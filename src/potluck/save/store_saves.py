"""Checkpoints of workers that share a store and no disk: the first keeps them, the others' parts travel to it.

On the disk they are the same as any other: the whole model's, in files that each hold some pieces.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.events import EventLog
from potluck.link.link import Link
from potluck.save import checkpoint_folder, split_saves, state
from potluck.save.checkpoint import new_aside
from potluck.save.saves import Saves
from potluck.save.split_saves import KeptTensors, Standing, ask_first, take_part, together
from potluck.save.store_run import StoreRun
from potluck.save.together import Share, write_share, write_together

if TYPE_CHECKING:
    from potluck.engine.replica import Replica

RESUME = "worker-0/resume"


def _part(rank: int, step: int) -> str:
    """A worker's own part of a checkpoint, among what is its own in the store."""
    return f"worker-{rank}/part-{step}"


class StoreSaves(Saves):
    def __init__(self, link: Link, events: EventLog, run: StoreRun) -> None:
        super().__init__(link, events)
        self._run = run

    def save(self, folder: Path, replica: "Replica", standing: Standing, keep_last: int, kept: KeptTensors) -> None:
        """Returns once it is on the first worker's disk. What one of them cannot do is raised on all."""
        randoms = self._link.gather_bytes(state.random_state())
        together(self._link, lambda: self._save(folder, replica, standing, randoms, keep_last, kept))

    def _save(
        self,
        folder: Path,
        replica: "Replica",
        standing: Standing,
        randoms: list[bytes],
        keep_last: int,
        kept: KeptTensors,
    ) -> None:
        assert replica.part is not None
        rank, world, step = self._link.rank, replica.part.collectives.world, standing["step"]
        started = time.perf_counter()
        if rank == 0:
            share = Share(0, world, new_aside(folder, step))
            snapshot = take_part(replica.part, standing, randoms, share, kept)
            for other in range(1, world):
                self._run.take_files(_part(other, step), share.aside, f"worker {other}'s part of the checkpoint")
            place = write_together(folder, share, snapshot, lambda: True)
            checkpoint_folder.prune(folder, keep_last, place)
            self._saved(step, time.perf_counter() - started)(place)
            self._run.drop_files([_part(other, step) for other in range(1, world)])
        elif rank < world:  # another replica holds the same parts, and its ranks write them
            with tempfile.TemporaryDirectory(prefix="potluck-") as aside:
                share = Share(rank, world, Path(aside))
                write_share(share, take_part(replica.part, standing, randoms, share, kept))
                self._run.give_files(_part(rank, step), share.aside)

    def load(self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]) -> Standing | None:
        """The first worker's newest whole checkpoint; the others get its files."""

        def give() -> str | None:
            if (found := self._newest(folder)) is None:
                return None
            self._run.give_files(RESUME, found[0])
            return str(found[0])

        path = ask_first(self._link, give)
        if path is None:
            return None
        assert replica.part is not None
        with tempfile.TemporaryDirectory(prefix="potluck-") as shared:
            self._fetch(Path(shared) / Path(path).name, path)
            standing = split_saves.load(self._link, Path(shared), replica.part, check, self._pass_over)
        if self._link.rank == 0:
            self._run.drop_files([RESUME])
        replica.remember_buffers()
        return None if standing is None else standing | {"path": path}

    def _fetch(self, place: Path, path: str) -> None:
        if self._link.rank == 0:
            place.symlink_to(Path(path).absolute(), target_is_directory=True)
        else:
            place.mkdir()
            self._run.take_files(RESUME, place, "the checkpoint that worker 0 goes on from")
