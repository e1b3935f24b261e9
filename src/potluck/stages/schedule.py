"""Schedules as data: which forward or backward comes next on each worker. Print it, validate it, draw it, run it.

    gpipe        all forwards, then all backwards
    1f1b         one forward, one backward, in turn: fewer activations are kept
    interleaved  1f1b where each worker has two stages, further apart: less waiting, more sending
    zero-bubble  1f1b whose backward is cut in two: gradients of inputs first, those of weights when there is time

The last two are torch.distributed.pipelining's own. Knows nothing of tensors, and of no way to send them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Literal

from potluck.stages.protocol import Schedule

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; backward of the stage's inputs alone; backward of its weights alone."""


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Order = tuple[Action, ...]
"""The actions of one worker, in order."""


def per_worker(schedule: Schedule) -> int:
    """How many stages each worker has."""
    return 2 if schedule == "interleaved" else 1


@cache
def plan_orders(schedule: Schedule, workers: int, micros: int) -> tuple[Order, ...]:
    """List what each worker does, in order. Any number of micro-batches of at least 1."""
    if workers < 1 or micros < 1:
        raise ValueError(f"a schedule needs at least one worker and one micro-batch, not {workers} and {micros}")
    match schedule:
        case "gpipe":
            orders = tuple(_gpipe(stage, micros) for stage in range(workers))
        case "1f1b":
            orders = tuple(_one_f_one_b(stage, workers, micros) for stage in range(workers))
        case _ if workers == 1:  # nothing to overlap with
            orders = (tuple(_in_turn(per_worker(schedule), micros)),)
        case _:
            orders = _torchs(schedule, workers, micros)
    validate(orders, workers * per_worker(schedule), micros)
    return orders


def forward_only(schedule: Schedule, workers: int, micros: int) -> tuple[Order, ...]:
    """Plan forwards without any backward: to evaluate, not to train."""
    return tuple(tuple(a for a in order if a.kind == "F") for order in plan_orders(schedule, workers, micros))


def _gpipe(stage: int, micros: int) -> Order:
    return tuple(Action(kind, stage, micro) for kind in ("F", "B") for micro in range(micros))


def _one_f_one_b(stage: int, stages: int, micros: int) -> Order:
    """Plan one forward, one backward for a stage: stage 1 of 3 with 4 micro-batches does F0 F1 F2 B0 F3 B1 B2 B3.

    Each stage is two forwards ahead of the next and not one: then what it needs is on its way while it computes
    something else, and a neighbour that is late for once keeps nobody waiting.
    """
    ahead = min(in_flight(stage, stages) - 1, micros)
    order = [Action("F", stage, micro) for micro in range(ahead)]
    for micro in range(micros - ahead):
        order += [Action("F", stage, ahead + micro), Action("B", stage, micro)]
    return tuple(order + [Action("B", stage, micro) for micro in range(micros - ahead, micros)])


def in_flight(stage: int, stages: int) -> int:
    """Count the micro-batches of which a stage keeps activations at once under 1f1b."""
    return 2 * (stages - stage) - 1


def _in_turn(stages: int, micros: int) -> Iterator[Action]:
    for micro in range(micros):
        yield from (Action("F", stage, micro) for stage in range(stages))
        yield from (Action("B", stage, micro) for stage in reversed(range(stages)))


def _torchs(schedule: Schedule, workers: int, micros: int) -> tuple[Order, ...]:
    """Let torch.distributed.pipelining plan, and leave out the micro-batches that it needs and that there are not."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    kind = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleInterleavedZeroBubble
    stages = workers * per_worker(schedule)
    # It plans for equal rounds; a micro-batch that is left out everywhere leaves the others' order as it is.
    planned = micros if micros < workers else -(-micros // workers) * workers
    places = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=stages,
            group_size=workers,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            has_backward=True,
            submod=None,
        )
        for stage in range(0, stages, workers)
    ]
    made = kind(places, planned)  # type: ignore[arg-type]
    return tuple(tuple(_read(made.pipeline_order[worker], micros)) for worker in range(workers))


def _read(steps: Sequence[object], micros: int) -> Iterator[Action]:
    """torch's actions as they print in every version: 1F0 is the forward of stage 1 and micro-batch 0."""
    for step in steps:
        found = re.fullmatch(r"(\d+)([FBIW])(\d+)", str(step))
        if found is not None and int(found[3]) < micros:
            yield Action(found[2], int(found[1]), int(found[3]))  # type: ignore[arg-type]


def needs(action: Action, stages: int, *, is_split: bool) -> Iterator[Action]:
    """List the actions that must be done before this one. `is_split`: backwards are cut in two."""
    backward: Kind = "I" if is_split else "B"
    match action.kind:
        case "F":
            if action.stage > 0:
                yield Action("F", action.stage - 1, action.micro)
        case "B" | "I":
            yield Action("F", action.stage, action.micro)
            if action.stage < stages - 1:
                yield Action(backward, action.stage + 1, action.micro)
        case "W":
            yield Action("I", action.stage, action.micro)


def validate(orders: Sequence[Order], stages: int, micros: int) -> None:
    """Every stage sees every micro-batch forward and backward once, and nobody waits forever."""
    wanted: dict[tuple[int, int], list[str]] = {(s, m): [] for s in range(stages) for m in range(micros)}
    for order in orders:
        for action in order:
            if (action.stage, action.micro) not in wanted:
                raise ValueError(f"{action} is of no stage or micro-batch: {stages} stages, {micros} micro-batches")
            wanted[action.stage, action.micro].append(action.kind)
    for (stage, micro), kinds in wanted.items():
        if sorted(kinds) not in (["B", "F"], ["F", "I", "W"]):
            raise ValueError(f"stage {stage} does {' '.join(kinds) or 'nothing'} with micro-batch {micro}")
    simulate(orders, stages, {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})


@dataclass(frozen=True, slots=True)
class Timed:
    action: Action
    start: float
    end: float


def simulate(orders: Sequence[Order], stages: int, costs: Mapping[str, float]) -> tuple[tuple[Timed, ...], ...]:
    """When each worker does what, if an action takes its kind's cost and a message no time. ValueError if it hangs."""
    done: dict[Action, float] = {}
    at = [0] * len(orders)
    clock = [0.0] * len(orders)
    timelines: list[list[Timed]] = [[] for _ in orders]
    is_split = any(action.kind == "I" for order in orders for action in order)
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(orders):
            while at[worker] < len(order):
                action = order[at[worker]]
                before = list(needs(action, stages, is_split=is_split))
                if any(each not in done for each in before):
                    break
                start = max([clock[worker], *(done[each] for each in before)])
                done[action] = clock[worker] = start + costs[action.kind]
                timelines[worker].append(Timed(action, start, clock[worker]))
                at[worker] += 1
                moved = True
    stuck = [str(order[at[w]]) for w, order in enumerate(orders) if at[w] < len(order)]
    if stuck:
        raise ValueError(f"the schedule never gets to {', '.join(stuck)}: each waits for another")
    return tuple(map(tuple, timelines))


def expected_idle_share(workers: int, micros: int) -> float:
    """Return the idle share of gpipe and 1f1b with equal stages: (p - 1) / (m + p - 1)."""
    return (workers - 1) / (micros + workers - 1)


def draw(orders: Sequence[Order], stages: int) -> str:
    """A line per worker; a backward takes two columns, and dots are time that is waited."""
    has_several = stages > len(orders)
    timed = simulate(orders, stages, {"F": 1, "B": 2, "I": 1, "W": 1})
    width = max(len(_name(step.action, has_several)) for each in timed for step in each) + 1
    lines = []
    for worker, each in enumerate(timed):
        cells, at = "", 0.0
        for step in each:
            cells += ".".center(width) * round(step.start - at)
            cells += _name(step.action, has_several).center(width * round(step.end - step.start))
            at = step.end
        lines.append(f"worker {worker} |{cells.rstrip()}")
    return "\n".join(lines)


def _name(action: Action, has_several: bool) -> str:
    return f"{action.kind}{action.micro}" + (f"/{action.stage}" if has_several else "")
