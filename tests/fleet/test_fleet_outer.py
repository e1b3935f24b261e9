"""An outer optimizer under a host: whoever comes, goes or starts again, all step along the mean with one momentum."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from potluck.agree.policy import Async, Cadence, Outer, Windowed
from potluck.events import WorkerCame
from tests.fleet.fleet import EPOCHS, STEPS, Fleet, assert_same, wait_until
from tests.fleet.test_fleet_windows import SHORT, assert_close, every_batch_takes, in_a_window, judge, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

OUTER = Outer(lr=0.6, momentum=0.8)


@pytest.mark.parametrize(
    ("policy", "count"),
    [(Cadence.published(**SHORT, outer=OUTER), 2), (Async.published(**SHORT, outer=OUTER), 3)],
    ids=["cadence", "async"],
)
def test_workers_of_unequal_speed_step_along_the_mean_of_plain_replicas(
    policy: Windowed, count: int, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    for number in range(count):
        fleet.add(f"w{number}", partial(every_batch_takes, seconds=0.01 * 3**number), policy=policy, bare=True)
    weights = fleet.finish()
    assert_close(weights, judge(fleet, outer=OUTER))
    with pytest.raises(AssertionError):  # the judge would see it if there were none, or another
        assert_close(weights, judge(fleet, outer=Outer(lr=0.6, momentum=0.7)))
    assert all(rows_of(fleet, f"w{number}") for number in range(count))
    assert fleet.server.core.refused.total() == 0


def test_nodes_do_so_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("node", policy=Cadence.published(**SHORT, outer=OUTER), bare=True)
    fleet.add("whole", policy=Cadence.published(**SHORT, outer=OUTER), bare=True)
    assert_close(fleet.finish(), judge(fleet, outer=OUTER))
    assert fleet.server.core.refused.total() == 0


def test_one_that_is_killed_and_one_that_joins_change_nothing_for_the_others(tmp_path: Path) -> None:
    """Buffers, dropout and parameters that nobody uses too. A newcomer has the momentum of all windows before."""
    policy = Async.published(anchor=2, max_anchor=2, outer=OUTER)
    options: dict[str, Any] = {"policy": policy, "epochs": 2 * EPOCHS, "steps": 2 * STEPS}
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("victim", in_a_window, **options)
    fleet.add("first", **options, slow_s=0.15, hold_at=4)
    fleet.wait_for_step(2)
    fleet.add("newcomer", **options, slow_s=0.15)
    fleet.let_in("newcomer")
    fleet.finish(epochs=2 * EPOCHS)  # the same on both, to the bit
    assert (tmp_path / "fired-window").exists()
    (came,) = [e for e in fleet.events if isinstance(e, WorkerCame) and e.name == "newcomer"]
    assert came.step >= 2 and any(rows_of(fleet, "newcomer"))
    assert fleet.server.core.refused.total() == 0


def run_alone(folder: Path, *, is_killed: bool) -> Any:
    folder.mkdir()
    policy = Cadence.published(**SHORT, outer=OUTER)
    fleet = Fleet(folder, patience_s=1.0)
    first = fleet.add("first", policy=policy, save_every=2, slow_s=0.2 * is_killed)
    if is_killed:
        fleet.wait_for_step(3)
        wait_until(lambda: any((folder / "checkpoints").glob("step-*")))
        first.kill()
        wait_until(lambda: not fleet.server.core.membership.members)
        fleet.add("second", policy=policy)
    return fleet.finish()


def test_a_run_that_goes_on_from_its_checkpoint_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    assert_same(run_alone(tmp_path / "killed", is_killed=True), run_alone(tmp_path / "whole", is_killed=False))
