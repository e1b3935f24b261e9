"""Checkpoints of workers that share a store and no disk: the first keeps them, the others' parts travel to it.

On the disk they are the same as any other: the whole model's, in files that each hold some pieces.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.errors import CheckpointError
from potluck.events import EventLog
from potluck.link.link import Link
from potluck.save import shelf, split_saves, state
from potluck.save.depot import Depot
from potluck.save.saves import Saves
from potluck.save.split_saves import ALL_DAMAGED, KeptTensors, Standing, take_part, together
from potluck.save.together import Share, new_aside, write_share, write_together

if TYPE_CHECKING:
    from potluck.engine.replica import Replica

RESUME = "worker-0/resume"


def _part(rank: int, step: int) -> str:
    """A worker's own part of a checkpoint, among what is its own in the store."""
    return f"worker-{rank}/part-{step}"


class StoreSaves(Saves):
    def __init__(self, link: Link, events: EventLog, depot: Depot) -> None:
        super().__init__(link, events)
        self._depot = depot

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
                self._depot.take_files(_part(other, step), share.aside, f"worker {other}'s part of the checkpoint")
            place = write_together(folder, share, snapshot, lambda: True)
            shelf.prune(folder, keep_last, place)
            self._saved(step, time.perf_counter() - started)(place)
            self._depot.drop_files([_part(other, step) for other in range(1, world)])
        elif rank < world:  # another replica holds the same parts, and its ranks write them
            with tempfile.TemporaryDirectory(prefix="potluck-") as aside:
                share = Share(rank, world, Path(aside))
                write_share(share, take_part(replica.part, standing, randoms, share, kept))
                self._depot.give_files(_part(rank, step), share.aside)

    def load(self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]) -> Standing | None:
        """The first worker's newest whole checkpoint; the others get its files."""
        told = {}
        if self._link.rank == 0:
            found = shelf.newest(folder, self._pass_over)
            told = {"name": found[0].name if found else None, "path": str(found[0]) if found else ""}
            if found is None and shelf.holds_any(folder):
                told["refusal"] = ALL_DAMAGED.format(folder)
            elif found is not None:
                self._depot.give_files(RESUME, found[0])
        answer = json.loads(self._link.gather_bytes(json.dumps(told).encode())[0])
        if "refusal" in answer:
            raise CheckpointError(answer["refusal"])
        if answer["name"] is None:
            return None
        assert replica.part is not None
        with tempfile.TemporaryDirectory(prefix="potluck-") as shared:
            self._fetch(Path(shared), answer["name"], answer["path"])
            standing = split_saves.load(self._link, Path(shared), replica.part, check, self._pass_over)
        if self._link.rank == 0:
            self._depot.drop_files([RESUME])
        replica.remember_buffers()
        return None if standing is None else standing | {"path": answer["path"]}

    def _fetch(self, folder: Path, name: str, path: str) -> None:
        if self._link.rank == 0:
            (folder / name).symlink_to(Path(path).absolute(), target_is_directory=True)
        else:
            (folder / name).mkdir()
            self._depot.take_files(RESUME, folder / name, "the checkpoint that worker 0 goes on from")
