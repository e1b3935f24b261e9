"""Ranks of a group as threads of one process. One of them runs at a time, the one that is earliest on a virtual clock.

Each rank has a clock, random state and a disk of its own, as in a process of its own; the link between them is virtual,
too (group_link.py). Knows no engine.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from potluck.errors import Interrupted
from potluck.link.link import Alone, Link
from potluck.save import checkpoint
from tests.fleet.virtual.group_link import Mistake, Operation, VirtualLink, lost


class Killed(BaseException):
    """The rank's process is gone: nothing that it still does reaches anybody."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long everything takes in a group. `delays`: the seed of what is drawn; no number of a run follows from it."""

    delays: str
    row_s: tuple[float, ...]
    """Seconds that each rank computes for a row."""
    latency_s: float
    """About how long a collective travels."""


@dataclass(kw_only=True)
class Faults:
    """Events that befall ranks of one life, each at a rank and at one of the points where it could lose the baton."""

    kills: dict[int, int] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)
    """By Ctrl-C, which asks all ranks to stop."""
    breaks: dict[int, int] = field(default_factory=dict)
    """By a second Ctrl-C, an error of which the others hear nothing but that the rank is gone."""
    fired: list[str] = field(default_factory=list)


class Rank:
    """A rank, with its thread, its clock and its random numbers. Script and link call pause() wherever time passes."""

    def __init__(self, group: "Group", number: int) -> None:
        self.group, self.number = group, number
        self.draw = random.Random(f"{group.pace.delays} rank {number}")
        self.now = 0.0
        self.began = self.draw.uniform(0, 1e4)
        """A clock's origin is arbitrary, and another in each process."""
        self.points = 0
        """Points so far at which the rank could lose the baton, be killed or hear a signal."""
        self.order = 0.0
        """Drawn at each point: who goes first of two that are at the same time."""
        self.waits_for: Operation | None = None
        self.on_stop: Callable[[], None] | None = None
        """What Ctrl-C does in this process."""
        self.left_at: float | None = None
        """When it left the group, by death or by the end of its script."""
        self.left_well = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.link: Link = VirtualLink(self) if group.world > 1 else Alone()
        self.writers: list[VirtualWriter] = []
        self.go = _held_lock()
        """Released by whoever hands this rank the baton."""
        self.thread = threading.Thread(target=self._live, name=f"rank {number}", daemon=True)
        self.generators = fresh_generators(random.Random(f"{group.seed} rank {number}").randrange(1 << 31))

    @property
    def is_dead(self) -> bool:
        return self.left_at is not None and not self.left_well

    def compute(self, rows: int) -> None:
        """Spend the time that a forward and backward of these rows takes; now and then, a hundred times as long."""
        hiccup = 100.0 if self.draw.random() < 0.01 else 1.0
        self.pause(hiccup * rows * self.group.pace.row_s[self.number] * self.draw.uniform(0.8, 1.2))

    def pause(self, seconds: float = 0.0) -> None:
        """Let time pass, in which ranks that are earlier now run."""
        self._check_alive()
        self.now += seconds
        self.points += 1
        self.order = self.draw.random()
        self.group.pass_on(self)
        self._check_alive()
        faults = self.group.faults
        if faults.kills.get(self.number) == self.points:
            faults.fired.append(f"kill {self.number}")
            self._die()
        if faults.stops.get(self.number) == self.points and self.on_stop is not None:
            faults.fired.append(f"stop {self.number}")
            self.on_stop()
        if faults.breaks.get(self.number) == self.points:
            faults.fired.append(f"break {self.number}")
            raise KeyboardInterrupt

    def wait_for(self, operation: Operation) -> None:
        """Block until the operation is here. WorkerLost if it never will be."""
        self.pause()
        if self.number not in operation.arrived:
            self.waits_for = operation
            self.group.pass_on(self)
            self.waits_for = None
            self._check_alive()
        if operation.is_lost_for(self):
            raise lost()
        operation.arrived.add(self.number)

    def _check_alive(self) -> None:
        if self.is_dead or self.group.is_over or self.group.failure is not None:
            raise Killed

    def _die(self) -> None:
        self.left_at = self.now
        for writer in self.writers:
            writer.on_death()
        raise Killed

    def _live(self) -> None:
        try:
            self.go.acquire()
            self._check_alive()
            self.result = self.group.script(self)
        except (Killed, Mistake):
            pass
        except AssertionError as error:
            self.group.fail(error)
        except BaseException as error:
            self.error = error
        finally:
            if self.left_at is None:
                self.left_at, self.left_well = self.now, self.error is None or isinstance(self.error, Interrupted)
            self.group.hand_on()


class Group:
    """The ranks of one life of a run. run() gives each the baton when it is the earliest, until all have ended."""

    def __init__(self, world: int, seed: str, pace: Pace, faults: Faults, script: Callable[[Rank], Any]) -> None:
        """`seed`: from which the random numbers of each process start."""
        self.world, self.seed, self.pace, self.faults, self.script = world, seed, pace, faults, script
        self.operations: list[Operation] = []
        self.trace: list[str] = []
        """What happened, in order: the same for the same seed."""
        self.is_over = False
        self._ended = _held_lock()
        """Released when all ranks have ended, or one has failed."""
        self._running: Rank | None = None
        self.failure: AssertionError | None = None
        self.ranks = [Rank(self, number) for number in range(world)]

    def run(self) -> list[Rank]:
        """Live the life to its end. Raises the first thing that must not be, from whatever rank it comes."""
        before = generators()
        with self._patched():
            try:
                for rank in self.ranks:
                    rank.thread.start()
                self.hand_on()
                self._ended.acquire()
                if self.failure is None:
                    self._check_ends()
            finally:
                self._end()
                set_generators(before)
        if self.failure is not None:
            raise self.failure
        return self.ranks

    def pass_on(self, rank: Rank) -> None:
        """Called by the rank that runs: return once it is its turn again, which may be at once."""
        if self.hand_on() is not rank:
            rank.go.acquire()

    def hand_on(self) -> Rank | None:
        """Whoever runs hands the baton to the earliest rank; to run() if there is none, or one has failed."""
        first = None if self.is_over or self.failure is not None else self._earliest()
        if first is None:
            if not self.is_over:
                self._ended.release()
            return None
        first.now = max(first.now, self._wakes_at(first))
        before, self._running = self._running, first
        if first is not before:
            if before is not None:
                before.generators = generators()
            set_generators(first.generators)
            first.go.release()
        return first

    def fail(self, error: AssertionError) -> None:
        self.failure = self.failure or error

    def note(self, rank: Rank, what: str) -> None:
        self.trace.append(f"{rank.now:.9f} {rank.number} {what}")

    def _earliest(self) -> Rank | None:
        """The rank that runs next; none if all have ended. Where all wait, none of them ever ends."""
        alive = [rank for rank in self.ranks if rank.left_at is None]
        if not alive:
            return None
        first = min(alive, key=lambda rank: (self._wakes_at(rank), rank.order, rank.number))
        if math.isinf(self._wakes_at(first)):
            waits = "; ".join(f"worker {rank.number} waits at {rank.waits_for}" for rank in alive)
            ended = "".join(f"; worker {rank.number} has ended" for rank in self.ranks if rank not in alive)
            self.fail(AssertionError(f"deadlock: {waits}{ended}"))
            return None
        return first

    def _wakes_at(self, rank: Rank) -> float:
        if rank.waits_for is None:
            return rank.now
        return max(rank.now, rank.waits_for.ends_at(rank))

    def _check_ends(self) -> None:
        """Ranks that ended well have begun the same operations."""
        counts = {rank.link.count for rank in self.ranks if rank.left_well and isinstance(rank.link, VirtualLink)}
        assert len(counts) <= 1, f"ranks have made {sorted(counts)} calls, the last of all: {self.operations[-1]}"

    def _end(self) -> None:
        """Unwind whatever still runs, one rank after the other."""
        self.is_over = True
        for rank in self.ranks:
            if rank.thread.is_alive():
                rank.go.release()
                rank.thread.join(10)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Clocks and disks are virtual for as long as the group lives; other threads have the real ones."""
        real = time.perf_counter

        def perf_counter() -> float:
            rank = self._running
            return rank.began + rank.now if rank is not None and threading.current_thread() is rank.thread else real()

        def executor(*sizes: Any) -> VirtualWriter:
            assert self._running is not None
            return VirtualWriter(self._running)

        disk = mock.patch.object(checkpoint, "ThreadPoolExecutor", executor)
        with mock.patch.object(time, "perf_counter", perf_counter), disk:
            yield


class VirtualWriter:
    """A disk that takes its time. What it has not written by then is lost when the rank is killed."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._due: list[tuple[float, Callable[[], None]]] = []
        rank.writers.append(self)

    def submit(self, work: Callable[..., None], *arguments: Any) -> "Future[None]":
        rank, written = self._rank, _Written(self)
        due = rank.now + rank.group.pace.latency_s * rank.draw.choice([0.0, 1.0, 20.0])
        self._due.append((due, lambda: work(*arguments)))
        return written

    def finish(self) -> None:
        for due, work in self._take():
            self._rank.pause(max(0.0, due - self._rank.now))
            work()

    def on_death(self) -> None:
        for due, work in self._take():
            if due <= self._rank.now:
                work()

    def _take(self) -> list[tuple[float, Callable[[], None]]]:
        due, self._due = self._due, []
        return due


class _Written(Future[None]):
    def __init__(self, writer: VirtualWriter) -> None:
        super().__init__()
        self._writer = writer

    def result(self, timeout: float | None = None) -> None:
        self._writer.finish()


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


Generators = tuple[Any, Any, Any]


def generators() -> Generators:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_generators(state: Generators) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def fresh_generators(seed: int) -> Generators:
    torch_state = torch.Generator().manual_seed(seed).get_state()
    return torch_state, random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
