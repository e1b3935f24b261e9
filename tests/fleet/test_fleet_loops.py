"""Loops of one's own under a host: as many epochs as they ask for, and a scheduler that is where the run is."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import potluck
from potluck.events import Stalled, WorkerCame, WorkerWent
from tests.fleet.fleet import EPOCHS, ROWS, STEPS, Fleet, assert_same, wait_until
from tests.fleet.judges import plain_run
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)
COSINE = partial(CosineAnnealingLR, T_max=STEPS)
ONE_CYCLE = partial(OneCycleLR, max_lr=0.02, total_steps=STEPS)


@pytest.mark.slow
def test_a_late_joiner_trains_what_is_left_when_the_first_is_killed(tmp_path: Path) -> None:
    """Its own passes are fewer than the run's epochs; its scheduler begins in the middle."""
    fleet = Fleet(tmp_path)
    first = fleet.add("first", slow_s=0.15, schedule=ONE_CYCLE)
    fleet.wait_for_step(8)  # of 14: in the second epoch
    fleet.add("late", slow_s=0.15, schedule=ONE_CYCLE)
    wait_until(lambda: any(isinstance(e, WorkerCame) and e.name == "late" for e in fleet.events))
    first.kill()
    weights = fleet.finish()
    assert [e.name for e in fleet.events if isinstance(e, WorkerWent) and not e.polite][:1] == ["first"]
    assert fleet.server.core.standing.rows_seen == EPOCHS * ROWS
    assert_same(weights, plain_run(schedule=ONE_CYCLE))
    assert not [e for e in fleet.events if isinstance(e, Stalled) and "not the others'" in e.doing]


@pytest.mark.slow
def test_a_loop_that_counts_by_itself_is_refused_where_it_would_train_too_much(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", slow_s=0.3, epochs=3, steps=3 * STEPS // EPOCHS, counts_itself=True)
    fleet.wait_for_step(8)  # in the second of three
    late = fleet.add("late", epochs=3, counts_itself=True, slow_s=0.1)
    wait_until((tmp_path / "late.error").exists)
    said = (tmp_path / "late.error").read_text()
    assert "ConfigError" in said and "for epoch in fleet.epochs(n)" in said
    late.process.join(10)
    (tmp_path / "late.error").unlink()
    fleet.finish(epochs=3)
    assert fleet.server.core.standing.epoch == 3, "the others were not disturbed"


@pytest.mark.slow
def test_a_scheduler_that_a_late_joiner_starts_anew_is_not_fed_weights_for_ever(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", by_hand, slow_s=0.05, epochs=6, steps=6 * STEPS // EPOCHS)
    fleet.wait_for_step(4)
    late = fleet.add("late", by_hand, slow_s=0.05, epochs=6)
    wait_until((tmp_path / "late.error").exists, 60)
    said = (tmp_path / "late.error").read_text()
    assert "ConfigError" in said and "prepare(..., scheduler=scheduler)" in said
    late.process.join(10)
    (tmp_path / "late.error").unlink()
    fleet.finish(epochs=6)


def by_hand(place: Path) -> None:
    """A loop that steps its scheduler after each step, as one did before prepare() took it."""
    from potluck.engine.engine import Engine

    prepare = Engine.prepare

    def prepared(engine: Any, model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine.after_step.append(scheduler.step)
        return prepare(engine, model, optimizer, *rest, **options)

    Engine.prepare = prepared  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "policy",
    first_of([potluck.Cadence.published(anchor=1, max_anchor=2), potluck.Async.published(anchor=1, max_anchor=2)]),
)
def test_windows_under_a_host_end_with_the_last_rate(tmp_path: Path, policy: Any) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    options = {"policy": policy, "schedule": COSINE, "slow_s": 0.05, "steps": STEPS}
    victim = fleet.add("victim", **options)
    fleet.add("survivor", **options)
    fleet.wait_for_step(2)
    victim.kill()
    fleet.wait_for_step(3)
    fleet.add("late", **options)
    fleet.finish()
    assert fleet.server.core.standing.rows_seen == EPOCHS * ROWS
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    kept = json.loads((newest / "manifest.json").read_text())["body"]["scheduler"]
    assert kept["steps"] == STEPS and kept["class"] == "CosineAnnealingLR"
    assert kept["groups"]["list"][0]["dict"]["lr"] == pytest.approx(0.0, abs=1e-9)
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    scheduler = COSINE(plain)
    rates = [0.01]
    for _ in range(STEPS):
        plain.step()
        scheduler.step()
        rates.append(plain.param_groups[0]["lr"])
    for told in fleet.rates:
        assert min(abs(told - rate) for rate in rates) < 1e-9, "each is the rate of some step of the run"


def test_a_host_keeps_a_checkpoint_of_its_own_accord_and_its_last_worker_may_be_killed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, patience_s=2.0)
    first = fleet.add("first", keep_often, slow_s=0.1, schedule=COSINE)
    wait_until(lambda: any((tmp_path / "checkpoints").glob("step-*")))
    first.kill()
    wait_until(lambda: any(isinstance(e, WorkerWent) for e in fleet.events))
    fleet.add("second", schedule=COSINE)
    assert_same(fleet.finish(), plain_run(schedule=COSINE))


def keep_often(place: Path) -> None:
    from potluck.fleet import member

    member.KEEP_FIRST_S = member.KEEP_EVERY_S = member.KEEP_SHARE = 0


@pytest.mark.parametrize("counts_itself", first_of([False, True]))
def test_a_loop_that_is_asked_to_leave_does_so_politely(tmp_path: Path, counts_itself: bool) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    leaver = fleet.add("leaver", slow_s=0.1, counts_itself=counts_itself)
    fleet.add("other", slow_s=0.1, counts_itself=counts_itself)
    fleet.wait_for_step(3)
    leaver.send(signal.SIGINT)
    wait_until((tmp_path / "leaver.interrupted").exists)
    assert "it continues without this worker" in (tmp_path / "leaver.interrupted").read_text()
    assert_same(fleet.finish(), plain_run())
    went = {e.name: e.polite for e in fleet.events if isinstance(e, WorkerWent)}
    assert went["leaver"]
