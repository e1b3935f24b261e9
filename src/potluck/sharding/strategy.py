"""ShardingStrategy: what of a replica is split over its ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from potluck.config import removed
from potluck.sharding.optimizer_shard import check_weights
from potluck.words import check_at_least

Weights = tuple[float, ...] | Literal["memory"]
"""One number per rank, in proportion to its part; or "memory": each device's free memory at that time. Empty: equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoShard:
    """Nothing is split: each rank holds a whole replica, and gradients are averaged between them. DDP."""

    kind: ClassVar[str] = "no_shard"
    keeps_parameters_whole: ClassVar[bool] = True
    """Whether each rank has every parameter all the time."""

    def bytes_per_parameter(self, world: int) -> float:
        """Estimate the bytes that a rank holds for each parameter in fp32 with Adam's two means, where all have equal
        parts."""
        return 16.0


_without_buddies = removed(
    buddy="strategy.buddy was removed: its copies lay on the one machine whose loss they were for. Leave it out, and"
    " save more often (checkpoint.every, fleet.save()); or start a host, whose workers may be lost.",
    buddy_every="",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """The options that FullShard and ShardGradOp share: all ranks together are one replica."""

    weights: Weights = ()
    """Each rank's part, in proportion: one number per rank, or "memory" for each device's free memory. Empty: equal."""

    def __post_init__(self) -> None:
        if self.weights and self.weights != "memory":
            check_weights(self.weights)

    def weights_over(self, free_bytes: Callable[[], list[float]]) -> list[float] | None:
        """Each rank's part, in proportion; none: equal. `free_bytes`: of each rank's device. A collective."""
        return free_bytes() if self.weights == "memory" else list(self.weights) or None


@_without_buddies
@dataclass(frozen=True, kw_only=True, slots=True)
class FullShard(_Split):
    """Parameters, gradients and optimizer state are split; a block is whole only while it computes. ZeRO-3."""

    kind: ClassVar[str] = "full_shard"
    keeps_parameters_whole: ClassVar[bool] = False

    def bytes_per_parameter(self, world: int) -> float:
        return 16 / world


@_without_buddies
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGradOp(_Split):
    """Gradients and optimizer state are split, parameters are whole on every rank. ZeRO-2.

    After a step the updated parameters are still on their way to the other ranks. A forward waits for them, and so does
    state_dict(): read parameters through it between steps.
    """

    kind: ClassVar[str] = "shard_grad_op"
    keeps_parameters_whole: ClassVar[bool] = True

    keep_gradients: bool = False
    """Split only the optimizer's state: gradients travel once per step instead of once per micro-batch. ZeRO-1."""

    def bytes_per_parameter(self, world: int) -> float:
        return 8 + 8 / world if self.keep_gradients else 4 + 12 / world


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridShard:
    """Nodes of `intra_node_size` ranks: each holds a whole replica, split within it as by FullShard."""

    kind: ClassVar[str] = "hybrid_shard"
    keeps_parameters_whole: ClassVar[bool] = False

    intra_node_size: int = 8
    """Ranks per node; the number of ranks must be a multiple of it."""

    def __post_init__(self) -> None:
        check_at_least(1, intra_node_size=self.intra_node_size)

    def bytes_per_parameter(self, world: int) -> float:
        return 16 / min(world, self.intra_node_size)

    def nodes(self, world: int) -> int:
        """How many nodes, and so replicas, `world` ranks make; ValueError if they do not come out even."""
        if world % self.intra_node_size:
            raise ValueError(
                f"a world of {world} ranks is no multiple of intra_node_size, which is {self.intra_node_size}"
            )
        return world // self.intra_node_size


ShardingStrategy = FullShard | ShardGradOp | NoShard | HybridShard
