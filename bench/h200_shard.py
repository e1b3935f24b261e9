"""FullShard of a 0.9B model on one GPU, against fully_shard used bare; and two parts of one GPU, on which only a
sharded model fits.

    python -m bench h200_shard [--quick]

Step times are taken in turns in one process, in bf16, eager and with compiled blocks. Whichever side is built first is
slower by 1 %, whoever it is: so there are two processes, and each side is the first in one of them. That is where its
peak of memory is read, before the other is built. Then two ranks on MPS parts of the GPU, over Gloo since NCCL refuses
two ranks on one GPU, each limited to some of its memory: NoShard has to run out of it, and FullShard has to train, to
the losses of one rank without a limit.
Needs CUDA and torch alone. With --quick and no GPU it runs a tiny model on the CPU, to see that it works.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.ranks import ROOT
from bench.report import Comparison, Result
from bench.turns import say, take_turns
from potluck.train.model import ModelConfig

SIDES = ("ours", "bare")
WARM_UP_STEPS = 4
LIMIT_S = 200.0
PARTS = (50, 40)
GPT_370M = ModelConfig(vocab=32768, dim=1024, layers=24, heads=16, context=256)
FRACTION = 0.03
"""Of the GPU's memory, for each of two ranks: 4.2 GiB, where 16 bytes for each of 370M parameters are 5.5 GiB."""
STEPS_OF_TWO = 4


def measure(quick: bool) -> Result | None:
    import torch

    if not (torch.cuda.is_available() or quick):
        say("h200_shard needs a CUDA GPU, and torch sees none here: skipped.")
        return None
    comparisons, details = [], {}
    for how in ("eager", "compiled"):
        one, other = (_run(first, how, quick) for first in SIDES)
        comparisons.append(
            Comparison(
                what=f"step time, {one['name']}, {how}: FullShard, against bare FSDP2",
                unit="ms",
                ours=one["ours"] + other["ours"],
                bare=one["bare"] + other["bare"],
                target=1.0,
            )
        )
        comparisons.append(
            Comparison(
                what=f"peak memory, {one['name']}, {how}: FullShard, against bare FSDP2",
                unit="GiB",
                ours=[one["peak_gib"]],
                bare=[other["peak_gib"]],
                target=1.001,  # no higher, but for a few numbers that we keep of each step
            )
        )
        _keep(comparisons)
    if torch.cuda.is_available():
        details["two parts of one GPU"] = _two_parts()
        say(f"h200_shard: two parts: {details}")
    return Result(comparisons, details)


def _keep(comparisons: list[Comparison]) -> None:
    if folder := os.environ.get("OUT"):
        lines = [f"{each.what}: {each.measured_text}" for each in comparisons]
        Path(folder, "h200_shard.txt").write_text("\n".join(lines) + "\n")


def _run(first: str, how: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.h200_shard", first, how, "quick" if quick else "full"]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def as_process(first: str, how: str, quick: bool) -> dict[str, Any]:
    """`first`: the side that is built first, and whose peak of memory is told."""
    import torch
    import torch.distributed as dist

    from bench.contenders import Ours, Task
    from bench.h200 import GPT_900M, GPT_TINY, _device_name, _wait_for_device
    from bench.shards import BareFsdp
    from bench.step_time import timed
    from potluck import FullShard

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rounds = 2 if quick else 8
    task = Task(
        model=GPT_900M if has_gpu else GPT_TINY,
        rows_per_rank=8 if has_gpu else 2,
        steps=WARM_UP_STEPS + rounds,
        device=torch.device("cuda", 0) if has_gpu else torch.device("cpu"),
        fast=True,
        eager=how == "eager",
    )
    make: dict[str, Any] = {"ours": lambda: Ours(task, strategy=FullShard()), "bare": lambda: BareFsdp(task)}
    sides: dict[str, Any] = {}
    peak = 0
    for name in sorted(SIDES, key=lambda name: name != first):
        sides[name] = make[name]()
        for _ in range(WARM_UP_STEPS):
            sides[name].step()
        _wait_for_device()
        if name == first:
            peak = torch.cuda.max_memory_allocated() if has_gpu else 1 << 30
    found = take_turns(f"h200_shard: {how}", rounds, {k: timed(v.step, 1) for k, v in sides.items()}, "ms")
    million = sum(p.numel() for p in sides["ours"].weights.parameters()) / 1e6
    return {**found, "peak_gib": peak / (1 << 30), "name": f"{million:.3g}M model on {_device_name()}"}


# Two parts


def _two_parts() -> dict[str, Any]:
    from bench.testbed import Machine
    from bench.uneven import Uneven

    found: dict[str, Any] = {}
    for name, world in (("NoShard", 2), ("FullShard", 2), ("one rank without a limit", 1)):
        with Uneven([Machine(gpu=part) for part in PARTS[:world]]) as fleet:
            answers = fleet.run("bench.h200_shard:train_part", limit_s=LIMIT_S, strategy=name)
            found[name] = answers[0]
            say(f"h200_shard: {name} on {world} parts: {answers}")
    return found


def train_part(seat: Any, *, strategy: str) -> dict[str, Any]:
    """One rank: the losses of some steps, or that it ran out of memory."""
    import torch

    import potluck
    from bench.contenders import Task
    from potluck import FullShard, NoShard, StepConfig, Sync
    from potluck.train.model import GPT, next_token_loss

    is_limited = strategy != "one rank without a limit"
    if is_limited:
        torch.cuda.set_per_process_memory_fraction(FRACTION)
    task = Task(model=GPT_370M, rows_per_rank=2 // seat.world, steps=STEPS_OF_TWO)
    fleet = potluck.init(
        Sync(balance=False),
        FullShard() if strategy == "FullShard" else NoShard(),
        step=StepConfig(clip=1.0, checkpoint_activations=True),
    )
    torch.manual_seed(1)
    model = GPT(task.model)
    try:
        model, _, loader = fleet.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True), task.tokens(seat.world), batch_size=2
        )
        losses = []
        for batch in loader:
            loss, samples = next_token_loss(model, batch)
            fleet.backward(loss, samples=samples)
            losses.append(fleet.step().loss)
    except torch.cuda.OutOfMemoryError as error:
        return {"ran_out": str(error).splitlines()[0][:200]}
    return {"losses": losses, "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30)}


if __name__ == "__main__":
    first, how, size = sys.argv[1:]
    print(json.dumps(as_process(first, how, size == "quick")))
