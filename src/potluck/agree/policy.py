"""ApplyPolicy: when replicas agree, and how a step's batch is shared among them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Every step: gradients are averaged by samples before the optimizer steps, as if one process had the batch."""

    kind: ClassVar[str] = "sync"

    shares: tuple[float, ...] = ()
    """Each worker's part of every batch, in proportion, such as [3, 1]; empty: equal parts."""

    def __post_init__(self) -> None:
        if any(not (math.isfinite(share) and share > 0) for share in self.shares):
            raise ValueError(f"shares must be positive numbers, not {list(self.shares)}")


ApplyPolicy = Sync


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Parts of `total` in proportion to the weights: each within 1 of its exact part, ties to the first.

    Weights that are all zero count as equal.
    """
    if sum(weights) <= 0:
        weights = [1.0] * len(weights)
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_fraction = sorted(range(len(parts)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in by_fraction[: total - sum(parts)]:
        parts[rank] += 1
    return parts
