"""Bytes of parameters, gradients and optimizer state on each rank, beside what theory says.

    python -m bench shard_memory [--quick]

In fp32 with AdamW, bytes a parameter on N ranks: NoShard 16, ZeRO-1 8 + 8/N, ShardGradOp 4 + 12/N, FullShard 16/N. What
is measured is the memory under the tensors that a rank holds when its gradients are there and before it steps, once the
optimizer has its state; the rank that holds most counts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.ranks import answer_as_rank, run_ranks
from bench.report import Comparison, Result
from bench.turns import say

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from potluck.sharding.sharded import Sharded

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
    side.fleet.backward(loss, samples=samples)
    replica = side.fleet.run.replica
    assert replica is not None
    replica.unseal()
    replica.finish()
    if replica.sharded is not None:
        return {"held": held_bytes(replica.sharded), "numbers": numbers}
    parameters = list(side.weights.parameters())
    gradients = [each.grad for each in parameters if each.grad is not None]
    return {"held": bytes_under(parameters, gradients, replica.optimizer), "numbers": numbers}


def held_bytes(sharded: "Sharded") -> dict[str, int]:
    """Count the bytes that this rank holds of a split model between backward and step."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():  # a split parameter refuses to say where it lies
        trained = [each.data for each in sharded.model.parameters() if each.requires_grad]
    local = [getattr(each, "_local_tensor", each) for each in trained]
    runs = [run.parameter for run in (*sharded.runs, *sharded.rest)]
    return bytes_under([*local, *runs], sharded.gradients(), sharded.optimizer)


def bytes_under(
    parameters: "Sequence[Tensor]", gradients: "Sequence[Tensor]", optimizer: "Optimizer"
) -> dict[str, int]:
    """Count the bytes of memory under these tensors and the optimizer's state, each storage once."""
    state = [value for each in optimizer.state.values() for value in each.values() if getattr(value, "ndim", 0)]
    sizes = {}
    for kind, tensors in (("parameters", parameters), ("gradients", gradients), ("state", state)):
        storages = [tensor.untyped_storage() for tensor in tensors]
        sizes[kind] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return sizes


if __name__ == "__main__":
    answer_as_rank(measure_as_rank)
