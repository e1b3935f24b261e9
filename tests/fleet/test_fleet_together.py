"""Cadence and Async that begin as Sync under a host: one phase after the other, whoever comes and goes."""

import math
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.agree.costs import WindowCosts
from potluck.agree.policy import Async, Auto, Cadence, Windowed
from potluck.events import Decided, Stalled, WorkerCame
from tests.fleet.faults import after_recording, at
from tests.fleet.fleet import (
    BATCH,
    EPOCHS,
    ROWS,
    STEPS,
    Fleet,
    die,
    wait_until,
)
from tests.fleet.judges import assert_close, cosine, judge, kinds, rows_of
from tests.fleet.test_fleet_windows import SHORT, outlive_a_host
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)

FIRST = 0.3
"""Of 424 rows: four batches of 32."""
ALL_FIRST = math.ceil(FIRST * EPOCHS * ROWS / BATCH)


@pytest.mark.parametrize(
    ("policy", "count", "options"),
    first_of(
        [
            (Cadence.published(**SHORT, together=FIRST), 1, {}),
            (Cadence.published(**SHORT, together=FIRST), 3, {"shared": True}),
            (Async.published(**SHORT, together=FIRST), 2, {}),
            (Cadence.published(**SHORT, together=1.0), 2, {"shared": True}),
        ]
    ),
    ids=["one", "cadence", "async", "sync"],
)
def test_the_first_share_is_sync_and_the_rest_windows(
    policy: Windowed, count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    for number in range(count):
        fleet.add(f"w{number}", policy=policy, bare=True, **options)
    weights = fleet.finish()  # the same on all of them, and each row used once
    found = list(kinds(fleet).values())
    assert found == sorted(found, reverse=True) and sum(found) == (ALL_FIRST if policy.together < 1 else STEPS)
    assert_close(weights, judge(fleet))
    decided = [event for event in fleet.events if isinstance(event, Decided)]
    share = f"{policy.together:.0%}"
    assert decided[0].reason.startswith(f"In the first {share} of the run all agree in every step: ")
    assert all(rows_of(fleet, f"w{number}") for number in range(count))
    assert fleet.server.core.refused.total() == 0
    assert fleet.server.core.steps_done == STEPS


def test_a_node_takes_part_in_both(tmp_path: Path) -> None:
    policy = Cadence.published(**SHORT, together=FIRST)
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("node", policy=policy, bare=True)
    fleet.add("whole", policy=policy, bare=True)
    assert_close(fleet.finish(), judge(fleet))
    assert sum(kinds(fleet).values()) == ALL_FIRST and fleet.server.core.refused.total() == 0


def killed_at(place: Path, step: int) -> None:
    """Some of the parts of its gradient, or of what it changed, have left."""

    def fatal(now: int, worker: Any, part: int, gradients: Any) -> None:
        if now == step and part == 1:
            worker.client.flush()
            die(place, f"step{step}")

    at("part", fatal)


def test_whoever_is_lost_or_comes_in_either_phase_all_agree(tmp_path: Path) -> None:
    """Buffers, dropout and parameters that nobody uses too."""
    policy = Cadence.published(**SHORT, together=FIRST)
    options: dict[str, Any] = {"policy": policy, "epochs": 2 * EPOCHS, "steps": 2 * STEPS}
    ends = (("first", 2), ("second", 2 * ALL_FIRST + 2))
    fleet = Fleet(tmp_path, at_least=3)
    victims = [fleet.add(name, partial(killed_at, step=step), **options) for name, step in ends]
    fleet.add("stays", **options, slow_s=0.15, hold_at=3)
    fleet.wait_for_step(2)
    fleet.add("newcomer", **options, hold_at=2 * ALL_FIRST + 1, hold_for="late")
    fleet.let_in("newcomer")
    fleet.wait_for_step(2 * ALL_FIRST + 1)
    wait_until(lambda: victims[1].process.exitcode is not None)
    fleet.add("late", **options)
    fleet.let_in("late", "late")
    fleet.finish(epochs=2 * EPOCHS)
    assert (tmp_path / "fired-step2").exists() and (tmp_path / f"fired-step{2 * ALL_FIRST + 2}").exists()
    assert all(victim.process.exitcode == -signal.SIGKILL for victim in victims)
    came = {event.name: event.step for event in fleet.events if isinstance(event, WorkerCame)}
    assert 2 <= came["newcomer"] <= 2 * ALL_FIRST < came["late"], came
    assert any(rows_of(fleet, "newcomer")) and any(rows_of(fleet, "late"))
    found = kinds(fleet)
    assert found[2] and not found[2 * ALL_FIRST + 2] and fleet.server.core.refused.total() == 0


def test_the_bits_of_the_first_share_do_not_depend_on_who_is_there(tmp_path: Path) -> None:
    policy = Cadence.published(**SHORT, together=1.0)
    found = []
    for number in (1, 3):
        place = tmp_path / str(number)
        place.mkdir()
        fleet = Fleet(place, at_least=number)
        for worker in range(number):
            fleet.add(f"w{worker}", partial(killed_at, step=2) if worker == 1 else None, policy=policy)
        found.append(fleet.finish())
        assert (place / "fired-step2").exists() == (number == 3)
    for name, tensor in found[0].items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), found[1][name].view(-1).view(torch.uint8)), name


# What optimizers keep


@pytest.mark.parametrize(
    ("policy", "count", "options"),
    first_of(
        [
            (Cadence.published(**SHORT, moments=True), 2, {}),
            (Async.published(anchor=2, max_anchor=3, moments=True), 2, {"schedule": cosine}),
            (Cadence.published(**SHORT, moments=True, together=FIRST), 3, {"schedule": cosine, "shared": True}),
            (Auto(together=0.2), 2, {"schedule": cosine}),
        ]
    ),
    ids=["cadence", "async", "both", "auto"],
)
def test_moments_are_averaged_and_steps_are_longer_as_the_rate_falls(
    policy: Windowed, count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    for number in range(count):
        fleet.add(f"w{number}", policy=policy, bare=True, **options)
    weights = fleet.finish()
    falls = "schedule" in options
    assert_close(weights, judge(fleet, moments=True, falls=falls))
    if not all(kinds(fleet).values()):
        with pytest.raises(AssertionError):  # the judge would see it if they were not
            assert_close(weights, judge(fleet, falls=falls))
    assert fleet.server.core.refused.total() == 0


def test_a_node_averages_its_moments_with_a_whole_replica(tmp_path: Path) -> None:
    policy = Cadence.published(**SHORT, moments=True, together=FIRST)
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("node", policy=policy, bare=True, schedule=cosine)
    fleet.add("whole", policy=policy, bare=True, schedule=cosine)
    assert_close(fleet.finish(), judge(fleet, moments=True, falls=True))
    assert sum(kinds(fleet).values()) == ALL_FIRST and fleet.server.core.refused.total() == 0


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
    victim = fleet.add("victim", partial(killed_at, step=4), **options)
    fleet.add("stays", **options, slow_s=0.15, hold_at=7)
    wait_until(lambda: victim.process.exitcode is not None)
    fleet.add_node("node", **options, hold_at=14, hold_for="late")
    fleet.let_in("node")
    fleet.add("late", **options)
    fleet.let_in("late", "late")
    fleet.finish(epochs=2 * EPOCHS)  # the same on all, to the bit
    assert (tmp_path / "fired-step4").exists()
    found = list(kinds(fleet).values())
    assert found[:2] == [True, True] and not found[2] and len([1 for a, b in pairwise(found) if b > a]) >= 3, found
    assert any(rows_of(fleet, "node")) and any(rows_of(fleet, "late"))
    assert fleet.server.core.refused.total() == 0 and not any(isinstance(e, Stalled) for e in fleet.events)


def test_slices_that_a_host_took_to_its_end_are_a_window_of_the_next_one(tmp_path: Path) -> None:
    """The host dies when all have sent their slices of the second step, which nobody has applied. To the next one it is
    a window: what was computed of it is forgotten."""
    outlive_a_host(tmp_path, partial(after_recording, step=2), {"policy": Auto(together=0.0), "slow_s": 0.02})
