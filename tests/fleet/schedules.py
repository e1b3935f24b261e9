"""Random schedules on the virtual clock: whoever joins, leaves, dies, sleeps, and whenever the host does.

A schedule is a function of its seed. `python -m tests.fleet.schedules --policy cadence --seeds 5000` lives many,
and says which seeds end wrong; tests/fleet/soak.py does the same with real processes.
"""

import argparse
import contextlib
import datetime
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from potluck.agree.policy import Async, Cadence
from potluck.fleet.description import settings_of
from tests.fleet.virtual import PATIENCE_S, ROWS, FaultScript, Fleet, described

POLICIES = ("sync", "cadence", "async")
HANG_S = 60
"""Of real time: no schedule takes a second."""


def seeds(count: int) -> list[int]:
    """Others each day; or the one that POTLUCK_SEED names."""
    if named := os.environ.get("POTLUCK_SEED"):
        return [int(named)]
    first = int(datetime.date.today().strftime("%y%m%d0000"))
    return list(range(first, first + count))


def live(
    seed: int,
    policy: str,
    *,
    disturb: Callable[[Fleet, random.Random], None] | None = None,
    on_start: Callable[[Fleet], object] = lambda run: None,
) -> Fleet:
    """Fast and slow workers on near and far machines; some saves and evaluations are always under way."""
    draw = random.Random(seed)
    epochs = draw.randint(3, 4)
    settings: dict[str, Any] = {}
    if policy != "sync":
        kind = {"cadence": Cadence, "async": Async}[policy]
        settings = settings_of(kind(anchor=draw.choice([1, 2]), max_anchor=draw.choice([2, 4, 200])))
    habits = {
        "save_every": draw.choice([0, 0, 1, 2, 3]),
        "evaluate_every": draw.choice([0, 1, 2]),
        "description": described(policy=policy, settings=settings, rows_limit=epochs * ROWS),
    }
    run = Fleet(at_least=1, epochs=epochs, patience_s=draw.choice([2.0, PATIENCE_S]))
    on_start(run)
    for number in range(draw.randint(1, 4)):
        run.add(f"w{number}", **any_machine(draw), **habits)
        script_any_faults(run.faults, f"w{number}", draw)
    live_through(run, draw, habits, disturb or disturb_anybody)
    return run


def live_through(
    run: Fleet, draw: random.Random, habits: dict[str, Any], disturb: Callable[[Fleet, random.Random], None]
) -> None:
    """Others come, and some are disturbed, until the run has ended well."""
    for number in range(draw.randint(0, 14)):
        run.run_for(draw.random() * 1.5)
        if run.host.finish is not None:
            break
        if draw.random() < 0.4:
            run.add(f"new{number}", **any_machine(draw), **habits)
        else:
            disturb(run, draw)
    run.add("last", at_s=25.0, **habits)
    run.finish(limit_s=500)
    errors = {worker.error for worker in run.workers.values() if worker.error is not None}
    assert all("has ended" in error or "begins anew" in error for error in errors), errors


def any_machine(draw: random.Random) -> dict[str, Any]:
    return {
        "slice_s": draw.choice([0.02, 0.1, 0.3]),
        "latency_s": draw.choice([0.001, 0.01, 0.1, 0.3]),
        "pack_s": draw.choice([0.001, 0.05, 0.5]),
        "batch_s": draw.choice([0.02, 0.1, 0.3]),
    }


def script_any_faults(faults: FaultScript, name: str, draw: random.Random) -> None:
    while_working = ["forward", "backward", "sent", "committed", "applied", "evaluating", "save due"]
    if draw.random() < 0.3 and not any(fault.kind == "poison" for fault in faults.pending):
        faults.poison(name, at_step=draw.randint(1, 6), slice=draw.randint(0, 4))
    if draw.random() < 0.3:
        faults.stall(
            name, at_step=draw.randint(1, 6), seconds=draw.choice([1, 5, 60]), phase=draw.choice(while_working)
        )
    if draw.random() < 0.4:
        faults.kill(name, at_step=draw.randint(1, 6), phase=draw.choice([*while_working, "half", "parcel"]))


def disturb_anybody(run: Fleet, draw: random.Random) -> None:
    """Somebody, right now: whatever it is doing."""
    alive = [worker for worker in run.workers.values() if worker.line is not None and not worker.dead]
    what = draw.choice(["kill", "cut", "leave", "silence", "crash", "pause"])
    if what == "crash" and run.host.is_up:
        run.crash_host(back_after_s=draw.random())
    if what == "pause" and run.host.is_up:
        run.host.pause(draw.choice([0.5, 3.0, 15.0, 40.0]))
    worker = draw.choice(alive) if alive else None
    if worker is None or worker.done:
        return
    match what:
        case "kill":
            worker.kill()
        case "cut":
            worker.lose_connection()
        case "leave":
            worker.ask_to_leave()
        case "silence":
            worker.clock.stop(draw.choice([0.5, 3.0, 15.0]))


@contextlib.contextmanager
def hurried(seconds: int) -> Iterator[None]:
    """Whatever takes longer has hung."""

    def hang(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it hangs: {seconds} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def soak(numbers: list[int], live: Callable[[int], object], hang_s: int = HANG_S) -> list[int]:
    """The seeds that end wrong, each told as it is found."""
    wrong: list[int] = []
    for done, seed in enumerate(numbers, 1):
        try:
            with hurried(hang_s):
                live(seed)
        except Exception:
            wrong.append(seed)
            print(f"SEED {seed} is wrong:\n{traceback.format_exc()[-3000:]}", flush=True)
        if done % 500 == 0:
            print(f"{done} schedules, {len(wrong)} wrong", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, default="cadence")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, help="the first seed; today's, if it is not given")
    asked = parser.parse_args()
    numbers = seeds(asked.seeds) if asked.first is None else list(range(asked.first, asked.first + asked.seeds))
    wrong = soak(numbers, lambda seed: live(seed, asked.policy))
    print(f"{asked.policy}: {len(numbers)} virtual schedules from seed {numbers[0]}, {len(wrong)} wrong {wrong}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
