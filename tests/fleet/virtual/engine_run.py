"""Runs of a host whose workers have the real engine, on a virtual clock: what is drawn, and what must hold of them."""

import functools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from potluck.agree.policy import ApplyPolicy, Async, Auto, Cadence, Sync
from potluck.agree.records import Position
from potluck.engine.engine import Engine
from potluck.errors import CheckpointError, PotluckError
from potluck.fleet.file_stream import FileStreamReceiver
from potluck.fleet.ledger import prove
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_receiver import MOST_BYTES, standing_of
from tests.fleet.virtual.disk import Disk
from tests.fleet.virtual.engine_worker import EngineWorker, Task, patched
from tests.fleet.virtual.fleet import Fleet
from tests.fleet.virtual.group_run import MEMORY, hash_of
from tests.fleet.virtual.toy import PATIENCE_S, ROWS

PIECE = 1 << 12
"""Bytes of a checkpoint at a time."""


class FolderDisk(Disk):
    """Checkpoints of the real engine: each is unpacked and checked as a host does, and kept as it came."""

    def __init__(self, folder: Path) -> None:
        super().__init__(piece=PIECE)
        self._folder = folder
        self._positions: dict[int, Position] = {}
        self.is_best: dict[int, bool] = {}
        """By step: whether its checkpoint says that it was the best so far."""

    @property
    def standing(self) -> Position | None:
        return self._positions[self.newest] if self.newest is not None else None

    def is_whole(self, step: int, header: str, data: bytes) -> bool:
        place = self._folder / f"step-{step:08d}"
        shutil.rmtree(place, ignore_errors=True)
        try:
            unpacker = FileStreamReceiver(place, header, MOST_BYTES)
            unpacker.feed(data)
            unpacker.close()
            self._positions[step] = standing_of(place, checkpoint_folder.check(place))
            self.is_best[step] = checkpoint_folder.best_loss(place) is not None
        except (CheckpointError, PotluckError):
            return False
        return self._positions[step].version == step


class EngineFleet(Fleet):
    def __init__(self, task: Task, folder: Path, **options: Any) -> None:
        self.task = task
        self.agreed: dict[tuple[int, int], str] = {}
        """By step and rows, the hash of the weights that all agree on, under Sync."""
        self.looked: dict[int, float] = {}
        super().__init__(epochs=task.epochs, disk=FolderDisk(folder / "disk"), **options)

    def add(self, name: str, *, at_s: float = 0.0, **options: Any) -> EngineWorker:  # type: ignore[override]
        worker = EngineWorker(self, name, **{"task": self.task, **options})
        self.workers[name] = worker  # type: ignore[assignment]
        self.clock.after(at_s, worker.start)
        return worker

    def on_agreed(self, worker: EngineWorker, engine: Engine, model: torch.nn.Module) -> None:
        """Under Sync nothing that happens to anybody changes a bit."""
        if not isinstance(self.task.policy, Sync):
            return
        now = hash_of([*model.parameters(), *model.buffers()])
        before = self.agreed.setdefault((engine.version, engine.rows_seen), now)
        assert before == now, f"{worker.name} has other weights than somebody had after step {engine.version}"

    def on_looked(self, worker: EngineWorker, engine: Engine, loss: float) -> None:
        """All who evaluate the weights of a step find the same; one that has no part in it finds no number."""
        if isinstance(self.task.policy, Sync) and loss == loss and not self.task.is_in_loop:
            step = engine.step_number
            before = self.looked.setdefault(step, loss)
            assert before == loss, f"{worker.name} finds {loss} after step {step}, and another {before}"

    def on_best(self, worker: EngineWorker, engine: Engine) -> None:
        """Its loop is over, and called the last step the best."""
        newest = self.disk.newest
        if newest == engine.version and not (self.lost_at or engine.stopping):  # one that has left is not waited for
            assert isinstance(self.disk, FolderDisk)
            assert self.disk.is_best[newest], f"{worker.name}'s best step {newest} is not kept so"

    def assert_right(self) -> None:
        ended = {worker.ended_with for worker in self.engine_workers if worker.ended_with and not worker.error}
        if not self.lost_at:
            for epoch in range(self.epochs):
                proof = prove(self.journal.ranges(epoch), ROWS)
                assert proof.holds, f"epoch {epoch}: {proof}"
            assert len(ended) <= 1, f"workers ended with other weights: {ended}"
        if isinstance(self.task.policy, Sync):
            assert ended <= {undisturbed(self.task)}, "the weights are not those of an undisturbed run"

    @property
    def engine_workers(self) -> list[EngineWorker]:
        return list(self.workers.values())  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def undisturbed(task: Task) -> str:
    """The hash of the weights that one worker ends with to whom nothing happens."""
    with living(task, patience_s=PATIENCE_S, at_least=1) as run:
        run.add("w")
        run.run_until(lambda: run.host.finish is not None)
        run.run_for(1.0)
        (worker,) = run.engine_workers
        assert worker.ended_with and not worker.error, worker.error
        return worker.ended_with


@contextmanager
def living(task: Task, **options: Any) -> Iterator[EngineFleet]:
    place = MEMORY if MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="potluck-engines-", dir=place) as folder,
        mock.patch.object(tempfile, "tempdir", folder),
        patched(),
    ):
        run = EngineFleet(task, Path(folder), **options)
        try:
            yield run
        finally:
            for worker in run.engine_workers:
                worker.end()
            run.journal.close()


def draw_task(draw: random.Random) -> Task:
    windows: dict[str, Any] = {"anchor": draw.choice([1, 2]), "max_anchor": draw.choice([2, 4, 200])}
    windows["together"] = draw.choice([0.0, 0.0, 0.5])
    kind: Callable[[], ApplyPolicy] = draw.choice(
        [Sync, Sync, lambda: Cadence(**windows), lambda: Async(**windows), lambda: Auto(**windows)]
    )
    return Task(
        policy=kind(),
        model=draw.choice(["plain", "norm", "drop", "branch"]),
        optimizer=draw.choice(["sgd", "adamw"]),
        epochs=draw.randint(1, 3),
        seed=draw.randrange(4),
        clip=draw.choice([None, 0.1]),
        save_every=draw.choice([0, 0, 1, 2]),
        evaluate_every=draw.choice([0, 0, 1, 2]),
        gather_every=draw.choice([0, 0, 1, 2]),
    )
