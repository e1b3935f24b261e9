"""OptimizerShard: a contiguous range of the flattened parameters, whose owner alone holds the optimizer's state for it.

As published (tests/vectors/zero.jsonl): all ranges together are the whole, no two overlap, and each is within one of
its exact share: the first ranks own one more, as the published code has it, though its page speaks of the last rank.
What it publishes as methods without arguments, such as shard_size(), are properties here. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.agree.shares import share_out
from potluck.words import check_at_least

STATE_BYTES = 2 * 4
"""Bytes of Adam's state for one parameter: two means in float32."""


def check_weights(weights: Sequence[float]) -> None:
    if any(not (math.isfinite(weight) and weight >= 0) for weight in weights) or not sum(weights) > 0:
        raise ValueError(f"weights must be numbers of at least 0, and not all 0, not {list(weights)}")


def weights_for(weights: Sequence[float] | None, world: int) -> list[float]:
    """One for each rank; none given: all alike."""
    if weights is not None and len(weights) != world:
        raise ValueError(f"there are {len(weights)} weights, and {world} ranks")
    return list(weights or [1.0] * world)


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """The range of the flattened parameters whose optimizer state one rank holds."""

    rank: int
    world_size: int
    param_start: int
    param_end: int
    """Exclusive."""
    total_params: int

    @classmethod
    def for_rank(cls, rank: int, world_size: int, total_params: int) -> "OptimizerShard":
        """Equal shares; the first `total_params % world_size` ranks own one more. The published code does the
        same, though its page says that the last shard absorbs any remainder."""
        if world_size < 1:
            raise ValueError(f"a world needs at least one rank, not {world_size}")
        return cls.for_weights(rank, [1] * world_size, total_params)

    @classmethod
    def for_weights(cls, rank: int, weights: Sequence[float], total_params: int) -> "OptimizerShard":
        """Shares in proportion to the weights, such as each device's free memory."""
        if not weights:
            raise ValueError("a world needs at least one rank, not 0")
        check_weights(weights)
        if not 0 <= rank < len(weights):
            raise ValueError(f"there is no rank {rank} in a world of {len(weights)}")
        check_at_least(0, total_params=total_params)
        sizes = share_out(total_params, weights)
        start = sum(sizes[:rank])
        return cls(rank, len(weights), start, start + sizes[rank], total_params)

    @property
    def shard_size(self) -> int:
        return self.param_end - self.param_start

    def owns_param(self, index: int) -> bool:
        return self.param_start <= index < self.param_end

    @property
    def memory_savings(self) -> float:
        """The part of full replication's memory that a rank does not need, on the mean of all ranks: 1 - 1 / world."""
        return 1 - 1 / self.world_size

    @property
    def shard_memory_bytes(self) -> int:
        return STATE_BYTES * self.shard_size

    @property
    def full_memory_bytes(self) -> int:
        return STATE_BYTES * self.total_params
