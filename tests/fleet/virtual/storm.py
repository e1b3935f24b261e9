"""Faults of every kind, at any moment, to anybody: what happens to a virtual run while it is simulated."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.fleet.virtual.faults import FaultScript
from tests.fleet.virtual.fleet import Fleet
from tests.fleet.virtual.worker import Worker

PHASES = ["forward", "backward", "sent", "committed", "applied", "evaluating", "save due"]


class Storm:
    def __init__(self, run: Fleet, draw: random.Random, habits: dict[str, Any]) -> None:
        self.run = run
        self.draw = draw
        self.told: Counter[str] = Counter()
        """How often each fault came about."""
        self._habits = habits
        self._joined = 0
        patience_s = run.patience_s
        self._short = [0.1 * patience_s, 0.4 * patience_s, 0.9 * patience_s]
        self._long = [*self._short, 1.5 * patience_s, 4 * patience_s]
        self._kinds: list[tuple[Callable[[], bool], int]] = [
            (self.join, 8),
            (self.kill, 4),
            (self.reset, 4),
            (self.leave, 2),
            (self.stop_worker, 4),
            (self.sleep_worker, 2),
            (self.leap_worker, 2),
            (self.slow_link, 3),
            (self.partition, 4),
            (self.crash_host, 3),
            (self.stop_host, 3),
            (self.sleep_host, 1),
            (self.leap_host, 2),
            (self.stop_all, 1),
            (self.fill_disk, 2),
            (self.delay_disk, 2),
            (self.lose_checkpoint, 1),
        ]

    def rage(self, count: int, gap_s: float) -> None:
        """So many faults, until the run has ended."""
        for _ in range(count):
            self.run.run_for(self.draw.expovariate(1 / gap_s))
            if self.run.host.finish is not None:
                return
            self.blow()

    def end(self, gap_s: float) -> None:
        """The host dies when all is done, and may not have been told to everybody."""
        self.run.run_for(self.draw.expovariate(1 / gap_s))
        if self.run.host.finish is None and self.crash_host():
            self.told["crash_host"] += 1

    def blow(self) -> None:
        """One fault, now."""
        fault = self.draw.choices(*zip(*self._kinds, strict=True))[0]
        if fault():
            self.told[fault.__name__] += 1

    # Workers

    def join(self, **options: Any) -> bool:
        if len(self._alive()) >= 8:
            return False
        name = f"w{self._joined}"
        self._joined += 1
        worker = self.run.add(name, **any_machine(self.draw), **self._habits, **options)
        worker.clock.wall_ahead_s = self.draw.choice([0.0, -1e9, 1e6])
        script_any_faults(self.run.faults, name, self.run.standing().version, self.draw)
        return True

    def kill(self) -> bool:
        return self._to_one(lambda worker: worker.kill())

    def reset(self) -> bool:
        return self._to_one(lambda worker: worker.lose_connection())

    def leave(self) -> bool:
        return self._to_one(lambda worker: worker.ask_to_leave())

    def stop_worker(self) -> bool:
        return self._to_one(lambda worker: worker.clock.stop(self.draw.choice(self._long)))

    def sleep_worker(self) -> bool:
        return self._to_one(lambda worker: worker.clock.sleep(self.draw.choice(self._long)))

    def leap_worker(self) -> bool:
        return self._to_one(lambda worker: worker.clock.leap(self.draw.choice(self._long)))

    def _to_one(self, do: Callable[[Worker], None]) -> bool:
        alive = self._alive()
        if alive:
            do(self.draw.choice(alive))
        return bool(alive)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.run.workers.values() if worker.line is not None and worker.is_alive]

    # Links

    def slow_link(self) -> bool:
        lines = list(self.run.host.lines.values())
        if lines:
            self.draw.choice(lines).latency_s = self.draw.choice([0.001, 0.1, 1.0, 3.0])
        return bool(lines)

    def partition(self) -> bool:
        """Some cannot be reached; now and then only in one direction."""
        lines = list(self.run.host.lines.values())
        up, down = self.draw.choice([(True, True), (True, True), (True, False), (False, True)])
        for line in self.draw.sample(lines, self.draw.randint(1, len(lines))) if lines else ():
            line.cut(self.draw.choice(self._long), self.run.patience_s, up=up, down=down)
        return bool(lines)

    # The host

    def crash_host(self) -> bool:
        """It comes back after a while; now and then its disk has lost the end of its journal, or all of it."""
        run, draw = self.run, self.draw
        if not run.host.is_up:
            return False
        run.crash_host(back_after_s=draw.choice([0.05, 0.5, 1.5 * run.patience_s]))
        what = draw.random()
        if what < 0.1:
            run.lose_steps(draw.randint(1, 2))
            self.told["lose_steps"] += 1
        elif what < 0.2 and run.disk.newest is not None:
            run.lose_journal()
            self.told["lose_journal"] += 1
        return True

    def stop_host(self) -> bool:
        self.run.host.reads_first = self.draw.random() < 0.5
        return self._to_host(lambda: self.run.host.clock.stop(self.draw.choice(self._long)))

    def sleep_host(self) -> bool:
        return self._to_host(lambda: self.run.host.clock.sleep(self.draw.choice(self._long)))

    def leap_host(self) -> bool:
        return self._to_host(lambda: self.run.host.clock.leap(self.draw.choice(self._long)))

    def _to_host(self, do: Callable[[], None]) -> bool:
        if self.run.host.is_up:
            do()
        return self.run.host.is_up

    def stop_all(self) -> bool:
        """One machine has all of them, and is put to sleep."""
        seconds = self.draw.choice(self._long)
        for process in (self.run.host, *self._alive()):
            process.clock.stop(seconds)
        return True

    # Disks

    def fill_disk(self) -> bool:
        self.run.disk.is_full = True
        self.run.clock.after(self.draw.choice(self._long), lambda: setattr(self.run.disk, "is_full", False))
        return True

    def delay_disk(self) -> bool:
        self.run.disk.late_s = self.draw.choice([0.01, *self._short])
        return True

    def lose_checkpoint(self) -> bool:
        """One that the host has been told of: else those who end with it would not know that it was lost."""
        newest = self.run.disk.newest
        found = newest is not None and newest <= self.run.core.saving.saved.step
        if found:
            self.run.lose_checkpoint()
        return found


def any_machine(draw: random.Random) -> dict[str, Any]:
    return {
        "slice_s": draw.choice([0.02, 0.1, 0.3]),
        "latency_s": draw.choice([0.001, 0.01, 0.1, 0.3]),
        "pack_s": draw.choice([0.001, 0.05, 0.5]),
        "batch_s": draw.choice([0.02, 0.1, 0.3]),
    }


def script_any_faults(faults: FaultScript, name: str, after: int, draw: random.Random) -> None:
    """Where exactly in its work something happens to a worker."""
    step = after + draw.randint(1, 6)
    is_any_pending = any(fault.kind == "poison" for fault in faults.pending)
    if draw.random() < 0.1 and not is_any_pending and step not in faults.poisoned:
        faults.poison(name, at_step=step, slice=draw.randint(0, 4))
    if draw.random() < 0.3:
        faults.stall(name, at_step=step, seconds=draw.choice([1, 5, 60]), phase=draw.choice(PHASES))
    if draw.random() < 0.3:
        faults.kill(name, at_step=step, phase=draw.choice([*PHASES, "half", "parcel", "joined", "connected"]))
    if draw.random() < 0.2:
        faults.cut(name, at_step=step, phase=draw.choice([*PHASES, "parcel", "catching up"]))
