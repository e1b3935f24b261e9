"""The time of a step of a 20M model on two workers that a server leads, against bare DistributedDataParallel code.

Both sides live in the same two processes and take turns; the server is a third.
"""

import os
import tempfile
import time
from statistics import median
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.stars import Actor, Host, on_stage
from bench.step_time import WARM_UP_STEPS, timed
from bench.turns import say, take_turns

WORLD = 2


def measure(quick: bool) -> Result:
    rounds = 10 if quick else 60
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, on_stage() as actors:
        host = Actor(Host, folder, WORLD)
        actors.append(host)
        answer = run_ranks("bench.elastic_step", rounds, host.call("listening")[0])[0]
    step = Comparison(
        what="step time, 20M model on 2 CPU workers that a server leads, against bare DDP",
        unit="ms",
        ours=answer.pop("ours"),
        bare=answer.pop("bare"),
        target=1.1,
    )
    return Result([step], answer)


def measure_as_rank(rounds: str, invite: str) -> dict[str, Any]:
    import torch.distributed as dist

    from bench.contenders import GPT_20M, Bare, Led, Task, distance, parameters_of
    from potluck.environment import QUIET
    from potluck.fleet.invite import INVITE
    from potluck.replica.weight_hash import digest

    os.environ |= {INVITE: invite, QUIET: "1", "POTLUCK_NAME": f"rank {dist.get_rank()}"}
    task = Task(model=GPT_20M, rows_per_rank=1, steps=WARM_UP_STEPS + int(rounds))
    bare, ours = Bare(task), Led(task)
    speaks = dist.get_rank() == 0
    for side in (ours, bare):
        for _ in range(WARM_UP_STEPS):
            side.step()
    apart = distance(ours.weights, bare.weights)
    assert apart < 1e-4, f"the two sides do different work: their weights are apart by {apart:.1e}"
    sides = {"ours": timed(ours.step, 1), "bare": timed(bare.step, 1)}
    found: dict[str, Any] = take_turns("elastic_step", int(rounds), sides, "ms", show=speaks)
    started = time.perf_counter()
    for _ in range(10):
        digest(list(ours.weights.parameters()))
    digest_ms = 1000 * (time.perf_counter() - started) / 10
    if speaks:
        say(f"elastic_step: {parameters_of(bare.weights) / 1e6:.1f}M parameters, apart by {apart:.1e}")
    return found | {
        "parameters": parameters_of(bare.weights),
        "distance_of_weights_after_warm_up": apart,
        "after_backward_ms": 1000 * median(ours.step_s[WARM_UP_STEPS:]),
        "digest_ms": digest_ms,
    }


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
