"""How soon shares follow a worker that becomes three times slower in the middle of a run.

    python -m bench following [--quick]

Two workers with 0.9 cores each; then one of them has 0.3. The new optimum is what each of them does alone, measured
right after the run with the quotas that hold then. Windows are counted from the one in which the worker slowed down,
which nobody could plan for: 1 is the next. The first counts whose shares of the rows that were really done are all
within 10 % of the optimum, or within one batch of it (under Sync, one row), since less cannot be given out.
"""

import time
from collections.abc import Sequence
from typing import Any

from bench.mixed import CLIP, POLICIES, TASK, BareLoop, Task, rows_per_s, train
from bench.report import Comparison, Result
from bench.testbed import Machine
from bench.turns import say
from bench.uneven import Uneven
from bench.uneven_rank import Seat
from potluck.events import StepDone

BEFORE, AFTER = [0.9, 0.9], [0.9, 0.3]
SETTLED = "settled"
"""What a rank tells in the middle of a window: now one of them becomes slower."""
SETTLING, FOLLOWING = 4, 6
"""Windows before and after; under Sync, ten times as many steps."""
NEVER = 99
CONTENDERS = ("Cadence", "Async", "Sync balanced")
WITHIN = 0.10


def measure(quick: bool) -> Result:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with Uneven([Machine(cpu=cores) for cores in BEFORE]) as fleet:
        how = fleet.how
        for turn in range(1 if quick else 4):
            for contender in CONTENDERS[:: -1 if turn % 2 else 1]:
                found[contender].append(_slow_down(fleet, contender, TASK))
                told = found[contender][-1]
                shares = " ".join(f"{share:.2f}" for share in told["slow_shares"])
                say(f"following: {contender}: {told['windows']} (optimum {told['optimum']:.2f}; shares {shares})")
    return Result(compare(found), {"unequal_by": how, "turns": found})


def _slow_down(fleet: Uneven, contender: str, task: Task) -> dict[str, Any]:
    answers = fleet.run(
        "bench.following:follow",
        cores=BEFORE,
        on={SETTLED: lambda: fleet.set_cores(1, AFTER[1])},
        contender=contender,
        task=task.as_json(),
    )
    windows, slowed = answers[0]["windows"], answers[0]["slowed"]
    speeds = [answer["alone"] for answer in answers]
    optimum = [speed / sum(speeds) for speed in speeds]
    unit = 1 if contender == "Sync balanced" else task.rows
    return {
        "windows": windows_until(windows[slowed:], optimum, unit),
        "optimum": optimum[1],
        "slow_shares": [rows[1] / sum(rows) for rows in windows[max(0, slowed - 2) :]][:12],
    }


def windows_until(windows: Sequence[Sequence[int]], optimum: Sequence[float], unit: int) -> int:
    """How many windows after the first (in which the speed changed) the shares are right; NEVER if they never are."""
    for number, rows in enumerate(windows):
        total = sum(rows)
        wanted = [share * total for share in optimum]
        if number and all(
            abs(done - best) <= max(WITHIN * best, unit) for done, best in zip(rows, wanted, strict=True)
        ):
            return number
    return NEVER


def compare(found: dict[str, list[dict[str, Any]]]) -> list[Comparison]:
    return [
        Comparison(
            what=f"from a worker's three-fold slowing to shares within 10 % of the new optimum: {name}",
            unit="steps" if name == "Sync balanced" else "windows",
            ours=[float(turn["windows"]) for turn in turns],
            bare=[],
            target=None if name == "Sync balanced" else 2,
        )
        for name, turns in found.items()
    ]


def follow(seat: Seat, *, contender: str, task: dict[str, Any]) -> dict[str, Any]:
    """One rank: what everybody did, window by window, and in which of them a worker became slower."""
    import potluck
    from potluck.train.model import next_token_loss

    given, scale = Task.from_json(task), 10 if contender.startswith("Sync") else 1
    data = given.data()
    fleet = potluck.init(POLICIES[contender], step=potluck.StepConfig(clip=CLIP))
    weights, optimizer = given.build()
    model, _, loader = fleet.prepare(weights, optimizer, data, batch_size=given.rows * seat.world)
    windows: list[list[int]] = []
    ends: list[float] = []
    slowed: list[int] = []

    def hear(event: Any) -> None:
        if isinstance(event, StepDone):
            windows.append([worker.rows for worker in event.workers])
            ends.append(time.perf_counter())
            if not slowed and seat.is_done(SETTLED):
                slowed.append(len(windows) - 1)
            if seat.rank == 0 and slowed and len(windows) > slowed[0] + FOLLOWING * scale:
                fleet.request_stop()

    def look() -> None:
        if len(ends) >= SETTLING * scale and time.perf_counter() - ends[-1] > 0.5 * (ends[-1] - ends[-2]) / scale:
            seat.tell(SETTLED)

    fleet.events.listeners.append(hear)
    train(fleet, model, loader, seat, after_batch=look)
    fleet.evaluate(next_token_loss, data[: seat.world], seat.world)
    alone = BareLoop(seat, given, data)
    alone.step()
    return {"windows": windows, "slowed": slowed[0], "alone": rows_per_s(alone, 2.0)}
