"""How long a kill -9 holds up those who go on: of a worker, beyond the work that has to be done again; of the server,
from the new one's listening until the next step is committed. And how long a pulled plug does, of which nothing tells:
each worker is behind a link of its own (bench/testbed), which goes down, so that nothing is acknowledged any more.
Where there are no rights to make links, the worker is stopped instead: its connection is there, and silent.

A small model trains through the real engine and never stops. Whoever is killed is replaced, and killed again later.
"""

import itertools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any

from bench.report import Comparison, Result
from bench.stars import Actor, Host, on_stage
from bench.testbed import Machine, Testbed, enter_namespace
from bench.turns import say

FORKED = get_context("forkserver")  # a worker starts at once: torch is loaded already
ROWS_PER_SLICE, SLICES = 2, 8
DOWN_S = (0.0, 3.0)
"""Before the server is restarted; it takes another half second or so to start."""
PATIENCE_S = 30.0
"""As `potluck host` has it: how soon a silent worker is relieved depends on it."""
STEADY = 6
"""Steps before and after a kill that tell how long one takes."""


def measure(quick: bool) -> Result:
    FORKED.set_forkserver_preload(["torch", "potluck.engine.host_table", "bench.pause"])
    kills = 2 if quick else 10
    pauses, details = [], {}
    for workers in (2, 3):
        found, step_s = _kill(workers, kills, Fleet.kill_worker)
        what = f"pause of {workers - 1} survivor{'s' * (workers > 2)} of a kill -9, beyond work done again"
        pauses.append(Comparison(what=what, unit="s", ours=found, bare=[], target=0.3))
        details[f"step_s_of_{workers}"] = step_s
    pulls = max(1, kills // 4)
    lack = Testbed.lacks([Machine()], network=True)
    if lack is not None:
        say(f"pause: workers are stopped, since there is no link to pull a plug of: {lack}")
    for workers in (2, 3):
        bed = Testbed([Machine()] * (workers + pulls), network=True) if lack is None else None
        found, step_s = _kill(workers, pulls, Fleet.pull_plug, bed, is_far=True)
        how = "a pulled plug" if bed is not None else "a stopped process"
        what = f"pause of {workers - 1} survivor{'s' * (workers > 2)} of {how}, {PATIENCE_S:g} s patience"
        pauses.append(Comparison(what=what, unit="s", ours=found, bare=[], target=PATIENCE_S / 6))
        details[f"step_s_of_{workers}_before_a_pulled_plug"] = step_s
    for down_s in DOWN_S:
        found, step_s = _kill(2, kills, lambda fleet, down_s=down_s: fleet.kill_host(down_s))
        what = f"from the listening of a server that was restarted after {down_s:g} s to the next step committed"
        pauses.append(Comparison(what=what, unit="s", ours=found, bare=[], target=1.0))
        details[f"step_s_before_server_was_down_for_{down_s:g}_s"] = step_s
    return Result(pauses, details)


@dataclass(frozen=True)
class Done:
    """A step, as one worker saw it."""

    step: int
    at: float
    slices: dict[int, float]
    """Of each worker."""
    busy_s: dict[int, float]


class Learner:
    """Trains in a thread of its own until it is killed."""

    def __init__(self, invite: str, name: str, is_far: bool, namespace: str | None) -> None:
        """`is_far`: it talks as from another machine, over TCP alone: a plug is between machines. `namespace`: that of
        the machine whose link it talks over."""
        import torch

        from potluck.environment import QUIET
        from potluck.fleet.invite import INVITE

        if is_far:
            from potluck.fleet import host_connector

            host_connector.connect_local = lambda port: None
        if namespace is not None:
            enter_namespace(namespace)
        os.environ |= {INVITE: invite, QUIET: "1", "POTLUCK_NAME": name}
        torch.set_num_threads(1)
        self.done: list[Done] = []
        threading.Thread(target=self._train, daemon=True).start()

    def steps(self) -> list[Done]:
        return self.done

    def _train(self) -> None:
        import torch

        import potluck
        from potluck.train.model import GPT, ModelConfig, next_token_loss

        fleet = potluck.init("sync")  # Auto might take a window of seconds after a pause, as if that went on
        torch.manual_seed(1)
        model: Any = GPT(ModelConfig(dim=128, layers=4, heads=4, context=128))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        rows = torch.randint(256, (4096, 129))
        model, optimizer, loader = fleet.prepare(model, optimizer, rows, batch_size=ROWS_PER_SLICE * SLICES)
        fleet.events.listeners.append(self._hear)
        while not fleet.stopping:
            for batch in loader:
                loss, samples = next_token_loss(model, batch)
                fleet.backward(loss, samples=samples)
                fleet.step()

    def _hear(self, event: Any) -> None:
        if type(event).__name__ == "StepDone":
            slices = {w.rank: w.rows / ROWS_PER_SLICE for w in event.workers}
            self.done.append(Done(event.step, time.monotonic(), slices, {w.rank: w.busy_s for w in event.workers}))


class Fleet:
    """A host, its learners, and the next one in line."""

    def __init__(self, actors: list[Actor], folder: str, workers: int, bed: Testbed | None, is_far: bool) -> None:
        self._actors, self._bed, self._is_far = actors, bed, is_far
        self._folder = folder
        self._numbers = itertools.count()
        self._number_of: dict[Actor, int] = {}
        self._draw = random.Random(0)
        self.host = self._start_host(workers, port=0)
        self.invite, _ = self.host.call("listening")
        self.learners = [self.add() for _ in range(workers)]

    def add(self) -> Actor:
        number = next(self._numbers)
        namespace = self._bed.namespace(number) if self._bed is not None else None
        learner = Actor(Learner, self.invite, f"learner {number}", self._is_far, namespace, context=FORKED)
        self._actors.append(learner)
        self._number_of[learner] = number
        return learner

    def _start_host(self, at_least: int, port: int) -> Actor:
        address = self._bed.parent_address if self._bed is not None else "127.0.0.1"
        host = Actor(Host, self._folder, at_least, self._bed is not None, port, PATIENCE_S, address)
        self._actors.append(host)
        return host

    def steps_together(self, count: int) -> list[Done]:
        """Until so many steps in a row were done by all: the last of them, as the oldest worker saw them."""
        return self._await(
            lambda done: (
                done[-count:]
                if len(done) >= count and all(len(d.slices) == len(self.learners) for d in done[-count:])
                else None
            )
        )

    def steps_since(self, at: float, count: int) -> list[Done]:
        """All that the oldest worker saw, once there are so many after that time."""
        return self._await(lambda done: done if sum(d.at > at for d in done) >= count else None)

    def _await(self, choose: Callable[[list[Done]], list[Done] | None]) -> list[Done]:
        deadline = time.monotonic() + 120
        while (found := choose(self.learners[0].call("steps"))) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"pause: the steps did not come: {self.host.call('counts')}")
            time.sleep(0.05)
        return found

    def kill_worker(self) -> tuple[float, float]:
        """The pause, and the time of a step before it."""
        before = self.steps_together(STEADY)
        step_s = _median_step(before)
        time.sleep(self._draw.uniform(0, step_s))
        victim = self.learners.pop()
        died_at = time.monotonic()
        victim.kill()
        done = self.steps_since(died_at, STEADY + 1)
        # The first step that was committed without it.
        last = next(i for i, d in enumerate(done) if d.at > died_at and len(d.slices) == len(self.learners))
        # Slices that a survivor computed in that step, beyond its share of the step before.
        again = max(n - done[last - 1].slices.get(who, n) for who, n in done[last].slices.items())
        per_slice = median(d.busy_s[who] / n for d in done[last + 1 :] for who, n in d.slices.items() if n)
        took = done[last].at - done[last - 1].at
        self.learners.append(self.add())
        redone = f"{again:g} slices of {1e3 * per_slice:.0f} ms again"
        say(f"pause: a step of {1e3 * took:.0f} ms instead of {1e3 * step_s:.0f}, with {redone}")
        return took - step_s - max(0.0, again) * per_slice, step_s

    def pull_plug(self) -> tuple[float, float]:
        """The longest that a step took beyond what it takes, and that time."""
        self.steps_together(STEADY)
        time.sleep(PATIENCE_S / 2 + self._draw.uniform(0, 1))  # until the newest link has shown how late it is
        step_s = _median_step(self.steps_together(STEADY))
        victim = self.learners.pop()
        if self._bed is not None:
            self._bed.unplug(self._number_of[victim])
        else:
            assert victim.process.pid is not None
            os.kill(victim.process.pid, signal.SIGSTOP)
        pulled_at = time.monotonic()
        done = self.steps_since(pulled_at, STEADY)
        took = max(b.at - max(a.at, pulled_at) for a, b in itertools.pairwise(done) if b.at > pulled_at)
        victim.kill()
        self.learners.append(self.add())
        say(f"pause: a pulled plug: a step of {took:.2f} s instead of {step_s:.2f}")
        return took - step_s, step_s

    def kill_host(self, down_s: float) -> tuple[float, float]:
        step_s = _median_step(self.steps_together(STEADY))
        self.host.kill()
        time.sleep(down_s)
        port = int(self.invite.split(":")[2].split("/")[0])
        self.host = self._start_host(len(self.learners), port)
        _, listening_at = self.host.call("listening")
        first = next(d.at for d in self.steps_since(listening_at, STEADY) if d.at > listening_at)
        say(f"pause: {first - listening_at:.3f} s from listening to a step; one takes {1e3 * step_s:.0f} ms")
        return first - listening_at, step_s


def _median_step(done: list[Done]) -> float:
    return median(b.at - a.at for a, b in itertools.pairwise(done))


def _kill(
    workers: int,
    kills: int,
    kill: Callable[[Fleet], tuple[float, float]],
    bed: Testbed | None = None,
    *,
    is_far: bool = False,
) -> tuple[list[float], float]:
    """The pauses, and how long a step takes. `bed`: has a machine for each worker that there will be."""
    with bed or nullcontext(), tempfile.TemporaryDirectory(prefix="bench-") as folder, on_stage() as actors:
        fleet = Fleet(actors, folder, workers, bed, is_far)
        found = [kill(fleet) for _ in range(kills)]
    return [pause for pause, _ in found], median(step_s for _, step_s in found)
