"""Bytes of parameters, gradients and optimizer state on each rank, beside what theory says.

    python -m bench shard_memory [--quick]

In fp32 with AdamW, bytes a parameter on N ranks: NoShard 16, ZeRO-1 8 + 8/N, ShardGradOp 4 + 12/N, FullShard 16/N. What
is measured is the memory under the tensors that a rank holds when its gradients are there and before it steps, once the
optimizer has its state; the rank that holds most counts.
"""

from typing import Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import say

THEORY = {
    "NoShard": lambda world: 16,
    "ZeRO-1": lambda world: 8 + 8 / world,
    "ShardGradOp": lambda world: 4 + 12 / world,
    "FullShard": lambda world: 16 / world,
}


def measure(quick: bool) -> Result:
    comparisons = []
    for world in (1, 2) if quick else (1, 2, 4):
        for name, theory in THEORY.items():
            answers = run_ranks("bench.shard_memory", name, world=world)
            each = max(sum(answer["held"].values()) / answer["numbers"] for answer in answers)
            say(f"shard_memory: {name} on {world}: {each:.2f} bytes a parameter, in theory {theory(world):.2f}")
            comparisons.append(
                Comparison(
                    what=f"bytes a parameter on a rank of {world}: {name}, against theory",
                    unit="bytes",
                    ours=[each],
                    bare=[theory(world)],
                    target=1.05,
                )
            )
    return Result(comparisons)


def measure_as_rank(name: str) -> dict[str, Any]:
    from bench.contenders import GPT_20M, Ours, Task
    from potluck import FullShard, NoShard, ShardGradOp, Sync
    from potluck.train.model import next_token_loss

    strategies = {
        "NoShard": NoShard(),
        "ZeRO-1": ShardGradOp(keep_gradients=True),
        "ShardGradOp": ShardGradOp(),
        "FullShard": FullShard(),
    }
    side = Ours(Task(model=GPT_20M, rows_per_rank=1, steps=3), strategy=strategies[name], policy=Sync(balance=False))
    numbers = sum(parameter.numel() for parameter in side.weights.parameters())
    side.step()
    loss, samples = next_token_loss(side.model, next(side.batches))
    side.engine.backward(loss, samples=samples)
    replica = side.engine.run.replica
    assert replica is not None
    replica.finish()
    return {"held": replica.memory_bytes(), "numbers": numbers}


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
