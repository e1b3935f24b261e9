"""Whole runs on a virtual clock, one seed one run: the real coordinator, members, journal and windows, and any fault.

    python -m tests.fleet.simulation --minutes 60
    python -m tests.fleet.simulation --policy cadence --first 17 --seeds 1

Somebody is killed, joins, leaves, is stopped or cut off all the time; the host dies, and is stopped beyond patience;
links become slow; its disk is full, or late. After each event what must always hold is looked at, and at the end what
must hold then. A seed that fails is the reproduction.
"""

import argparse
import random
import time
from collections import Counter
from typing import Any

from potluck.fleet.effects import StepRecord
from potluck.fleet.member import Phase
from tests.fleet import schedules
from tests.fleet.schedules import POLICIES, live, seeds, soak
from tests.fleet.virtual import Fleet, Worker, undisturbed

IDLE_TIMES = 3
"""Times patience: longer than that nobody waits while there is work and somebody to do it."""


class Watch:
    """What must hold after each event of a run, whatever happened."""

    def __init__(self, run: Fleet) -> None:
        self._run = run
        self._records: dict[int, StepRecord] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        """Of each worker, the version that was compared, in which of the run's lives."""
        self._idle_since = run.clock.now
        self.events = 0
        run.on_record = self._on_record
        run.clock.after_each = self._look

    def _look(self) -> None:
        self.events += 1
        ready = {member.peer: member for member in self._run.core.membership.ready}
        agreed: dict[int, Worker] = {}
        for worker in self._run.workers.values():
            if worker.dead or worker.done or worker.member.phase is not Phase.IN or worker.line is None:
                continue
            assert worker.member.version == worker.state.step, f"{worker} thinks it is at {worker.member.version}"
            member = ready.get(worker.line.peer)
            if member is not None and member.applied == worker.state.step:
                self._look_at_weights(worker, agreed)
        self._look_for_idleness()

    def _look_at_weights(self, worker: Worker, agreed: dict[int, Worker]) -> None:
        """All of whom the host knows that they took a step hold the same weights after it."""
        step = worker.state.step
        other = agreed.setdefault(step, worker)
        now = (step, self._run.restores)
        if self._seen.get(worker.name) == now and self._seen.get(other.name) == now:
            return
        self._seen[worker.name] = now
        assert other.weights == worker.weights, f"{other} and {worker} differ"
        if not worker.is_windowed:
            assert worker.weights == undisturbed(step), f"{worker} has not the weights of one machine"

    def _on_record(self, record: StepRecord) -> None:
        """Every row of the step was reported by somebody, and by one; and it follows the step before."""
        self._records[record.step] = record
        reached = record.row
        for start, end, _ in sorted(record.ranges):
            assert start == reached, f"rows {reached} to {start} of step {record.step} are lost or used twice"
            reached = end
        assert reached == record.row + record.rows, f"rows from {reached} of step {record.step} are lost"
        before = self._records.get(record.step - 1)
        if before is not None:
            assert record.row in (0, before.row + before.rows), f"step {record.step} does not follow {before}"
            assert record.rows_seen == before.rows_seen + record.rows

    def _look_for_idleness(self) -> None:
        """While a step is under way, somebody who is there owes something of it.

        One that leaves owes what it was given until the host lets it go, which may take as long as a disk is full.
        """
        run, ready = self._run, self._run.core.membership.ready
        is_idle = run.core.now is not None and ready and not any(member.nodes or member.evaluating for member in ready)
        if not is_idle or run.host.clock.is_stopped or not run.host.is_up or run.host.finish is not None:
            self._idle_since = run.clock.now
        assert run.clock.now - self._idle_since < IDLE_TIMES * run.patience_s, f"all wait: {run.describe()}"


def disturb(run: Fleet, draw: random.Random) -> str:
    """Somebody, or the host, right now: whatever it is doing."""
    lines = list(run.host.lines.values())
    match draw.choice(["link", "cut off", "disk", "late disk", "other", "other", "other"]):
        case "link" if lines:
            draw.choice(lines).latency_s = draw.choice([0.001, 0.1, 1.0, 3.0])
            return "link"
        case "cut off" if lines:
            for line in draw.sample(lines, draw.randint(1, len(lines))):
                line.cut(draw.choice([0.5, 3.0, 15.0]), run.patience_s)
            return "cut off"
        case "disk":
            run.disk.is_full = True
            run.clock.after(draw.choice([0.5, 3.0, 15.0]), lambda: setattr(run.disk, "is_full", False))
            return "disk"
        case "late disk":
            run.disk.late_s = draw.choice([0.01, 0.5, 3.0])
            return "late disk"
    schedules.disturb_anybody(run, draw)
    return "other"


def simulate(seed: int, policy: str, told: Counter[str]) -> Fleet:
    """The run of a seed. What was done to it, and how much happened, is added to `told`."""

    def disturbed(run: Fleet, draw: random.Random) -> None:
        told[disturb(run, draw)] += 1

    watches: list[Watch] = []
    run = live(seed, policy, disturb=disturbed, on_start=lambda found: watches.append(Watch(found)))
    told["scripted"] += len(run.faults.fired)
    told["events"] += watches[0].events
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, help="all in turn, if it is not given")
    parser.add_argument("--seeds", type=int, default=10**9)
    parser.add_argument("--first", type=int, default=seeds(1)[0], help="the first seed; today's, if it is not given")
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args()
    deadline, told, runs, wrong = time.monotonic() + 60 * asked.minutes, Counter[str](), 0, list[Any]()
    for seed in range(asked.first, asked.first + asked.seeds):
        if time.monotonic() > deadline:
            break
        for policy in [asked.policy] if asked.policy else POLICIES:
            runs += 1
            if soak([seed], lambda number, policy=policy: simulate(number, policy, told)):  # type: ignore[misc]
                wrong.append((policy, seed))
    events, faults = told.pop("events", 0), told.total()
    print(f"{runs} runs from seed {asked.first}: {faults:,} faults in {events:,} events, {len(wrong)} wrong {wrong}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
