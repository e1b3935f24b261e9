"""Processes that stop and continue: a sleeping laptop, a paused virtual machine, a hung disk. No bit may change."""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import testbed
from potluck.agree.policy import ApplyPolicy, Cadence, Sync
from potluck.events import Stalled, WorkerWent
from potluck.fleet import pipe
from tests.fleet.fleet import (
    EPOCHS,
    STEPS,
    Fleet,
    Worker,
    assert_same,
    check_journal_in,
    start_coordinator,
    step_of,
    wait_until,
)
from tests.fleet.judges import plain_run
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)
PATIENCE_S = 1.5


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


def finish(folder: Path, coordinator: Any, workers: list[Worker], steps: int, epochs: int) -> list[Worker]:
    """Those who saw the end. The ledger holds, and nobody ended with an error."""
    for worker in workers:
        worker.wait(60)
    coordinator.join(20)
    assert not coordinator.is_alive(), "the run has not ended"
    assert not (folder / "coordinator.error").exists(), (folder / "coordinator.error").read_text()
    check_journal_in(folder, steps, epochs)
    return [worker for worker in workers if (folder / f"{worker.name}.pt").exists()]


@pytest.mark.parametrize("at_step", first_of([2, 6]))
def test_a_host_that_pauses_beyond_patience_changes_no_bit_and_loses_nobody(
    at_step: int, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    coordinator, invite = start_coordinator(tmp_path, patience_s=PATIENCE_S, at_least=2)
    workers = [Worker(invite, tmp_path, name, None, {"slow_s": 0.1}) for name in ("a", "b")]
    wait_until(lambda: step_of(tmp_path) >= at_step)
    os.kill(coordinator.pid, signal.SIGSTOP)
    time.sleep(PATIENCE_S + 1.0)  # the fault itself: a pause that is longer than patience
    os.kill(coordinator.pid, signal.SIGCONT)
    ended = finish(tmp_path, coordinator, workers, STEPS, EPOCHS)
    assert {worker.name for worker in ended} == {"a", "b"}
    for worker in ended:
        assert_same(worker.weights, expected)


def on_another_machine(namespace: str, place: Path) -> None:
    from potluck.fleet import host_connector

    host_connector.connect_local = lambda port: None  # type: ignore[assignment]
    testbed.enter_namespace(namespace)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_pulled_plug_holds_the_others_for_less_than_half_of_patience(tmp_path: Path) -> None:
    """A link between two machines goes down: nothing is acknowledged any more, and nothing says so."""
    if (lack := testbed.Testbed.lacks([testbed.Machine()], network=True)) is not None:
        pytest.skip(lack)
    patience_s = 30.0
    with testbed.Testbed([testbed.Machine()], network=True) as bed:
        fleet = Fleet(tmp_path, encrypted=True, patience_s=patience_s, at_least=2, address=bed.parent_address)
        options = {"slow_s": 0.1, "epochs": 1000}
        fleet.add("near", **options)
        fleet.add("far", partial(on_another_machine, bed.namespace(0)), **options)
        core = fleet.server.core

        def is_known() -> bool:
            """How late the far one's link is at most."""
            limits = [m.lateness.silence_limit_s(time.monotonic(), patience_s) for m in core.membership.holders]
            return len(limits) == 2 and max(limits) < patience_s / 2

        wait_until(is_known, 60)
        assert not [event for event in fleet.events if isinstance(event, Stalled | WorkerWent)]
        bed.unplug(0)
        done = core.standing.version
        wait_until(lambda: core.standing.version >= done + 10, 60)
        told = [event for event in fleet.events if isinstance(event, Stalled | WorkerWent)]
        assert {event.name for event in told} == {"far"}
        assert isinstance(told[0], Stalled) and told[0].then.startswith("the others compute its part")
        seconds = [e.seconds if isinstance(e, Stalled) else float(e.reason.split()[2]) for e in told]
        assert max(seconds) < patience_s / 2, told
        fleet.close()


@pytest.mark.parametrize(
    "policy", first_of([Sync(), Cadence.published(anchor=1, max_anchor=2)]), ids=["sync", "cadence"]
)
def test_whoever_sleeps_through_the_end_and_a_restart_of_the_host_ends_with_the_others_weights(
    policy: ApplyPolicy, tmp_path: Path
) -> None:
    """The end is given to it in the middle of an epoch, of which nothing is left to train."""
    host, invite = start_coordinator(tmp_path, patience_s=PATIENCE_S, at_least=2)
    options = {"policy": policy, "slow_s": 0.02, "steps": STEPS}
    # It stays: after its goodbye, a host that lives for another PATIENCE_S tells the sleeper that the run is over.
    quick = Worker(invite, tmp_path, "quick", None, {**options, "stay_until": "killed"})
    sleeper = Worker(invite, tmp_path, "sleeper", None, options)
    wait_until(lambda: step_of(tmp_path) >= 2)
    sleeper.send(signal.SIGSTOP)
    wait_until((tmp_path / "quick.pt").exists)
    host.kill()
    host.join(10)
    (tmp_path / "killed").touch()
    host, _ = start_coordinator(tmp_path, port=invite.port, patience_s=PATIENCE_S)
    sleeper.send(signal.SIGCONT)
    for worker in (quick, sleeper):
        worker.wait()
    host.join(20)
    assert not host.is_alive(), "the run has not ended"
    assert_same(quick.weights, sleeper.weights)


@pytest.mark.slow
def test_averages_that_a_stopped_worker_does_not_take_hold_nobody_until_patience_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes long before that, is given the weights when it continues, and ends with those of the others."""
    monkeypatch.setattr(pipe, "LOOPBACK_BYTES", 1)  # the least that the system has, so that they do not fit the buffers
    fleet = Fleet(tmp_path, patience_s=20.0, at_least=2)
    epochs, steps = 6 * EPOCHS, 6 * STEPS
    _, sleeper = (fleet.add(name, slow_s=0.05, epochs=epochs, steps=steps) for name in ("a", "b"))
    fleet.wait_for_step(3)
    sleeper.send(signal.SIGSTOP)
    wait_until(lambda: any(isinstance(event, WorkerWent) for event in fleet.events))
    step = fleet.server.core.standing.version
    fleet.wait_for_step(step + 3)
    sleeper.send(signal.SIGCONT)
    (went,) = [event for event in fleet.events if isinstance(event, WorkerWent)]
    assert went.name == "b" and went.reason.endswith("the others waited for it to take averages")
    assert_same(fleet.finish(epochs=epochs), plain_run(epochs))


def pause_at_random(tmp_path: Path, draw: random.Random, *, epochs: int, seconds: float, longest_s: float) -> list[str]:
    """Workers, the host and both are stopped, now and then for longer than patience. What was done."""
    steps = epochs * STEPS // EPOCHS
    coordinator, invite = start_coordinator(tmp_path, patience_s=PATIENCE_S, at_least=3)
    # Whoever sleeps while the run ends finds nobody there when it wakes.
    options = {"slow_s": 0.02, "epochs": epochs, "steps": steps, "save_every": 7, "may_lose": True}
    workers = [Worker(invite, tmp_path, name, None, options) for name in ("a", "b", "c")]
    wait_until(lambda: step_of(tmp_path) >= 1)
    done: list[str] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and coordinator.is_alive():
        time.sleep(draw.uniform(0.05, 0.5))
        victims = {
            0: [draw.choice(workers).process.pid],
            1: [coordinator.pid],
            2: [coordinator.pid, draw.choice(workers).process.pid],
            3: [worker.process.pid for worker in workers],
        }[kind := draw.randrange(4)]
        with suppress(ProcessLookupError):  # the run may just have ended
            for pid in victims:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.choice([0.1, 0.5, longest_s]))
        for pid in draw.sample(victims, len(victims)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            time.sleep(draw.choice([0.0, 0.0, 0.3]))
        done.append(("worker", "host", "both", "workers")[kind])
    ended = finish(tmp_path, coordinator, workers, steps, epochs)
    assert ended, "nobody saw the end"
    want = plain_run(epochs)
    for worker in ended:
        assert_same(worker.weights, want)
    return done


@pytest.mark.slow
def test_random_pauses_of_workers_and_host_change_no_bit(tmp_path: Path) -> None:
    draw = random.Random(int(time.time()))
    done = pause_at_random(tmp_path, draw, epochs=8, seconds=8.0, longest_s=PATIENCE_S + 0.8)
    assert done


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_minutes_of_random_pauses(seed: int, tmp_path: Path) -> None:
    done = pause_at_random(tmp_path, random.Random(seed), epochs=80, seconds=90.0, longest_s=PATIENCE_S + 2.0)
    assert {"worker", "host", "both", "workers"} <= set(done), done
