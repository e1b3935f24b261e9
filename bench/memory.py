"""The peak resident memory of a rank that trains a 20M model, against bare DistributedDataParallel code.

Each side has processes of its own; the larger of its two ranks counts. Reads Linux's /proc.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import take_turns

STEPS = 4


def measure(quick: bool) -> Result:
    sides = {side: _peak_mb(side) for side in ("ours", "bare", "default")}
    found = take_turns("memory", 1 if quick else 5, sides, "MB")
    what = "peak memory of a rank, 20M model, against bare DDP"
    views = Comparison(
        what=f"{what} with gradient_as_bucket_view", unit="MB", ours=found["ours"], bare=found["bare"], target=1.05
    )
    default = Comparison(
        what=f"{what} with its defaults", unit="MB", ours=found["ours"], bare=found["default"], target=None
    )
    return Result([views, default], {"steps": STEPS})


def _peak_mb(side: str) -> Callable[[], float]:
    return lambda: max(answer["peak_bytes"] for answer in run_ranks("bench.memory", side)) / 1e6


def measure_as_rank(side: str) -> dict[str, Any]:
    from bench.contenders import GPT_20M, Bare, Ours, Task

    task = Task(model=GPT_20M, rows_per_rank=1, steps=STEPS)
    trained = Ours(task) if side == "ours" else Bare(task, bucket_view=side == "bare")
    for _ in range(STEPS):
        trained.step()
    return {"peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Of this process since its exec. getrusage would also count what the parent held when it forked us."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
