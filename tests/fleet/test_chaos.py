"""The long ones, for `make chaos`: every phase in larger fleets, every stop, and minutes of random ends."""

import random
import signal
import time
from pathlib import Path

import pytest
import torch

from potluck.fleet.journal import Journal
from potluck.fleet.ledger import prove
from tests.fleet import soak
from tests.fleet.faults import PHASES, STOPS
from tests.fleet.fleet import ROWS, STEPS, Fleet, Worker, assert_same, start_coordinator, wait_until
from tests.fleet.judges import plain_run
from tests.fleet.seeds import seeds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LATER = [phase for phase in PHASES if phase not in ("connected", "joined")]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


@pytest.mark.parametrize("phase", LATER)
@pytest.mark.parametrize("other", ["forward", "half", "average"])
def test_two_of_four_killed_in_any_two_phases(
    phase: str, other: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=4)
    fleet.add("victim", PHASES[phase], save_every=3)
    wait_until(lambda: bool(fleet.server.core.membership.ready))
    fleet.add("second victim", PHASES[other], save_every=3)
    fleet.add("a", save_every=3)
    fleet.add("b", save_every=3)
    assert_same(fleet.finish(), expected)
    assert (tmp_path / f"fired-{phase}").exists() or (tmp_path / f"fired-{other}").exists()


@pytest.mark.parametrize("phase", LATER)
def test_stopped_beyond_patience_in_any_phase(phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    fleet = Fleet(tmp_path, at_least=2, patience_s=1.5)
    fleet.add("sleeper", STOPS[phase], save_every=3)
    wait_until(lambda: bool(fleet.server.core.membership.ready))
    fleet.add("survivor", slow_s=0.2, save_every=3)
    wait_until((tmp_path / f"fired-{phase}").exists)
    wait_until(lambda: any("silent for" in getattr(e, "reason", "") for e in fleet.events), 20, fleet.describe)
    fleet.workers[0].send(signal.SIGCONT)
    assert_same(fleet.finish(), expected)


@pytest.mark.parametrize("phase", LATER)
def test_one_joins_while_another_dies_in_any_phase(
    phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("victim", PHASES[phase], save_every=3, slow_s=0.05)
    wait_until(lambda: bool(fleet.server.core.membership.ready))
    fleet.add("survivor", slow_s=0.05, save_every=3)
    fleet.wait_for_step(2)
    fleet.add("newcomer", slow_s=0.05, save_every=3)
    assert_same(fleet.finish(), expected)


@pytest.mark.timeout(soak.LONGEST_S)
@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("number", range(4))
def test_a_random_schedule_of_real_processes(policy: str, number: int) -> None:
    """As many more as one likes: make soak."""
    soak.live(seeds(4)[0] + number, policy)


@pytest.mark.parametrize("seed", range(3))
def test_a_minute_of_random_ends(seed: int, tmp_path: Path) -> None:
    """Workers and the coordinator are killed, stopped for a moment, and started, at random."""
    epochs = 60
    steps = epochs * STEPS // 2
    draw = random.Random(seed)
    options = {"slow_s": 0.02, "epochs": epochs, "steps": steps, "save_every": 7}
    coordinator, invite = start_coordinator(tmp_path)
    workers = [Worker(invite, tmp_path, f"w{number}", None, options) for number in range(3)]
    done: list[str] = []
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline and coordinator.is_alive():
        time.sleep(draw.uniform(0.2, 1.0))
        alive = [worker for worker in workers if worker.process.is_alive()]
        match draw.randrange(5):
            case 0 if len(alive) > 1:
                draw.choice(alive).kill()
                done.append("worker killed")
            case 1 | 2 if len(alive) < 4:
                workers.append(Worker(invite, tmp_path, f"w{len(workers)}", None, options))
                done.append("worker started")
            case 3:
                coordinator.kill()
                coordinator.join(10)
                coordinator, _ = start_coordinator(tmp_path, port=invite.port)
                done.append("coordinator killed")
            case 4 if alive:
                sleeper = draw.choice(alive)
                sleeper.send(signal.SIGSTOP)
                time.sleep(0.3)
                sleeper.send(signal.SIGCONT)
                done.append("worker stopped")
    coordinator.join(150)
    assert not coordinator.is_alive(), "the run has not ended"
    assert {"worker killed", "worker started", "coordinator killed", "worker stopped"} <= set(done), done
    for worker in workers:
        worker.process.join(20)
    finished = [worker for worker in workers if (tmp_path / f"{worker.name}.pt").exists()]
    assert finished
    expected = plain_run(epochs)
    for worker in finished:
        assert_same(worker.weights, expected)
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.steps() == list(range(1, steps + 1))
    assert all(prove(journal.ranges(epoch), ROWS).holds for epoch in range(epochs))
    journal.close()
