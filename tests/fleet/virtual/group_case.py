"""Draws a run of a group from a seed: what is trained, by which policy, what the loop calls, and which faults come."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from potluck.agree.policy import Async, Auto, Cadence, Sync
from tests.fleet.virtual.group import Faults, Pace

MOST_RANKS = 4
MOST_POINTS = 600
"""About as many points as a long life has: faults at later ones never come about."""
CALLS = ("save", "evaluate", "mean", "gather", "state_dict", "broadcast", "wait_for_saves")
"""The calls that need all ranks."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """A group of ranks, from its start until it is done, stopped or killed."""

    world: int
    policy: Any
    kills: tuple[tuple[int, int], ...] = ()
    """Ranks, and at which of its points each is killed."""
    stops: tuple[tuple[int, int], ...] = ()
    """Ranks, and at which of its points each hears Ctrl-C."""
    breaks: tuple[tuple[int, int], ...] = ()
    """Ranks, and at which of its points each hears a second one, and ends."""

    @property
    def is_sync(self) -> bool:
        return isinstance(self.policy, Sync) or (isinstance(self.policy, Auto) and self.world == 1)

    @property
    def is_measured(self) -> bool:
        """Whether what is computed where depends on how long things take."""
        if not self.is_sync:
            return True
        return self.world > 1 and self.policy.balance and not self.policy.shares

    def faults(self) -> Faults:
        return Faults(kills=dict(self.kills), stops=dict(self.stops), breaks=dict(self.breaks))


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that is drawn of a run, but for delays."""

    seed: int = 0
    lives: tuple[Life, ...]
    """The first begins the run, and each later one resumes it from its newest checkpoint."""
    model: str = "plain"
    optimizer: str = "sgd"
    is_scheduled: bool = False
    data: str = "tensors"
    rows: int = 17
    batch: int = 4
    micro: int | None = None
    epochs: int = 2
    brings_rows: bool = False
    """The loop has batches of its own, and no loader."""
    wire: Any = "fp32"
    clip: float | None = None
    ema: bool = False
    bad_row: int | None = None
    calls: dict[str, int] = field(default_factory=dict)
    """Every how many steps the loop makes each call; 0: never."""
    calls_in_loop: bool = False
    """After step(), and not in a callback."""
    leaves_every: int = 0
    """Every how many steps the loop breaks out of its pass over the loader, and begins another; 0: never."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.wire == "fp32" else torch.float32

    @property
    def turns(self) -> int:
        return 2 if self.model == "gan" else 1

    @property
    def is_sync(self) -> bool:
        return all(life.is_sync for life in self.lives)

    @property
    def has_judge(self) -> bool:
        """Whether one process of plain PyTorch computes the same: replicas take each step as one, none draws random
        numbers, and no layer looks at more than one row."""
        return self.is_sync and self.model in ("plain", "branch", "gan") and self.wire == "fp32"

    @property
    def has_judge_of_windows(self) -> bool:
        """Whether one process can do the same as replicas that step by themselves: they do so from the start, at their
        usual rates, and average nothing but weights."""
        are_windows = all(not life.is_sync and life.policy.moments is False for life in self.lives)
        are_alone = are_windows and not any(life.policy.may_step_together for life in self.lives)
        return are_alone and self.model in ("plain", "branch") and self.wire == "fp32" and not self.is_scheduled

    @property
    def is_exact(self) -> bool:
        """Whether it has the same bits, too: nothing is added up in another order."""
        return self.is_sync and self.micro is None and all(life.world == 1 for life in self.lives)

    @property
    def ignores_delays(self) -> bool:
        """Whether every bit is the same, however long anything takes. When a rank is found to be gone depends on it."""
        return self.wire != "auto" and not any(life.is_measured or life.kills or life.breaks for life in self.lives)

    @property
    def undisturbed(self) -> "Case | None":
        """The same run in one life, if that must have the same bits: all that its numbers follow from is saved."""
        first = self.lives[0]
        is_same = all((life.world, life.policy) == (first.world, first.policy) for life in self.lives)
        is_exact = is_same and not first.is_measured and self.wire != "auto"
        return replace(self, lives=(replace(first, kills=(), stops=(), breaks=()),)) if is_exact else None


def draw_case(seed: int) -> Case:
    draw = random.Random(f"group {seed}")
    count = draw.choice([1, 1, 2, 2, 3])
    worlds = [draw.choice([1, 2, 2, 3, 3, 4]) for _ in range(count)]
    worlds = worlds[:1] * count if draw.random() < 0.5 else worlds
    policies = [_draw_policy(draw, worlds) for _ in worlds]
    policies = policies if draw.random() < 0.2 else policies[:1] * count
    lives = [Life(world=world, policy=policy) for world, policy in zip(worlds, policies, strict=True)]
    model = draw.choice(["plain", "plain", "plain", "branch", "norm", "drop", "gan"])
    rows, batch = draw.randint(5, 48), draw.randint(MOST_RANKS, 12)
    if model == "norm":  # BatchNorm takes no mean of one row, and so no batch may have just one
        rows, batch = 2 * (rows // 2), 2 * batch
    is_sync = all(life.is_sync for life in lives)
    brings_rows = is_sync and model != "norm" and draw.random() < 0.15
    return Case(
        seed=seed,
        lives=(*(_with_faults(life, draw) for life in lives[:-1]), lives[-1]),
        model=model,
        optimizer=draw.choice(["sgd", "adamw"]),
        is_scheduled=model != "gan" and draw.random() < 0.2,
        data=draw.choice(["tensors", "tensors", "dataset", "stream"]),
        rows=rows,
        batch=batch,
        micro=draw.choice([None, None, 1, 2, 3]) if model != "norm" and not brings_rows else None,
        epochs=draw.choice([1, 1, 2, 2, 3, 4, 8]),
        brings_rows=brings_rows,
        wire=draw.choice(["fp32"] * 8 + ["int8", "auto"]),
        clip=draw.choice([None, None, None, 0.5]),
        ema=draw.random() < 0.15,
        bad_row=draw.randrange(rows) if draw.random() < 0.1 else None,
        calls={call: draw.choice([0, 0, 1, 2, 3, 5]) for call in CALLS},
        calls_in_loop=is_sync and draw.random() < 0.3,
        leaves_every=draw.choice([1, 2, 3]) if is_sync and draw.random() < 0.1 else 0,
    )


def _with_faults(life: Life, draw: random.Random) -> Life:
    """As likely among the first points of a life as among its last; mostly one, now and then several."""
    faults: dict[str, list[tuple[int, int]]] = {"kills": [], "stops": [], "breaks": []}
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        point = int(math.exp(draw.uniform(0, math.log(MOST_POINTS))))
        faults[draw.choice(["kills", "kills", "stops", "stops", "breaks"])].append((draw.randrange(life.world), point))
    return replace(life, **{kind: tuple(dict(each).items()) for kind, each in faults.items()})


def _draw_policy(draw: random.Random, worlds: list[int]) -> Any:
    kind = draw.choice(["sync", "balance", "balance", "shares"] + 3 * ["cadence", "async"] + ["auto"])
    if kind == "shares" and len(set(worlds)) == 1:
        return Sync(shares=tuple(draw.choice([1.0, 2.0]) for _ in range(worlds[0])))
    if kind in ("sync", "balance", "shares"):
        return Sync(balance=kind == "balance")
    settings: dict[str, Any] = {"anchor": draw.choice([1, 2, 3]), "max_anchor": draw.choice([3, 5, 200])}
    settings |= {"together": draw.choice([0.0, 0.0, 0.0, 0.3, 1.0])}
    if kind == "auto":
        return Auto(**settings)
    policy: Any = {"cadence": Cadence, "async": Async}[kind]
    return policy.published(**settings) if draw.random() < 0.5 else policy(**settings)


def draw_pace(case: Case, variant: int = 0) -> Pace:
    """How long everything takes. `variant`: of the same run, other delays."""
    delays = f"delays {case.seed} {variant}"
    draw = random.Random(delays)
    row_s = tuple(0.001 * draw.choice([1.0, 1.0, 2.0, 4.0]) for _ in range(MOST_RANKS))
    return Pace(delays=delays, row_s=row_s, latency_s=draw.choice([1e-5, 1e-3, 1e-2, 0.1]))


def own_rows(case: Case, step: int, rank: int, world: int) -> list[int]:
    """The rows that a loop without a loader brings to a step: some of each rank, and not as many of all."""
    draw = random.Random(f"rows {case.seed} {step}")
    parts = [draw.randint(1, 3) for _ in range(MOST_RANKS)][:world]
    first = sum(parts[:rank])
    return [draw.randrange(case.rows) for _ in range(sum(parts))][first : first + parts[rank]]
