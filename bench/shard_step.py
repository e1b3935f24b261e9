"""The time of a step under each sharding strategy, against what PyTorch has for the same, on 2 and 4 CPU ranks.

    python -m bench shard_step [--quick]

A GPT of 20M parameters: rows of 16 tokens, so that a step is mostly communication, and of 256, so that it computes.
FullShard and HybridShard stand beside fully_shard used bare, ShardGradOp beside DDP with ZeroRedundancyOptimizer; each
pair lives in the same processes and takes turns of a step. This machine has 2 cores, so that 4 ranks share them.
"""

from dataclasses import replace
from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.step_time import timed
from bench.turns import say, take_turns

WARM_UP_STEPS = 3
PAIRS = (("FullShard", "bare FSDP2"), ("HybridShard", "bare HSDP"), ("ShardGradOp", "bare DDP + ZeRO"))
GOALS = {("FullShard", 16): 0.75}
"""Where steps are mostly communication; everywhere else at most 1."""


def measure(quick: bool) -> Result:
    comparisons = []
    for context in (16, 256):
        for world in (2, 4):
            for ours, bare in PAIRS:
                if ours == "HybridShard" and world == 2:
                    continue  # one node: that is FullShard
                rounds = 3 if quick else (20 if context == 16 else 12)
                answer = run_ranks("bench.shard_step", ours, bare, context, rounds, world=world)[0]
                comparisons.append(
                    Comparison(
                        what=f"step time, 20M model, rows of {context}, {world} CPU ranks: {ours}, against {bare}",
                        unit="ms",
                        ours=answer["ours"],
                        bare=answer["bare"],
                        target=GOALS.get((ours, context), 1.0),
                    )
                )
    return Result(comparisons)


def measure_as_rank(ours: str, bare: str, context: str, rounds: str) -> dict[str, Any]:
    import torch.distributed as dist

    from bench.contenders import GPT_20M, Ours, Task
    from bench.shards import BareFsdp, BareZero
    from potluck import FullShard, HybridShard, ShardGradOp, Sync

    model = replace(GPT_20M, context=int(context))
    task = Task(model=model, rows_per_rank=1, steps=WARM_UP_STEPS + int(rounds))
    strategies = {"FullShard": FullShard(), "HybridShard": HybridShard(intra_node_size=2), "ShardGradOp": ShardGradOp()}
    sides: dict[str, Any] = {"ours": Ours(task, strategy=strategies[ours], policy=Sync(balance=False))}
    match bare:
        case "bare HSDP":
            sides["bare"] = BareFsdp(task, dist.get_world_size() // 2, 2)
        case "bare FSDP2":
            sides["bare"] = BareFsdp(task)
        case _:
            sides["bare"] = BareZero(task)
    speaks = dist.get_rank() == 0
    name = f"shard_step: {ours}, {dist.get_world_size()} ranks, rows of {context}"
    losses = {side: [each.step() for _ in range(WARM_UP_STEPS)] for side, each in sides.items()}
    if speaks:
        say(f"{name}: losses {losses}")
    return take_turns(name, int(rounds), {side: timed(each.step, 1) for side, each in sides.items()}, "ms", show=speaks)


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
