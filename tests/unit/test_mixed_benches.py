"""What the benchmarks of mixed speeds make of their measurements."""

from typing import Any

import pytest

from bench import mixed
from bench.following import NEVER, windows_until
from bench.learning import Lesson, merged
from bench.mixed import TASK, Task, combined
from bench.mixed_speeds import Setting, Turn, compare, medians, table
from bench.time_to_loss import Place, Size, loss_of_all, mean_curve
from bench.time_to_loss import compare as compare_losses
from bench.uneven import cores_of
from potluck.show.picture import time_to


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
def test_quotas_fit_two_cores_and_have_the_gap(workers: int, gap: float) -> None:
    cores = cores_of(workers, gap)
    assert len(cores) == workers and sum(cores) <= 1.8 + 1e-9
    assert cores[0] / cores[-1] == pytest.approx(gap)


def test_a_task_survives_its_way_to_a_rank() -> None:
    assert Task.from_json(TASK.as_json()) == TASK


def test_combined_speed_is_the_sum_of_what_each_does_alone() -> None:
    answers = [{"rows_per_s": 30.0, "alone": [20.0, 22.0]}, {"rows_per_s": 30.0, "alone": [9.0, 11.0]}]
    assert combined(answers) == (30.0, 31.0)


class Still:
    """Instead of a loop, a group and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(mixed.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(mixed.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(mixed.dist, "barrier", lambda: None)
        monkeypatch.setattr(mixed.dist, "broadcast", lambda tensor, src: None)
        monkeypatch.setattr(mixed, "rows_per_s", self.compute_alone)

    def compute_alone(self, loop: object, seconds: float) -> float:
        self.now += seconds
        return 7.0


@pytest.mark.parametrize("warm", [1, 2, 3, 8])
def test_a_meter_counts_only_the_time_together(warm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    still = Still(monkeypatch)
    meter = mixed.Meter(Any, Any, mixed.Times(alone_s=5.0, together_s=3.0, chunks=2))  # type: ignore[arg-type]
    meter.begin(warm)
    agreements, is_over = 0, False
    while not is_over:
        still.now += 1.0
        agreements += 1
        is_over = meter.agreed(10 * agreements)
    assert agreements == warm + 6  # two chunks of three windows, of a second each
    assert meter.told() == {"rows_per_s": 10.0, "alone": [7.0] * 3, "windows": 6, "seconds": 6.0}


def turn(setting: Setting, contender: str, share: float) -> Turn:
    return Turn(setting.name, contender, 100 * share, 100.0, [75.0, 25.0], {})


def test_goals_stand_where_they_were_set() -> None:
    even, uneven, narrow = Setting(gap=1), Setting(gap=3), Setting(gap=3, mbit=1000)
    turns = [
        turn(even, "bare DDP", 0.9),
        turn(even, "Cadence", 0.95),
        turn(uneven, "bare DDP", 0.5),
        turn(uneven, "Cadence", 0.96),
        turn(uneven, "Cadence", 0.98),
        turn(narrow, "Sync balanced", 0.6),
    ]
    against_ddp, cadence, sync = compare(turns)
    assert against_ddp.met and against_ddp.ratio == pytest.approx(0.95 / 0.9)
    assert cadence.met and cadence.target == 0.95 and cadence.ratio == pytest.approx(0.97)
    assert sync.target is None
    assert medians(turns)[uneven.name]["Cadence"] == pytest.approx(0.97)
    assert "| 2 workers, gap 3 | 0.500 | - | 0.970 |" in table(turns)


def test_following_counts_windows_after_the_one_in_which_the_speed_changed() -> None:
    optimum = [0.75, 0.25]
    assert windows_until([[300, 300], [350, 250], [300, 100]], optimum, 1) == 2
    assert windows_until([[300, 100], [310, 108]], optimum, 1) == 1
    assert windows_until([[300, 300], [300, 124]], optimum, 1) == NEVER
    assert windows_until([[300, 300], [300, 124]], optimum, 24) == 1  # less than a batch cannot be given out


def test_the_time_to_a_loss_lies_between_two_looks() -> None:
    curve = [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0)]
    assert time_to(curve, 2.5) == pytest.approx(2.5) and time_to(curve, 4.5) == 1.0 and time_to(curve, 1.0) is None
    halves = [{"curve": [[1.0, 8, 4.0], [3.0, 24, 2.0]]}, {"curve": [[2.0, 16, 3.0]]}]
    assert merged(halves) == curve
    assert mean_curve([curve, [(3.0, 2.0), (4.0, 1.0)]]) == [(2.0, 3.0), (3.0, 2.0)]


def test_the_loss_to_reach_is_one_that_all_have_reached() -> None:
    curves = {
        "bare DDP": [[(10.0, 3.0), (20.0, 2.0)], [(10.0, 3.0), (20.0, 2.2)]],
        "Cadence": [[(5.0, 3.0), (10.0, 2.1)], [(5.0, 3.0), (10.0, 2.1)]],
        "Sync": [[(6.0, 3.0), (12.0, 2.0)], [(6.0, 3.0), (12.0, 2.2)]],
    }
    assert loss_of_all(curves) == 2.2
    cadence, sync, loss = compare_losses(curves, Place(), Size())
    assert cadence.ratio == pytest.approx(0.5, abs=0.02) and not cadence.met and sync.ratio > cadence.ratio
    assert loss.met and loss.ratio == pytest.approx(2.1 / 2.1, abs=0.01)


def test_a_lesson_is_the_demos_with_another_model() -> None:
    lesson = Lesson.of(seed=1, steps=10, settings=["model.dim=96"])
    assert lesson.config.model.dim == 96 and lesson.rows == 80 and lesson.lr_factor(80) == pytest.approx(0.05)
