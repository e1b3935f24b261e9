"""ApplyPolicy: when replicas agree, and how work is shared among them. Pure."""

import math
from dataclasses import dataclass
from typing import ClassVar

from potluck.agree.elche import ElChe
from potluck.words import insist_at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Every step: gradients are averaged by samples before the optimizer steps, as if one process had the batch."""

    kind: ClassVar[str] = "sync"
    steps_together: ClassVar[bool] = True
    """Whether all workers take each step as one."""

    balance: bool = True
    """Workers of different speeds get parts of each batch in proportion, so that all finish together."""
    shares: tuple[float, ...] = ()
    """Each worker's part of every batch, in proportion, such as [3, 1], and fixed; empty: measured, or equal parts."""

    def __post_init__(self) -> None:
        if any(not (math.isfinite(share) and share > 0) for share in self.shares):
            raise ValueError(f"shares must be positive numbers, not {list(self.shares)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """An optimizer of the mean change of each window: SGD with Nesterov momentum, as in DiLoCo."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be above 0, not {self.lr}")
        insist_at_most("lr", self.lr, 1000, "0.7 is usual")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Windowed:
    """What policies have in common under which replicas step by themselves."""

    steps_together: ClassVar[bool] = False
    ends_by_clock: ClassVar[bool] = True
    """Whether a window ends at a time, whatever is done by then; else when each has done its own count of batches."""

    anchor: int = 10
    """Batches of the slowest replica between two averages; more when averaging costs more than is wanted."""
    max_anchor: int = 200
    overhead_target: float = 0.02
    """The share of the time that averaging may cost; from 0.01 to 0.50."""
    max_batch_diff: int | None = None
    """The most by which a replica's count of batches moves from one window to the next."""
    overlap: bool = False
    """A window's average is formed while the next one computes, and merged at its end."""
    outer: Outer | None = None
    """Steps along the mean change of each window, instead of taking it as it is."""

    @property
    def drift_limit(self) -> float | None:
        """How far a replica may be from the mean before rising drift halves the anchor; none: as far as it likes."""
        return None

    def __post_init__(self) -> None:
        if self.outer is not None and self.overlap:
            raise ValueError("outer steps from the last average, which overlap has not yet; switch one of them off")
        make_elche(self, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence(_Windowed):
    """Each replica steps its own optimizer; parameters are averaged once the slowest has done `anchor` batches.

    Faster ones fill the same time with more batches. A replica's batch is the run's batch over the replicas.
    """

    kind: ClassVar[str] = "cadence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Async(_Windowed):
    """As Cadence, but a window ends when each replica has done its own count of batches, and drift shortens it."""

    kind: ClassVar[str] = "async"
    ends_by_clock: ClassVar[bool] = False

    divergence_threshold: float = 0.05
    """How far a replica may be from the mean, as a part of it, before rising drift halves the anchor."""

    @property
    def drift_limit(self) -> float | None:
        return self.divergence_threshold

    def __post_init__(self) -> None:
        _Windowed.__post_init__(self)
        if not self.divergence_threshold >= 0:
            raise ValueError(f"divergence_threshold must be at least 0, not {self.divergence_threshold}")


Windowed = Cadence | Async
ApplyPolicy = Sync | Cadence | Async


def make_elche(policy: _Windowed, world: int) -> ElChe:
    return ElChe(world, policy.anchor, policy.max_anchor, policy.overhead_target, policy.max_batch_diff)
