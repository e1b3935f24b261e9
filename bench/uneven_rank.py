"""A machine's side of `uneven.py`: a process that has torch loaded, and forks a rank for each order that it reads.

Where there is a GPU it starts a new process instead: one that has touched CUDA must not be forked.
"""

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOADED = ("torch._dynamo", "torch.nn.parallel", "potluck.train.recipe", "potluck.engine.group_table", "bench.mixed")
PATIENCE_S = 100.0


@dataclass
class Seat:
    """A rank's place in its group; the group is joined already."""

    rank: int
    world: int
    folder: Path
    pace: Path | None
    """Where its share of a core stands, if it has to pause by itself."""
    _computed_s: float = field(default_factory=time.thread_time)

    def tell(self, word: str) -> None:
        """Whoever started the ranks acts upon it."""
        if self.rank == 0:
            (self.folder / word).touch()

    def is_done(self, word: str) -> bool:
        """Whether that was acted upon."""
        return (self.folder / f"{word}-done").exists()

    def pause(self) -> None:
        """After what was computed: as long as a machine with that share of a core would have taken for the rest."""
        if self.pace is None:
            return
        share = float(self.pace.read_text())
        time.sleep((time.thread_time() - self._computed_s) * max(0.0, 1 / share - 1))
        self._computed_s = time.thread_time()


def main() -> None:
    match sys.argv[1:]:
        case ["order", line]:
            _be(json.loads(line))
        case [] | ["fresh"] as how:
            answers = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)  # what a rank prints must not look like an answer
            for name in () if how else PRELOADED:
                importlib.import_module(name)
            print(0, file=answers, flush=True)
            for line in sys.stdin:
                code = _start(line) if how else _fork(line)
                print(min(9, abs(code)), file=answers, flush=True)


def _fork(line: str) -> int:
    pid = os.fork()
    if pid == 0:
        _be(json.loads(line))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _start(line: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "bench.uneven_rank", "order", line], stdin=subprocess.DEVNULL
    ).returncode


def _be(order: dict[str, Any]) -> None:
    """Never returns: what the process would do at its end is its parent's."""
    import torch
    import torch.distributed as dist

    code = 1
    try:
        torch.set_num_threads(1)
        folder, rank, world = Path(order["folder"]), order["rank"], order["world"]
        meet = f"file://{folder}/rendezvous"
        patience = timedelta(seconds=PATIENCE_S)
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=patience)
        module, function = order["function"].split(":")
        seat = Seat(rank, world, folder, Path(order["pace"]) if order["pace"] else None)
        answer = getattr(importlib.import_module(module), function)(seat, **order["arguments"])
        (folder / f"answer-{rank}").write_text(json.dumps(answer))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
