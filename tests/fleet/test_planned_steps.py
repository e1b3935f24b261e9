"""The coordinator plans steps that all take together between windows, on a virtual clock."""

from typing import Any

import pytest

from potluck.agree.policy import Async, Auto, Cadence, Windowed
from potluck.events import Decided, WorkerWent
from potluck.fleet.description import Description, settings_of
from potluck.wire.messages import Work
from tests.fleet.virtual import BATCH, ROWS, FaultScript, Fleet, described, undisturbed

pytestmark = pytest.mark.timeout(30)

EPOCHS = 4


def windowed(policy: Windowed, **changes: Any) -> Description:
    values = {"policy": policy.kind, "settings": settings_of(policy), "rows_limit": EPOCHS * ROWS}
    return described(**(values | changes))


def kinds(run: Fleet) -> list[bool]:
    """Of each step: whether all took it together."""
    return [decided.anchor == 0 for decided in run.told(Decided)]


@pytest.mark.parametrize("policy", [Cadence.published(anchor=1, together=0.3), Async.published(anchor=1, together=0.3)])
def test_the_first_share_of_the_rows_is_taken_together(policy: Windowed) -> None:
    run = Fleet(workers=3, description=windowed(policy), epochs=EPOCHS).finish()
    first = 4  # of 16, 16 and 5 rows: 37 are less than three tenths of 148, and 53 are not
    assert kinds(run) == [True] * first + [False] * (len(run.records) - first)
    assert [record.rows for record in run.records[:first]] == [16, 16, 5, 16]
    assert run.told(Decided)[0].reason == (
        "Nothing was measured yet, so all count as equally fast: 6, 6 and 4 rows. In the first 30 % of the run all"
        " agree in every step."
    )
    works = [item for worker in run.workers.values() for item in worker.line.received if isinstance(item, Work)]
    assert all(
        (work.batch == 0) == (work.step <= first) and (work.batch > 0) == (len(work.sizes) > 0) for work in works
    )
    assert run.core.refused.total() == 0


def test_a_run_whose_length_nobody_knows_has_no_first_share() -> None:
    run = Fleet(workers=2, description=windowed(Cadence.published(together=0.5), rows_limit=0), epochs=EPOCHS).finish()
    assert not any(kinds(run))


@pytest.mark.parametrize("step", [2, 6])
@pytest.mark.parametrize("phase", ["forward", "backward", "half", "sent", "committed", "applied"])
def test_a_worker_lost_in_either_kind_of_step_loses_nothing(phase: str, step: int) -> None:
    faults = FaultScript().kill("w1", at_step=step, phase=phase)
    policy = Cadence.published(anchor=1, max_anchor=1, together=0.3)
    run = Fleet(workers=3, faults=faults, description=windowed(policy), epochs=EPOCHS)
    run.run_until(lambda: all(worker.dead or worker.state.step >= 4 for worker in run.workers.values()))
    assert all(
        worker.dead or worker.state.step > 4 or worker.weights == undisturbed(4) for worker in run.workers.values()
    )
    run.finish()
    assert faults.fired == ["kill w1"] and run.core.refused.total() == 0 and run.restores == 0
    assert [went.name for went in run.told(WorkerWent) if not went.polite] == ["w1"]


@pytest.mark.parametrize("when", [0.5, 1.2, 2.0])
def test_a_newcomer_that_replays_averages_tells_one_kind_from_the_other(when: float) -> None:
    policy = Cadence.published(anchor=1, max_anchor=1, together=0.3)
    run = Fleet(workers=2, description=windowed(policy), epochs=EPOCHS)
    run.add("late", at_s=when, description=windowed(policy), latency_s=0.15, pack_s=0.4)
    run.finish()
    assert run.core.refused.total() == 0


def test_auto_leaves_sync_where_agreeing_is_dear_and_says_why() -> None:
    """A long way to the host."""
    options: dict[str, Any] = {"description": windowed(Auto(together=0.1)), "batch_s": 0.02, "slice_s": 0.005}
    run = Fleet(workers=2, **options, latency_s=0.1, epochs=EPOCHS).finish()
    found = kinds(run)
    assert found[0] and not found[-1]
    told = run.told(Decided)[found.index(False)]
    assert "Agreeing in every step would add " in told.reason and "averaging only every " in told.reason


def test_auto_says_by_whose_speed_the_rows_of_a_step_are_shared() -> None:
    run = Fleet(workers=0, at_least=2, epochs=EPOCHS)
    for name, slice_s in (("fast", 1.0), ("slow", 3.0)):
        run.add(name, description=windowed(Auto(together=0.1)), slice_s=slice_s, latency_s=0.0001)
    run.finish()
    first, *others = [told for told in run.told(Decided) if sum(told.rows) == BATCH]
    assert first.reason.startswith("Nothing was measured yet, so all count as equally fast: 8 and 8 rows.")
    assert others and all(told.rows == (12, 4) for told in others[:3]) and all(kinds(run))
    assert others[0].reason.startswith("slow has 25 % of the rows: it does 0.667 rows/s, and fast 2: 12 and 4 rows. ")
    assert not any("Nothing was measured" in told.reason for told in others)


def test_auto_stays_where_agreeing_costs_nothing() -> None:
    options: dict[str, Any] = {"description": windowed(Auto(together=0.1)), "slice_s": 1.0}
    run = Fleet(workers=2, **options, latency_s=0.0001, epochs=EPOCHS).finish()
    assert all(kinds(run)) and len(run.records) == EPOCHS * -(-ROWS // BATCH)
    assert all(worker.weights == undisturbed(len(run.records)) for worker in run.workers.values())


def test_after_a_restart_auto_begins_with_a_window() -> None:
    """What the optimizers of those who come back have done meanwhile, nobody knows; a window makes them alike."""
    options: dict[str, Any] = {"description": windowed(Auto(together=0.1)), "slice_s": 0.5}
    run = Fleet(workers=2, **options, latency_s=0.0001, epochs=EPOCHS)
    run.run_until(lambda: run.standing().version >= 5)
    before = len(kinds(run))
    run.crash_host()
    run.finish()
    assert all(kinds(run)[:before]) and not kinds(run)[before] and any(kinds(run)[before + 1 :])
