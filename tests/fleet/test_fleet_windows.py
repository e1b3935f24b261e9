"""Windows under a host that change their kind, workers of other speeds, and settings that do not fit."""

import math
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from potluck.agree.costs import WindowCosts
from potluck.agree.policy import Async, Auto, Cadence
from potluck.events import Decided, Stalled, WorkerCame
from tests.fleet.faults import at, while_sending
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, STEPS, Fleet, wait_until
from tests.fleet.judges import kinds, rows_of
from tests.fleet.kinds import BOTH, FIRST, SHORT

pytestmark = pytest.mark.timeout(60)
ALL_FIRST = math.ceil(FIRST * EPOCHS * ROWS / BATCH)


def test_whoever_is_lost_or_comes_in_either_phase_all_agree(tmp_path: Path) -> None:
    """Buffers, dropout and parameters that nobody uses too."""
    options: dict[str, Any] = {"policy": BOTH, "epochs": 2 * EPOCHS, "steps": 2 * STEPS}
    ends = (("first", 2), ("second", 2 * ALL_FIRST + 2))
    fleet = Fleet(tmp_path, at_least=3)
    victims = [fleet.add(name, partial(while_sending, step=step), **options) for name, step in ends]
    fleet.add("stays", **options, slow_s=0.15, hold_at=3)
    fleet.wait_for_step(2)
    fleet.add("newcomer", **options, hold_at=2 * ALL_FIRST + 1, hold_for="late")
    fleet.let_in("newcomer")
    fleet.wait_for_step(2 * ALL_FIRST + 1)
    wait_until(lambda: victims[1].process.exitcode is not None)
    fleet.add("late", **options)
    fleet.let_in("late", "late")
    fleet.finish(epochs=2 * EPOCHS)
    assert (tmp_path / "fired-sending-2").exists() and (tmp_path / f"fired-sending-{2 * ALL_FIRST + 2}").exists()
    assert all(victim.process.exitcode == -signal.SIGKILL for victim in victims)
    came = {event.name: event.step for event in fleet.events if isinstance(event, WorkerCame)}
    assert 2 <= came["newcomer"] <= 2 * ALL_FIRST < came["late"], came
    assert any(rows_of(fleet, "newcomer")) and any(rows_of(fleet, "late"))
    found = kinds(fleet)
    assert found[2] and not found[2 * ALL_FIRST + 2] and fleet.server.core.refused.total() == 0


def in_turns(costs: WindowCosts, most: int) -> str | None:
    """Three steps that all take together, and then two windows."""
    calls = costs.calls = getattr(costs, "calls", 0) + 1  # type: ignore[attr-defined]
    costs.anchor = int(calls % 5 in (3, 4))
    return f"This is call {calls}" if calls % 5 in (0, 3) else None


@pytest.mark.slow
@pytest.mark.parametrize("sgd", [False, True], ids=["adamw", "sgd"])
def test_whoever_comes_and_goes_under_auto_optimizers_stay_alike(
    sgd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each window all step together again, and would drift apart if one had other moments. Buffers, dropout and
    parameters that nobody uses too."""
    monkeypatch.setattr(WindowCosts, "decide", in_turns)
    options: dict[str, Any] = {"policy": Auto(together=0.0), "epochs": 2 * EPOCHS, "steps": 2 * STEPS, "sgd": sgd}
    fleet = Fleet(tmp_path, at_least=2)
    victim = fleet.add("victim", partial(while_sending, step=4), **options)
    fleet.add("stays", **options, slow_s=0.15, hold_at=7)
    wait_until(lambda: victim.process.exitcode is not None)
    fleet.add_node("node", **options, hold_at=14, hold_for="late")
    fleet.let_in("node")
    fleet.add("late", **options)
    fleet.let_in("late", "late")
    fleet.finish(epochs=2 * EPOCHS)  # the same on all, to the bit
    assert (tmp_path / "fired-sending-4").exists()
    found = list(kinds(fleet).values())
    assert found[:2] == [True, True] and not found[2] and len([1 for a, b in pairwise(found) if b > a]) >= 3, found
    assert any(rows_of(fleet, "node")) and any(rows_of(fleet, "late"))
    assert fleet.server.core.refused.total() == 0 and not any(isinstance(e, Stalled) for e in fleet.events)


def every_batch_takes(place: Path, seconds: float) -> None:
    at("batch", lambda step, **what: time.sleep(seconds))


def test_a_slow_worker_soon_gets_fewer_rows_in_proportion(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    policy = Cadence.published(anchor=1, max_anchor=1)
    fleet.add("fast", partial(every_batch_takes, seconds=0.03), policy=policy)
    fleet.add("slow", partial(every_batch_takes, seconds=0.12), policy=policy)
    fleet.finish()
    fast, slow = rows_of(fleet, "fast"), rows_of(fleet, "slow")
    assert fast[0] == slow[0]
    assert 1.5 * sum(slow[2:]) < sum(fast[2:]) < 8 * sum(slow[2:]), (fast, slow)  # 4, if quiet
    reasons = [e.reason for e in fleet.events if isinstance(e, Decided)]
    assert any(reason.startswith("slow has ") and ": it does " in reason for reason in reasons), reasons


def test_another_policy_or_other_settings_are_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add("first", policy=Cadence.published(**SHORT), hold_at=2)
    fleet.wait_for_step(1)
    others = {
        "other": Cadence.published(anchor=7),
        "another": Async.published(**SHORT),
        "third": Cadence.published(**SHORT, max_batch_diff=3),
    }
    for name, policy in others.items():
        worker = fleet.add(name, policy=policy)
        worker.process.join(20)
        fleet.workers.remove(worker)
    told = [(tmp_path / f"{name}.error").read_text() for name in others]
    assert "This run has policy.anchor = 1, and you have 7. Build the same" in told[0]
    assert "This run's policy is cadence, and yours is async. Build the same" in told[1]
    assert "This run has policy.max_batch_diff = None, and you have 3. Build the same" in told[2]
    assert fleet.server.core.refused == {"wrong model": 3}
