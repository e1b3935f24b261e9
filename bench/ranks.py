"""Some ranks on this machine's CPU, one thread each, over Gloo: started, watched, and their answers read.

Knows nothing of what they compute. Started without Potluck's launcher, so that both sides start alike.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": ""}
"""Both sides must compute on one kind of device, and these figures are of CPUs: where there is a GPU, Potluck takes it
and the bare loop does not."""
ENVIRONMENT = CPU_ONLY | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def run_ranks(module: str, *arguments: object, world: int = 2, limit_s: float = float("inf")) -> list[dict[str, Any]]:
    """Runs `python -m MODULE` as each rank, and returns what each answered."""
    deadline = time.monotonic() + limit_s
    environment = os.environ | ENVIRONMENT | {"WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, "-m", module, folder, *map(str, arguments)]
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment | {"RANK": str(rank)}) for rank in range(world)
        ]
        try:
            while any(codes := [process.poll() for process in processes]) or None in codes:
                if any(codes):
                    raise SystemExit(f"A rank of {module} failed; its words are above.")
                if time.monotonic() > deadline:
                    raise SystemExit(f"The ranks of {module} took longer than {limit_s:g} s.")
                time.sleep(0.05)
            return [json.loads(_answer(folder, rank).read_text()) for rank in range(world)]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def answer_as_rank(measure: Callable[..., dict[str, Any]]) -> None:
    """What a module does when it is run as a rank: joins the other, measures, and leaves its answer."""
    import torch
    import torch.distributed as dist

    folder, *arguments = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    _answer(folder, rank).write_text(json.dumps(measure(*arguments)))
    dist.barrier()
    dist.destroy_process_group()


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"
