"""ApplyPolicy: when replicas agree, and how work is shared among them. Pure."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from potluck.agree.elche import ElChe
from potluck.config import removed
from potluck.words import check_at_least

PUBLISHED_TARGET, MOST_BATCHES = 0.10, 200
"""The published values."""
OVERHEAD_TARGET = 0.02
"""Where a window's length follows from what it teaches: agreeing may cost no more than this before that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """Workers agree in every step: gradients are averaged by samples, as if one process had the whole batch."""

    kind: ClassVar[str] = "sync"
    steps_together: ClassVar[bool] = True
    """Whether all workers take each step as one."""

    balance: bool = True
    """Each worker gets a part of the batch in proportion to its measured speed, so that all finish together."""
    shares: tuple[float, ...] = ()
    """Fixed parts of every batch, in proportion, one number per worker, such as (3, 1). Empty: measured, or equal."""

    def __post_init__(self) -> None:
        if any(not (math.isfinite(share) and share > 0) for share in self.shares):
            raise ValueError(f"shares must be positive numbers, not {list(self.shares)}")


OVERLAP = (
    "policy.overlap was removed: it learned less, and was no faster. Leave it out; where agreeing takes long, use"
    " longer windows (policy.anchor, policy.max_anchor), or fewer bits (wire)."
)
OUTER = (
    "policy.outer was removed: taking each window's mean change as it is learned more at nearly every length. Leave it"
    " out; where replicas learn less than under Sync, use shorter windows (policy.max_anchor)."
)
_removed = removed(overlap=OVERLAP, outer=OUTER)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Windowed:
    """The settings that Cadence and Async share: replicas step by themselves."""

    steps_together: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    """Whether all step together wherever that is the shorter way to a loss."""
    figures: ClassVar[tuple[str, ...]] = ("divergence",)
    """Figures that its planner asks of each replica's window beside times and counts, by their names in
    engine/figures.py."""
    ends_by_clock: ClassVar[bool] = True
    """Whether a window ends at a time, whatever is done by then; else when each has done its own count of batches."""

    anchor: int = 10
    """Batches of the slowest replica between two averages, until it is measured what averaging costs."""
    max_anchor: int | None = None
    """The most that `anchor` may grow to; None: as long as replicas learn nearly like Sync."""
    overhead_target: float | None = None
    """The published rule: the share of the time that averaging may cost, from 0.01 to 0.50, whatever that does to
    learning. None: a window is as long as makes the way to a loss the shortest."""
    max_batch_diff: int | None = None
    """The most by which a replica's number of batches changes from one window to the next; None: no limit."""
    together: float = 0.15
    """The share of the run, from its start, in which all agree in every step as under Sync: most is learned there."""
    moments: bool | None = None
    """Average what the optimizer keeps of each parameter, too; replicas then step farther, as noise makes their steps
    shorter. None: yes."""

    @classmethod
    def published(cls, **settings: Any) -> Self:
        """Make the policy as it was published: windows as long as averaging is dear, and nothing but parameters is
        averaged."""
        length = {"max_anchor": MOST_BATCHES, "overhead_target": PUBLISHED_TARGET}
        return cls(**length | {"together": 0.0, "moments": False} | settings)

    @property
    def weighs_learning(self) -> bool:
        """Whether a window's length follows from what it teaches for its time."""
        return self.overhead_target is None

    @property
    def averages_moments(self) -> bool:
        return self.moments is not False

    @property
    def drift_limit(self) -> float | None:
        """How far a replica may be from the mean before rising drift halves the anchor; none: as far as it likes."""
        return None

    @property
    def may_step_together(self) -> bool:
        """Whether all may agree in some steps as under Sync: in a first share of the run, or while that is best."""
        return self.together > 0 or self.chooses

    def __post_init__(self) -> None:
        if not 0 <= self.together <= 1:
            raise ValueError(f"together is a share of the run, from 0 to 1, not {self.together}")
        make_elche(self, 1)


@_removed
@dataclass(frozen=True, kw_only=True, slots=True)
class Cadence(_Windowed):
    """Each replica steps its own optimizer; parameters are averaged once the slowest has done `anchor` batches.

    Faster replicas do more batches in the same time. A replica's batch is the run's batch size divided by the number
    of replicas.
    """

    kind: ClassVar[str] = "cadence"


@_removed
@dataclass(frozen=True, kw_only=True, slots=True)
class Async(_Windowed):
    """Like Cadence, but a window ends when each replica has done its own number of batches, and drift shortens it."""

    kind: ClassVar[str] = "async"
    ends_by_clock: ClassVar[bool] = False

    divergence_threshold: float = 0.05
    """How far a replica may be from the mean, as a fraction of it, before rising drift halves the anchor."""

    @property
    def drift_limit(self) -> float | None:
        return self.divergence_threshold

    def __post_init__(self) -> None:
        _Windowed.__post_init__(self)
        check_at_least(0, divergence_threshold=self.divergence_threshold)


@_removed
@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(_Windowed):
    """Sync as long as that is the shortest way to a loss, else Cadence in windows that lose the least; it says why.

    It begins as Sync, measures what computing and agreeing take, and changes when another way is clearly shorter.
    """

    kind: ClassVar[str] = "auto"
    chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _Windowed.__post_init__(self)
        if not self.averages_moments:
            raise ValueError("replicas that step together again need the same moments, so Auto averages them")
        if not self.weighs_learning:
            raise ValueError("overhead_target is the published rule, which knows no other way; Auto weighs both ways")


Windowed = Cadence | Async | Auto
ApplyPolicy = Sync | Cadence | Async | Auto
Policy = ApplyPolicy | Literal["sync", "cadence", "async", "auto"]
POLICIES: dict[str, type[ApplyPolicy]] = {kind.kind: kind for kind in (Sync, Cadence, Async, Auto)}
"""By their names, on the command line and in what workers tell a host."""


def policy_of(wanted: Policy | None, *, has_host: bool) -> ApplyPolicy:
    """By its name, too. Under a host, whose workers and links may be slow, Auto where none is asked for; else Sync."""
    if wanted is None:
        return Auto() if has_host else Sync()
    if not isinstance(wanted, str):
        return wanted
    if wanted not in POLICIES:
        raise ValueError(f"policy is one of {', '.join(POLICIES)}, not {wanted!r}")
    return POLICIES[wanted]()


def make_elche(policy: _Windowed, world: int) -> ElChe:
    target = policy.overhead_target if policy.overhead_target is not None else OVERHEAD_TARGET
    most = policy.max_anchor if policy.max_anchor is not None else max(MOST_BATCHES, policy.anchor)
    return ElChe(world, policy.anchor, most, target, policy.max_batch_diff)
