"""Schedules of stages: valid for any count, torch's own where torch has them, and as idle as theory says."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.stages.schedule import (
    Action,
    draw,
    expected_idle_share,
    forward_only,
    in_flight,
    per_worker,
    plan_orders,
    simulate,
    validate,
)

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
NAMES = ["1f1b", "gpipe", "interleaved", "zero-bubble"]


def idle_share(timed: Any) -> float:
    """The part of the time that workers wait, from the first action to the last."""
    length = max(each[-1].end for each in timed)
    return 1 - sum(step.end - step.start for each in timed for step in each) / (length * len(timed))


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 20))
def test_every_stage_sees_every_micro_batch_once_and_nobody_waits_for_ever(
    name: str, workers: int, micros: int
) -> None:
    orders = plan_orders(name, workers, micros)  # type: ignore[arg-type]  # validates, and so simulates, what it plans
    assert len(orders) == workers
    only = forward_only(name, workers, micros)  # type: ignore[arg-type]
    assert sum(map(len, only)) == workers * per_worker(name) * micros  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "micros"), [(2, 2), (2, 7), (3, 5), (4, 4), (4, 9)])
def test_gpipe_is_what_torch_plans(workers: int, micros: int) -> None:
    from torch.distributed.pipelining import ScheduleGPipe  # takes a second, which other processes need not wait

    stage: Any = SimpleNamespace(num_stages=workers, has_backward=True, is_first=True, is_last=False)
    theirs = ScheduleGPipe(stage, micros).pipeline_order
    assert theirs is not None
    for worker, order in enumerate(plan_orders("gpipe", workers, micros)):
        assert [str(a) for a in order] == [str(a) for a in theirs[worker] if str(a)[1] in "FB"]


@given(st.integers(1, 6), st.integers(1, 20))
def test_1f1b_goes_in_turns_and_keeps_few_activations(workers: int, micros: int) -> None:
    for stage, order in enumerate(plan_orders("1f1b", workers, micros)):
        kinds = "".join(action.kind for action in order)
        kept = [kinds[:n].count("F") - kinds[:n].count("B") for n in range(len(kinds))]
        assert max(kept) <= min(micros, in_flight(stage, workers))
        first, last = kinds.index("B"), kinds.rindex("F")
        assert "FF" not in kinds[first:] and "BB" not in kinds[: last + 1]
        for kind in "FB":
            assert [action.micro for action in order if action.kind == kind] == list(range(micros))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micros", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_equal_stages_are_as_idle_as_theory_says(name: str, workers: int, micros: int) -> None:
    timed = simulate(plan_orders(name, workers, micros), workers, COSTS)  # type: ignore[arg-type]
    assert idle_share(timed) == pytest.approx(expected_idle_share(workers, micros))


def test_zero_bubble_and_interleaved_wait_less() -> None:
    for name in ("interleaved", "zero-bubble"):
        stages = 4 * per_worker(name)  # type: ignore[arg-type]
        assert idle_share(simulate(plan_orders(name, 4, 8), stages, COSTS)) < expected_idle_share(4, 8)  # type: ignore[arg-type]


def test_it_is_drawn_with_a_line_per_worker() -> None:
    drawn = draw(plan_orders("1f1b", 2, 2), 2)
    assert drawn == "worker 0 | F0 F1 .  .   B0   .   B1\nworker 1 | .  F0  B0   F1  B1"
    assert "F0/2" in draw(plan_orders("interleaved", 2, 2), 4)


def test_a_schedule_that_hangs_or_forgets_is_refused() -> None:
    f, b = Action("F", 0, 0), Action("B", 0, 0)
    with pytest.raises(ValueError, match="never gets to 0B0"):
        validate([(b, f)], 1, 1)
    with pytest.raises(ValueError, match="stage 0 does F with micro-batch 0"):
        validate([(f,)], 1, 1)
    with pytest.raises(ValueError, match="1F0 is of no stage"):
        validate([(f, b, Action("F", 1, 0))], 1, 1)
    with pytest.raises(ValueError, match="at least one worker and one micro-batch"):
        plan_orders("1f1b", 2, 0)
