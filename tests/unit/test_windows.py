"""What a window is made of, and why: every decision carries a sentence."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.agree.policy import ApplyPolicy, Async, Cadence, Sync
from potluck.agree.records import Report
from potluck.agree.shares import share_out
from potluck.agree.windows import Divergence, RowPool, WindowPlan, WindowPlanner, rows_left_after
from potluck.data.plan import even_batches
from potluck.errors import ConfigError

MANY = 1 << 40


def measured(policy: Cadence | Async, *ms: float, sync_s: float = 0.0) -> WindowPlanner:
    windows = WindowPlanner(policy, [f"worker {rank}" for rank in range(len(ms))])
    windows.report([Report(busy_s=ms / 100, batches=10) for ms in ms], sync_s)
    return windows


def test_before_anything_is_measured_all_do_the_same_and_it_is_said() -> None:
    decision = WindowPlanner(Cadence.published(), ["a", "b"]).decide(MANY, 4)
    assert decision == WindowPlan(
        rows=(8, 8),
        spare=(0, 0),
        until_s=None,
        anchor=10,
        reason="Nothing was measured yet, so all count as equally fast. Until the next average they do 2 and 2"
        " batches.",
    )


def test_the_slowest_anchors_and_the_others_fill_its_time() -> None:
    windows = WindowPlanner(Cadence.published(), ["worker 0", "worker 1"])
    windows.decide(MANY, 4)
    windows.report([Report(busy_s=0.1, batches=10), Report(busy_s=0.3, batches=10)], 0.0)
    decision = windows.decide(MANY, 4)
    assert decision.rows == (120, 40) and decision.until_s == pytest.approx(0.3)
    assert decision.reason == (
        "worker 1 has 25 % of the rows: it does 133 rows/s, and worker 0 400. Until the next average they do 30 and 10"
        " batches."
    )
    assert decision.spare == (28, 8)


def test_async_ends_by_counts_and_cadence_by_the_clock() -> None:
    decision = measured(Async.published(), 10.0, 30.0).decide(MANY, 4)
    assert decision.until_s is None
    assert decision.spare == (28, 0)  # the fast one goes on until the slow one is done, and not the other way round
    assert measured(Cadence.published(), 10.0, 30.0).decide(MANY, 4).until_s is not None


def test_costly_agreement_makes_windows_longer() -> None:
    windows = measured(Cadence.published(), 10.0, 10.0, sync_s=0.5)  # of the first window, which is too short to tell
    windows.report([Report(busy_s=0.1, batches=10)] * 2, 0.02)
    decision = windows.decide(MANY, 1)
    assert decision.anchor == 20
    assert decision.reason.startswith(
        "Agreeing took 20 % of a window and 10 % are wanted, so the slowest does 20 batches instead of 10"
    )


def test_the_last_rows_are_shared_by_speed_and_not_by_whole_batches() -> None:
    decision = measured(Cadence.published(), 10.0, 30.0).decide(42, 4)
    assert decision.rows == (32, 10) and decision.until_s is None
    assert decision.reason.endswith("These are the last 42 rows, shared by speed: 32 and 10.")


def test_few_rows_are_not_left_for_another_window() -> None:
    windows = measured(Async.published(), 10.0, 30.0)
    assert windows.decide(167, 4, least=8).rows == (125, 42)
    assert windows.decide(168, 4, least=8).rows == (120, 40)
    alone = WindowPlanner(Async.published(), ["a"])
    assert alone.decide(47, 4, least=8).rows == (47,) and alone.decide(48, 4, least=8).rows == (40,)


def test_what_may_be_done_beyond_a_part_never_exceeds_what_is_left() -> None:
    decision = measured(Cadence.published(), 10.0, 30.0).decide(165, 4)
    assert sum(decision.rows) + sum(decision.spare) == 165


def test_drift_that_rises_three_windows_halves_the_anchor_of_async_only() -> None:
    for policy in (Async.published(), Cadence.published()):
        windows = WindowPlanner(policy, ["a", "b"])
        for drift in (0.01, 0.03, 0.04, 0.06):
            windows.report([Report(busy_s=0.1, batches=10, figures={"divergence": drift})] * 2, 0.0)
        decision = windows.decide(MANY, 1)
        if isinstance(policy, Async):
            assert decision.anchor == 5
            assert decision.reason.startswith(
                "Replicas drifted apart three windows running, to 0.06 of the mean, above 0.05, so the slowest does 5"
                " batches instead of 10"
            )
        else:
            assert decision.anchor == 10


def test_drift_below_the_threshold_or_not_rising_changes_nothing() -> None:
    assert not any(Divergence(0.05).report(value) for value in (0.01, 0.02, 0.03, 0.04))
    divergence = Divergence(0.05)
    assert [divergence.report(value) for value in (0.1, 0.2, 0.2, 0.3, 0.4, 0.5)] == [False] * 5 + [True]


def test_a_newcomer_counts_as_a_typical_one_and_whoever_stays_keeps_its_speed() -> None:
    windows = measured(Cadence.published(), 10.0, 20.0, 30.0)
    windows.change(["worker 0", "worker 2", "new"])
    assert windows.elche.ms_per_batch == [10.0, 30.0, 30.0]
    decision = windows.decide(MANY, 1)
    assert decision.rows == (30, 10, 10)
    assert decision.reason.startswith("new came and worker 1 went, and the work is shared anew")


def test_a_change_of_speed_is_followed_within_two_windows() -> None:
    windows = measured(Cadence.published(), 10.0, 10.0)
    for _ in range(2):
        rows = windows.decide(MANY, 1).rows
        windows.report(
            [
                Report(busy_s=0.01 * rows[0], batches=rows[0]),
                Report(busy_s=0.03 * rows[1], batches=rows[1]),
            ],
            0.0,
        )
    rows = windows.decide(MANY, 1).rows
    assert rows[0] / rows[1] == pytest.approx(3.0, rel=0.1)


one = st.tuples(st.integers(0, 5000), st.integers(0, 40))  # milliseconds, and batches
reports = st.lists(st.tuples(one, one, one, st.integers(0, 3000)), min_size=2, max_size=8)


@given(reports, st.integers(0, 4))
def test_a_count_moves_by_no_more_than_it_may_also_of_a_replica_that_has_done_nothing_yet(
    told: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]], most: int
) -> None:
    windows = WindowPlanner(Cadence.published(max_batch_diff=most), ["a", "b", "c"])
    before: tuple[int, ...] | None = None
    for *parts, sync_ms in told:
        windows.report([Report(busy_s=ms / 1000, batches=batches) for ms, batches in parts], sync_ms / 1000)
        rows = windows.decide(MANY, 1).rows
        if before is not None:
            assert all(abs(new - old) <= most for new, old in zip(rows, before, strict=True))
        before = rows if windows.elche.is_measured else None


anything = st.tuples(st.floats(), st.integers(0, (1 << 32) - 1), st.floats())


@pytest.mark.parametrize("policy", [Cadence.published(), Cadence.published(max_batch_diff=3), Async.published()])
@given(told=st.lists(st.tuples(anything, anything, st.floats(0, 1e9)), max_size=6), left=st.integers(1, 1 << 48))
@example(told=[((1.0, 10, 0.0), (5e-324, 10, 0.0), 0.0)], left=MANY)
@example(told=[((1.0, 10, 0.0), (1e308, 1, 0.0), 0.0)], left=MANY)
def test_whatever_replicas_tell_a_window_is_planned(
    policy: Cadence | Async,
    told: list[tuple[tuple[float, int, float], tuple[float, int, float], float]],
    left: int,
) -> None:
    windows = WindowPlanner(policy, ["a", "b"])
    for *parts, sync_s in told:
        windows.report(
            [Report(busy_s=wall, batches=done, figures={"divergence": drift}) for wall, done, drift in parts], sync_s
        )
        decision = windows.decide(left, 4)
        assert min(decision.rows) >= 0 and min(decision.spare) >= 0
        assert 0 < sum(decision.rows) <= sum(decision.rows) + sum(decision.spare) <= left


@pytest.mark.parametrize("policy", [Cadence.published(), Async.published()])
def test_a_window_is_planned_for_somebody(policy: Cadence | Async) -> None:
    with pytest.raises(ConfigError, match="no replica"):
        WindowPlanner(policy, [])


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (Cadence, {"anchor": 0}, "anchor must be at least 1, not 0"),
        (Async, {"divergence_threshold": -0.1}, "divergence_threshold must be at least 0, not -0.1"),
        (Sync, {"shares": (0.0,)}, "shares must be positive"),
    ],
)
def test_bad_settings_are_sentences(kind: type[ApplyPolicy], options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(**options)


def test_a_clamped_target_is_said() -> None:
    reason = WindowPlanner(Cadence.published(overhead_target=0.7), ["a", "b"]).decide(MANY, 1).reason
    assert reason.startswith("An overhead target of 0.7 is outside 0.01 to 0.5, and 0.5 is taken")


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=30))
def test_a_pool_gives_each_row_exactly_once_whatever_comes_back(turns: list[tuple[int, bool]]) -> None:
    pool, done = RowPool([(0, 100)]), []
    for rows, comes_back in turns:
        taken = pool.take(rows)
        kept = rows // 2 if comes_back else rows
        left = rows_left_after(taken, kept)
        pool.give_back(left)
        gone = {row for start, end in taken for row in range(start, end)}
        done += sorted(gone - {row for start, end in left for row in range(start, end)})
    assert sorted([*done, *(row for start, end in pool.ranges for row in range(start, end))]) == list(range(100))


def parts(rows: list[int], spare: list[int]) -> WindowPlan:
    return WindowPlan(rows=tuple(rows), spare=tuple(spare), until_s=None, anchor=1, reason="")


@given(total=st.integers(2, 120), size=st.integers(2, 9), seed=st.integers(0, 1 << 32))
def test_no_row_of_a_group_is_alone_whatever_comes_back(total: int, size: int, seed: int) -> None:
    """Windows of any parts, of each of which any number of batches is done."""
    pool, draw, done = RowPool([(0, total)]), random.Random(seed), []
    while pool.rows:
        asked = share_out(draw.randint(1, pool.rows), [draw.random() for _ in range(draw.randint(2, 4))])
        wanted = parts(asked, [draw.randint(0, own) for own in asked])
        decision, taken = pool.take_in_pairs(wanted, pool.rows)
        for own, more, part in zip(decision.rows, decision.spare, taken, strict=True):
            batches = [batch for each in part for batch in even_batches(*each, size, 3 * size, in_pairs=True)]
            assert own + more == sum(end - start for start, end in batches)
            assert all(end - start > 1 for start, end in batches)
            kept = batches[: draw.randint(1, max(1, len(batches)))]
            done += [row for start, end in kept for row in range(start, end)]
            pool.give_back(rows_left_after(part, sum(end - start for start, end in kept)))
    assert sorted(done) == list(range(total))


def test_no_row_more_is_taken_than_the_run_has_left() -> None:
    pool = RowPool([(0, 3), (10, 100)])
    decision, taken = pool.take_in_pairs(parts([2, 3], [0, 0]), 5)
    assert decision.rows == (3, 2) and taken == [[(0, 3)], [(10, 12)]]


@pytest.mark.parametrize("policy", [Cadence.published(anchor=4), Async.published(anchor=4)])
def test_one_replica_may_be_alone_where_others_can_come(policy: Cadence | Async) -> None:
    windows = WindowPlanner(policy, ["a"])
    decision = windows.decide(MANY, 8)
    assert decision.rows == (32,) and decision.until_s is None and decision.spare == (0,)
    assert decision.reason == "Only a is there, so nothing is averaged: 32 rows."
    assert windows.decide(20, 8).rows == (20,)
    windows.report([Report(busy_s=0.4, batches=4)], 0.0)
    windows.change(["a", "b"])
    decision = windows.decide(MANY, 4)
    assert decision.rows == (16, 16) and decision.reason.startswith("b came, and the work is shared anew")
    windows.change(["b"])
    assert windows.decide(MANY, 8).reason == "Only b is there, so nothing is averaged: 32 rows."


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_no_rows_where_a_step_takes_as_long_with_fewer_and_the_first_window_is_short(seed: int) -> None:
    """A small model on a GPU: what takes time is starting kernels. One share after the other went to zero."""
    noise = random.Random(seed)
    planner = WindowPlanner(Cadence(together=0.15), ["a", "b", "c", "d"])
    for _ in range(300):
        assert planner.is_best_together(is_early=True)
        plan = planner.decide_together(64)
        busy = [0.03 * noise.uniform(0.8, 1.6) for _ in plan.rows]
        planner.observe(plan.rows, busy, 16, 0.01)
        assert sum(plan.rows) == 64 and min(plan.rows) >= 8
    for window in range(4):
        assert not planner.is_best_together(is_early=False)
        plan = planner.decide(1_000_000, 16)
        assert max(plan.rows) <= 16 * 2 ** (window + 1)
        planner.report([Report(busy_s=0.03 * rows / 16, batches=rows // 16) for rows in plan.rows], 0.05)


def test_a_speed_that_was_measured_wrongly_costs_one_short_window() -> None:
    planner = WindowPlanner(Cadence(together=0.15), ["slow", "fast"])
    planner.decide_together(64)
    planner.observe([1, 63], [0.5, 0.03], 32, 0.01)  # 16 s a batch, it seems, against 15 ms
    assert not planner.is_best_together(is_early=False)
    plan = planner.decide(100_000, 32)
    assert plan.rows == (32, 64)
    planner.report([Report(busy_s=0.03, batches=1), Report(busy_s=0.06, batches=2)], 0.01)
    planner.is_best_together(is_early=False)
    assert len(set(planner.decide(100_000, 32).rows)) == 1, "as fast as the other, after all"
