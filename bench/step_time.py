"""The time of a step of a 20M model on two ranks, against bare DistributedDataParallel code.

Both sides live in the same two processes and take turns of a few steps.
"""

import time
from collections.abc import Callable
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import say, take_turns

WARM_UP_STEPS = 3


def measure(quick: bool) -> Result:
    rounds, steps = (3, 1) if quick else (100, 1)  # short turns: the machine drifts
    answer = run_ranks("bench.step_time", rounds, steps)[0]
    step = Comparison(
        what="step time, 20M model on 2 CPU ranks, against bare DDP",
        unit="ms",
        ours=answer["ours"],
        bare=answer["bare"],
        target=1.02,
    )
    kept = ("parameters", "distance_of_weights_after_warm_up")
    return Result([step], {key: answer[key] for key in kept} | {"steps_per_group": steps})


def measure_as_rank(rounds: str, steps: str) -> dict[str, Any]:
    import torch.distributed as dist

    from bench.contenders import GPT_20M, Bare, Ours, Task, distance, parameters_of

    task = Task(model=GPT_20M, rows_per_rank=1, steps=WARM_UP_STEPS + int(rounds) * int(steps))
    ours, bare = Ours(task), Bare(task)
    speaks = dist.get_rank() == 0
    if speaks:
        say(f"step_time: {parameters_of(bare.weights) / 1e6:.1f}M parameters, warming up")
    for side in (ours, bare):
        for _ in range(WARM_UP_STEPS):
            side.step()
    apart = distance(ours.weights, bare.weights)
    assert apart < 1e-4, f"the two sides do different work: their weights are apart by {apart:.1e}"
    sides = {"ours": timed(ours.step, int(steps)), "bare": timed(bare.step, int(steps))}
    found = take_turns("step_time", int(rounds), sides, "ms", show=speaks)
    return found | {
        "parameters": parameters_of(bare.weights),
        "distance_of_weights_after_warm_up": apart,
    }


def timed(step: Callable[[], float], steps: int) -> Callable[[], float]:
    """Milliseconds per step of one group, on the rank that took longer."""
    import torch
    import torch.distributed as dist

    def group() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        took_ms = torch.tensor(1000 * (time.perf_counter() - started) / steps)
        dist.all_reduce(took_ms, dist.ReduceOp.MAX)
        return took_ms.item()

    return group


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
