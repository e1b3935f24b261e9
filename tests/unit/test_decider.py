"""What a Decider decides, of which a group and a host make their plans alike."""

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from potluck.agree.costs import WindowCosts
from potluck.agree.decider import Decider
from potluck.agree.policy import Auto, Cadence, Windowed
from potluck.agree.records import Position, Range, Report, RunTerms

NAMES = ["a", "b"]
EARLY = Cadence(together=0.5)
NEVER = Cadence(together=0.0)
TERMS = RunTerms(rows=100, batch=8, turns=2, is_sync=False)


def begin(decider: Decider, policy: Windowed, at: Position, left: Sequence[Range] = ((0, 100),), limit: int = 0) -> int:
    return decider.begin(policy, NAMES, at, TERMS, left, rows_limit=limit)


def test_a_step_of_all_ends_where_a_batch_the_run_or_a_range_does() -> None:
    for at, left, limit, rows in (
        (Position(row=0), [(0, 100)], 1000, 8),
        (Position(row=3, rows_seen=3), [(3, 100)], 1000, 5),
        (Position(row=98, rows_seen=98), [(98, 100)], 1000, 2),
        (Position(row=32, rows_seen=6), [(32, 100)], 10, 4),
        (Position(row=50, rows_seen=50), [(4, 7), (53, 100)], 1000, 3),
    ):
        policy = Cadence(together=1.0)
        assert begin(Decider(), policy, at, left, limit) == rows


def test_the_first_share_is_of_all_and_only_of_a_run_whose_length_is_known() -> None:
    assert begin(Decider(), EARLY, Position(rows_seen=49), limit=100)
    assert not begin(Decider(), EARLY, Position(rows_seen=50), limit=100)
    assert not begin(Decider(), EARLY, Position())
    assert not Decider().begin(EARLY, NAMES, Position(), TERMS, [(0, 9)], rows_limit=100, may_step_together=False)


def test_a_batch_in_the_middle_of_its_turns_is_finished_by_all_under_any_policy() -> None:
    for policy in (EARLY, NEVER, Auto()):
        decider, at = Decider(alike_at=-1), Position(version=5, step=5, row=8, turn=1)
        assert begin(decider, policy, at, [(8, 100)]) == 8
        one = replace(TERMS, turns=1)
        assert not decider.begin(policy, NAMES, at, one, [(8, 100)], rows_limit=None), "its other optimizer is gone"


@pytest.mark.parametrize("averages", [True, False])
def test_one_that_chooses_returns_to_steps_of_all_only_with_optimizers_that_hold_the_same(averages: bool) -> None:
    anchors = iter([2, 0, 0, 0])
    decider, reports = Decider(), [Report(busy_s=1.0, batches=2, rows=8)] * 2
    with mock.patch.object(WindowCosts, "decide", lambda costs, most: setattr(costs, "anchor", next(anchors))):
        assert not begin(decider, Auto(), Position())
        decider.alone()
        assert not begin(decider, Auto(), Position()), "a window that is begun again has moved them"
        decider.alone()
        decider.observe(reports, 0.1, averages_moments=averages)
        assert bool(begin(decider, Auto(), Position(version=1))) is averages
        decider.know_alike(7)
        assert begin(decider, Auto(), Position(version=7)) and not begin(decider, Auto(), Position(version=8))
        decider.know_alike(-1)
        assert not begin(decider, Auto(), Position(version=7))


def test_a_step_of_all_is_in_the_parts_that_are_given_or_shared_by_speed() -> None:
    decider = Decider()
    assert decider.together(begin(decider, EARLY, Position(), limit=100)).rows == (4, 4)
    assert decider.together(8, [6, 2]).rows == (6, 2)
    decider.alone()
    decider.observe([Report(busy_s=1.0, batches=3), Report(busy_s=1.0, batches=1)], 0.1, averages_moments=False)
    plan = decider.together(begin(decider, EARLY, Position(), limit=100))
    assert plan.rows == (6, 2) and plan.together
    assert plan.reason == (
        "b has 25 % of the rows: it does 4 rows/s, and a 12: 6 and 2 rows. In the first 50 % of the run all agree in"
        " every step."
    )


def test_nothing_is_learned_of_a_round_in_which_nobody_computed() -> None:
    decider = Decider()
    for is_together in (True, False):
        begin(decider, EARLY, Position(), limit=100)
        before = decider.alone()
        if is_together:
            decider.together(8)
        decider.observe([Report(rows=4)] * 2, 9.0, averages_moments=True)
        begin(decider, EARLY, Position(), limit=100)
        assert decider.alone() == before


def test_the_event_says_where_the_run_stands_and_the_drift_that_was_farthest() -> None:
    decider, told = Decider(), [Report(batches=1, busy_s=1.0, figures={"divergence": drift}) for drift in (0.25, 0.5)]
    for reports, drift in ((told, 0.5), ([Report()] * 2, 0.0)):
        begin(decider, NEVER, Position(version=3, step=9))
        plan = decider.alone()
        decider.observe(reports, 0.1, averages_moments=True)
        event = decider.decided(plan)
        assert (event.step, event.version, event.divergence) == (9, 3, drift)
        assert (event.rows, event.anchor, event.reason) == (plan.rows, plan.anchor, plan.reason)
