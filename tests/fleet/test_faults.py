"""Kill -9 in every phase, stops, leaving and joining: the weights are those of a run that nobody left, to the bit."""

import signal
from pathlib import Path

import pytest
import torch

from potluck.events import WorkerCame, WorkerWent
from tests.fleet.faults import AT_STEP, COORDINATOR, PHASES, SHARED_PHASES, STOPS
from tests.fleet.fleet import EPOCHS, ROWS, STEPS, Fleet, Worker, assert_same, start_coordinator, wait_until
from tests.fleet.judges import plain_run
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return plain_run()


@pytest.mark.parametrize("phase", first_of(PHASES))
def test_a_worker_killed_in_any_phase_changes_no_bit(
    phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    early = phase in ("connected", "joined")
    fleet = Fleet(tmp_path, at_least=1 if early else 2)
    victim = fleet.add("victim", PHASES[phase], save_every=3)
    if phase == "saving":  # the first in is the one who saves
        wait_until(lambda: any(m.name == "victim" for m in fleet.server.core.membership.ready))
    fleet.add("survivor", save_every=3)
    weights = fleet.finish()
    assert (tmp_path / f"fired-{phase}").exists()
    assert victim.process.exitcode == -signal.SIGKILL
    assert_same(weights, expected)
    if not early:
        assert [e.name for e in fleet.events if isinstance(e, WorkerWent) and not e.polite] == ["victim"]


@pytest.mark.parametrize("phase", first_of(SHARED_PHASES))
def test_a_worker_that_shares_memory_is_killed_and_no_bit_changes(
    phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    victim = fleet.add("victim", SHARED_PHASES[phase], shared=True)
    fleet.add("survivor", shared=phase != "sent")
    assert_same(fleet.finish(), expected)
    assert (tmp_path / f"fired-{phase}").exists()
    assert victim.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("phase", ["half"])  # all of them: make chaos
def test_a_worker_stopped_beyond_patience_is_given_up_and_comes_back(
    phase: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, at_least=2, patience_s=1.5)
    fleet.add("sleeper", STOPS[phase])
    fleet.add("survivor", slow_s=0.15)
    fired = tmp_path / f"fired-{phase}"
    wait_until(fired.exists)
    wait_until(
        lambda: any(isinstance(e, WorkerWent) and "silent for" in e.reason for e in fleet.events), 15, fleet.describe
    )
    fleet.workers[0].send(signal.SIGCONT)
    wait_until(lambda: sum(isinstance(e, WorkerCame) and e.name == "sleeper" for e in fleet.events) == 2)
    assert_same(fleet.finish(), expected)


@pytest.mark.parametrize("step", first_of([1, 0, 5, STEPS - 2]))
def test_a_worker_that_joins_at_any_step_changes_no_bit(
    step: int, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", slow_s=0.1)
    fleet.wait_for_step(step)
    fleet.add("newcomer", slow_s=0.1)
    assert_same(fleet.finish(), expected)
    if 0 < step < STEPS - 2:
        late = [e for e in fleet.events if isinstance(e, WorkerCame) and e.name == "newcomer"]
        assert late and late[0].step >= step
        assert any(row["rows"] for r in fleet.records for row in r.workers if row["name"] == "newcomer")


def test_a_worker_that_leaves_politely_costs_nothing(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("leaver", slow_s=0.05)
    fleet.add("stayer", slow_s=0.05)
    fleet.wait_for_step(3)
    fleet.workers[0].send(signal.SIGUSR1)
    wait_until(lambda: any(isinstance(e, WorkerWent) for e in fleet.events))
    assert_same(fleet.finish(), expected)
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite
    assert fleet.server.core.refused.total() == 0


def test_the_last_to_leave_leaves_its_weights_behind(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", slow_s=0.05)
    fleet.wait_for_step(4)
    fleet.workers[0].send(signal.SIGUSR1)
    wait_until(lambda: not fleet.server.core.membership.members)
    fleet.add("second")
    assert_same(fleet.finish(), expected)


def test_a_run_that_everybody_died_in_goes_on_from_its_checkpoint(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    fleet = Fleet(tmp_path, patience_s=1.0)
    first = fleet.add("first", slow_s=0.05, save_every=3)
    fleet.wait_for_step(5)
    wait_until(lambda: any((tmp_path / "checkpoints").glob("step-*")))
    first.kill()
    wait_until(lambda: not fleet.server.core.membership.members)
    fleet.add("second")
    assert_same(fleet.finish(), expected)


@pytest.mark.parametrize("point", first_of(COORDINATOR))
def test_a_coordinator_killed_around_its_journal_loses_and_repeats_nothing(
    point: str, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    coordinator, invite = start_coordinator(tmp_path, fault=COORDINATOR[point], at_least=2)
    workers = [Worker(invite, tmp_path, name, None, {"slow_s": 0.02}) for name in ("a", "b")]
    try:
        coordinator.join(60)
        assert coordinator.exitcode == -signal.SIGKILL and (tmp_path / f"fired-{point}").exists()
        coordinator, _ = start_coordinator(tmp_path, port=invite.port, returning=2)
        for worker in workers:
            worker.wait()
            assert_same(worker.weights, expected)
        coordinator.join(20)
        assert not (tmp_path / "coordinator.error").exists(), (tmp_path / "coordinator.error").read_text()
    finally:
        coordinator.kill()
        for worker in workers:
            worker.process.kill()
    from potluck.fleet.journal import Journal
    from potluck.fleet.ledger import prove

    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.steps() == list(range(1, STEPS + 1))
    assert all(prove(journal.ranges(epoch), ROWS).holds for epoch in range(EPOCHS))
    journal.close()


assert 1 < AT_STEP < STEPS
