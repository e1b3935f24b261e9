"""Whole runs on a virtual clock, one seed one run: the real coordinator, members, journal and planner, and any fault.

    python -m tests.fleet.simulation --minutes 60
    python -m tests.fleet.simulation --policy cadence --seed 17 --seeds 1
    python -m tests.fleet.simulation --policy group --minutes 10

Somebody is killed, joins, leaves, is stopped or cut off all the time; the host dies, and is stopped beyond patience;
clocks leap; links become slow; disks are full, or late, or lose what they had; plain peers take part. After each event
what must always hold is looked at, and at the end what must hold then. A seed that fails is the reproduction.

Under `group` there is no host: ranks agree among themselves over a virtual link, with the real engine. See
virtual/group_run.py. Under `engine` there is one, and its workers have the real engine, too, where those of other
policies are toys, of which there are more in a second. See virtual/engine_run.py.
"""

import argparse
import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

from potluck.agree.policy import Async, Auto, Cadence
from potluck.fleet.description import settings_of
from tests.fleet.seeds import POLICIES, hurried, seeds
from tests.fleet.virtual import BATCH, ROWS, Fleet, described
from tests.fleet.virtual.engine_run import EngineFleet, draw_task, living
from tests.fleet.virtual.group_run import simulate_group
from tests.fleet.virtual.storm import Storm
from tests.fleet.virtual.watch import Watch

GROUP, ENGINE = "group", "engine"
KINDS = (*POLICIES, GROUP, ENGINE)
"""Runs of a host by their policy; and runs of groups and of engines under a host, which draw theirs."""
HANG_S = 60
"""Of real time: no run takes a second."""
STUCK_S = 500
"""Of virtual time: in it a run to which nothing happens any more gets further."""
ALLOWED = ("has ended", "begins anew")
"""What a worker may end with that comes too late, or whose weights nobody has any more."""


def simulate(seed: int, policy: str, told: Counter[str]) -> Fleet:
    """The run of a seed. What was done to it, and how much happened, is added to `told`."""
    # Under all kinds of windows a seed would be one and the same run.
    draw = random.Random(f"{policy} {seed}" if policy in ("async", "auto") else seed)
    epochs = draw.randint(2, 6)
    settings: dict[str, Any] = {}
    batch = BATCH
    if policy != "sync":
        kind = {"cadence": Cadence, "async": Async, "auto": Auto}[policy]
        drawn: dict[str, Any] = {"anchor": draw.choice([1, 2]), "max_anchor": draw.choice([2, 4, 200])}
        # Of its own, so that a run in which nobody steps together is the one that its seed has always been.
        other = random.Random(f"together {policy} {seed}")
        drawn |= {"together": other.choice([0.0, 0.0, 0.0, 0.2, 0.5, 1.0])}
        if policy != "auto":
            draw.random()  # of a setting that is gone: later draws are what they have always been
            drawn |= {"moments": other.random() < 0.3}
        if policy != "auto":
            drawn = asdict(kind.published(**drawn)) | ({"overhead_target": None} if other.random() < 0.3 else {})
        settings, batch = settings_of(kind(**drawn)), draw.choice([8, BATCH])
    gathers = random.Random(f"gathers {policy} {seed}")
    habits = {
        "save_every": draw.choice([0, 0, 1, 2, 3]),
        "evaluate_every": draw.choice([0, 0, 1, 2]),
        "gather_every": gathers.choice([0, 0, 1, 2]),
        "keeps_best": random.Random(f"best {policy} {seed}").random() < 0.5,
        "description": described(policy=policy, settings=settings, batch=batch, rows_limit=epochs * ROWS),
    }
    plain = draw.choice([0, 0, 0, 1, 2])
    run = Fleet(at_least=1, epochs=epochs, patience_s=draw.choice([2.0, 4.0]), plain_peers=plain > 0)
    watch, storm = Watch(run), Storm(run, draw, habits)
    try:
        for number in range(plain):
            run.add_plain(f"plain{number}", batch_s=draw.choice([0.02, 0.3]))
        for _ in range(draw.randint(1, 4)):
            storm.join()
        _live_through(run, storm, habits)
        watch.finish()
    finally:
        told.update(storm.told)
        told["scripted"] += len(run.faults.fired)
        told["events"] += watch.events
        run.journal.close()
    return run


def simulate_engine(seed: int, told: Counter[str]) -> EngineFleet:
    draw = random.Random(f"engines {seed}")
    is_in_loop, keeps_best = (random.Random(f"{habit} {seed}").random() for habit in ("in loop", "keeps"))
    task = replace(draw_task(draw), is_in_loop=is_in_loop < 0.3, keeps_best=keeps_best < 0.5)
    patience_s = draw.choice([2.0, 4.0])
    with living(task, at_least=1, patience_s=patience_s) as run:
        storm = Storm(run, draw, {})
        try:
            for _ in range(draw.randint(1, 4)):
                storm.join()
            _live_through(run, storm, {})
        finally:
            told.update(storm.told)
            told["scripted"] += len(run.faults.fired)
            told["events"] += run.clock.count
    return run


def _live_through(run: Fleet, storm: Storm, habits: dict[str, Any]) -> None:
    """Faults, often or seldom, and then none, until the run has ended well."""
    draw = storm.draw
    storm.rage(draw.choice([5, 20, 60]), gap_s=draw.choice([0.05, 0.2, 0.6]))
    if draw.random() < 0.5:  # the end is where most has gone wrong
        run.clock.run(lambda: run.is_near_the_end or not run.is_anybody_alive, limit_s=20 * run.patience_s)
        storm.rage(draw.choice([3, 10, 20]), gap_s=draw.choice([0.02, 0.1, 0.3]))
    if draw.random() < 0.3:
        run.clock.run(lambda: run.is_done or run.host.finish is not None, limit_s=20 * run.patience_s)
        storm.end(gap_s=draw.choice([0.01, 0.1, 0.5]))
    while run.host.finish is None:
        _get_further(run)
        _start_another(run, habits)
    run.finish(limit_s=0)
    errors = {worker.error for worker in run.workers.values() if worker.error is not None}
    assert all(any(allowed in error for allowed in ALLOWED) for error in errors), errors


def _get_further(run: Fleet) -> None:
    """Until the run has ended, or nobody is left. A worker that is far away may take a minute to each step: what is
    limited is how long a run takes to get further than it ever was."""
    furthest = -1

    def gets_further() -> bool:
        return run.host.finish is not None or not run.is_anybody_alive or run.standing().rows_seen > furthest

    while run.host.finish is None and run.is_anybody_alive:
        furthest = max(furthest, run.standing().rows_seen)
        run.run_until(gets_further, limit_s=STUCK_S)


def _start_another(run: Fleet, habits: dict[str, Any]) -> None:
    """Where nobody is left; of a run that is done and kept, the host finds out by itself that it is, once it runs."""
    run.clock.run(lambda: run.host.is_up and not run.host.clock.is_stopped, limit_s=20 * run.patience_s)
    run.clock.run(lambda: run.host.finish is not None, limit_s=4 * run.patience_s)
    if run.host.finish is None:
        is_stuck = run.is_done and run.core.expected and run.host.is_up  # else it may become a longer run
        assert not is_stuck, f"all is done, and the host waits: {run.describe()}"
        run.add(f"last{len(run.workers)}", **habits)


class Outcome(NamedTuple):
    seed: int
    policy: str
    told: Counter[str]
    wrong: str


def _live(seed: int, policy: str) -> Outcome:
    told = Counter[str]()
    try:
        with hurried(HANG_S):
            match policy:
                case "group":
                    simulate_group(seed, told)
                case "engine":
                    simulate_engine(seed, told)
                case _:
                    simulate(seed, policy, told)
    except Exception:
        return Outcome(seed, policy, told, traceback.format_exc()[-3000:])
    return Outcome(seed, policy, told, "")


def _live_many(numbers: range, policies: tuple[str, ...], deadline: float, outcomes: Any) -> None:
    """In a process of its own, until there is no seed left, or no time."""
    torch.set_num_threads(1)
    for seed, policy in ((seed, policy) for seed in numbers for policy in policies):
        if time.monotonic() > deadline:
            break
        outcomes.put(_live(seed, policy))
    outcomes.put(None)


def _live_everywhere(numbers: range, policies: tuple[str, ...], deadline: float, jobs: int) -> Iterator[Outcome]:
    """As they end, from as many processes."""
    context = multiprocessing.get_context("fork")
    outcomes: Any = context.Queue()
    for number in range(jobs):
        args = numbers[number::jobs], policies, deadline, outcomes
        context.Process(target=_live_many, args=args, daemon=True).start()
    left = jobs
    while left:
        outcome = outcomes.get()
        left -= outcome is None
        if outcome is not None:
            yield outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=KINDS, help="all in turn, if it is not given")
    parser.add_argument("--seeds", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=seeds(1)[0], help="the first; today's, if it is not given")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; as many as there are cores")
    asked = parser.parse_args()
    policies = (asked.policy,) if asked.policy else KINDS
    started = said = time.monotonic()
    told, runs, wrong = Counter[str](), 0, 0
    numbers = range(asked.seed, asked.seed + asked.seeds)
    for outcome in _live_everywhere(numbers, policies, started + 60 * asked.minutes, min(asked.jobs, asked.seeds)):
        runs, told = runs + 1, told + outcome.told
        if outcome.wrong:
            wrong += 1
            print(f"{outcome.wrong}\nThe run of seed {outcome.seed} under {outcome.policy} goes wrong. Again:")
            print(f"    {again(outcome.seed, outcome.policy)}", flush=True)
        if time.monotonic() - said > 10:
            said = time.monotonic()
            print(_sum_up(told, runs, wrong, said - started), flush=True)
    print(_sum_up(told, runs, wrong, time.monotonic() - started))
    print(", ".join(f"{count:,} {kind}" for kind, count in told.most_common()))
    raise SystemExit(bool(wrong))


def again(seed: int, policy: str) -> str:
    """The command that lives this run once more."""
    return f"python -m tests.fleet.simulation --policy {policy} --seed {seed} --seeds 1"


def _sum_up(told: Counter[str], runs: int, wrong: int, seconds: float) -> str:
    events, faults = told["events"], told.total() - told["events"]
    speed = f"{runs / seconds:.1f} runs and {faults / seconds:.0f} faults a second"
    return f"{seconds:.0f} s: {runs:,} runs, {faults:,} faults in {events:,} events ({speed}), {wrong} wrong"


if __name__ == "__main__":
    main()
