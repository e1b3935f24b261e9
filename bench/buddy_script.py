"""One rank of bench/buddy.py: trains without end, and writes down each step and each refresh. Rank 0 tells."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import potluck
from bench.contenders import GPT_20M, Ours, Task
from potluck.events import Event, StepDone
from potluck.save.buddies import Buddies


def main(told: Path, every: int) -> None:
    torch.set_num_threads(1)
    strategy = potluck.FullShard(buddy=True, buddy_every=every)
    _time_refreshes(told)
    _tell(told, f"rank {os.environ['RANK']}", pid=os.getpid())
    task = Task(model=GPT_20M, rows_per_rank=2 // int(os.environ["WORLD_SIZE"]), steps=2000)
    side = Ours(task, strategy=strategy, policy=potluck.Sync(balance=False))

    def hear(event: Event) -> None:
        if isinstance(event, StepDone):
            _tell(told, "step", step=event.step, seconds=event.seconds, workers=len(event.workers))

    if side.engine.rank == 0:
        side.engine.events.listeners.append(hear)
    while True:
        side.step()


def _time_refreshes(told: Path) -> None:
    refresh = Buddies.refresh

    def timed(self: Buddies, *arguments: Any) -> None:
        started = time.perf_counter()
        refresh(self, *arguments)
        if self._link.rank == 0:
            files = [file.stat().st_size for file in self._home.rglob("own-*/*")]
            _tell(told, "refresh", seconds=time.perf_counter() - started, bytes=sum(files))

    Buddies.refresh = timed  # type: ignore[method-assign]


def _tell(told: Path, what: str, **figures: Any) -> None:
    with told.open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time()} | figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
