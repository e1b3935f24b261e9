"""Saves where a run stands, and finds it again on any number of workers.

Rank 0 alone touches the disk; what the others need of a checkpoint reaches them over the link.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.errors import CheckpointError
from potluck.events import CheckpointPassedOver, CheckpointSaved, EventLog
from potluck.train import checkpoint, state
from potluck.train.link import Link
from potluck.train.replica import Replica

Standing = dict[str, Any]
"""Where a run stands, as JSON: step, rows, epoch, position."""


class Saves:
    def __init__(self, link: Link, events: EventLog) -> None:
        self._link = link
        self._events = events
        self._writers: dict[Path, checkpoint.Writer] = {}

    def save(self, folder: Path, replica: Replica, standing: Standing, keep_last: int) -> None:
        """Returns once the checkpoint is in host memory; the disk is written meanwhile.

        One at a time: it waits for the write before it, if that has not ended yet.
        """
        writer = self._writers.setdefault(folder, checkpoint.Writer(folder, keep_last))
        writer.keep_last = keep_last
        writer.wait()
        started = time.perf_counter()
        randoms = self._link.gather_bytes(state.random_state())
        if self._link.rank != 0:
            return
        snapshot = take_snapshot(replica, standing, randoms)
        stall_s = time.perf_counter() - started
        writer.start(
            snapshot,
            lambda place: self._events.emit(
                CheckpointSaved(step=snapshot.step, folder=str(place), stall_s=stall_s, bytes=snapshot.bytes)
            ),
        )

    def load(self, folder: Path, replica: Replica, check: Callable[[Path, Standing], None]) -> Standing | None:
        """Puts the newest whole checkpoint into the replica and says where it stands; none if there is none.

        `check` may refuse it. The random state is put back if there are as many workers as there were.
        """
        path, standing = self._find(folder, replica, check)
        if standing is None:
            return None
        replica.align()
        replica.remember_buffers()
        tensors = self._share(checkpoint.read(path, checkpoint.OPTIMIZER) if path else {})
        state.load_optimizer(replica.optimizer, replica.names, tensors, standing["optimizer"])
        randoms = self._share(checkpoint.read(path, checkpoint.RANDOM) if path else {})
        if standing["workers"] == self._link.world:
            state.set_random_state(randoms[str(self._link.rank)].numpy().tobytes())
        return standing

    def wait(self) -> None:
        """Until nothing is being written here."""
        for writer in self._writers.values():
            writer.wait()

    def wait_together(self) -> None:
        """On every worker alike, until nothing is being written anywhere. What went wrong is raised on all."""
        error: Exception | None = None
        try:
            self.wait()
        except Exception as caught:
            error = caught
        told = [data.decode() for data in self._link.gather_bytes(str(error or "").encode())]
        if error is not None:
            raise error
        if any(told):
            raise CheckpointError(next(sentence for sentence in told if sentence))

    def _find(
        self, folder: Path, replica: Replica, check: Callable[[Path, Standing], None]
    ) -> tuple[Path | None, Standing | None]:
        """Where it stands, on every rank, and on rank 0 its path, with the model loaded from there.

        A refusal is raised on every rank alike, before anything is changed.
        """
        path, told = None, ""
        if self._link.rank == 0:
            try:
                found = checkpoint.newest(folder, self._pass_over)
                if found is not None:
                    path, standing = found
                    tensors = checkpoint.read(path, checkpoint.MODEL)
                    state.check_model(replica.model, tensors, str(path))
                    check(path, standing)
                    replica.model.load_state_dict(tensors)
                elif checkpoint.holds_any(folder):
                    raise CheckpointError(f"Every checkpoint in {folder} is damaged. Start anew in another folder.")
                told = json.dumps({"standing": found and found[1] | {"path": str(found[0])}})
            except CheckpointError as error:
                told = json.dumps({"refusal": str(error)})
        answer = json.loads(self._link.gather_bytes(told.encode())[0])
        if "refusal" in answer:
            raise CheckpointError(answer["refusal"])
        return path, answer["standing"]

    def _pass_over(self, path: Path, reason: str) -> None:
        self._events.emit(CheckpointPassedOver(folder=str(path), reason=reason))

    def _share(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's tensors on every rank."""
        specs = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in mine.items()]
        told = json.loads(self._link.gather_bytes(json.dumps(specs).encode())[0])
        shared: dict[str, Tensor] = {}
        for name, shape, dtype in told:
            shared[name] = mine[name] if name in mine else torch.empty(shape, dtype=getattr(torch, dtype))
            self._link.broadcast(shared[name])
        return shared


def take_snapshot(replica: Replica, standing: Standing, randoms: list[bytes]) -> checkpoint.Snapshot:
    """A copy in host memory. `randoms`: each worker's random state, or none where it does not matter."""
    tensors, skeleton = state.optimizer_state(replica.optimizer, replica.names)
    return checkpoint.Snapshot(
        standing | {"optimizer": skeleton, "workers": len(randoms)},
        {
            checkpoint.MODEL: state.model_state(replica.model),
            checkpoint.OPTIMIZER: tensors,
            checkpoint.RANDOM: {str(rank): state.bytes_tensor(data) for rank, data in enumerate(randoms)},
        },
    )
