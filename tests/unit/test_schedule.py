import math

import pytest

from potluck import ScheduleConfig


def test_it_rises_in_a_line_and_falls_along_a_cosine() -> None:
    schedule = ScheduleConfig(warmup=0.1, floor=0.2)
    assert schedule.factor(50, 1000) == pytest.approx(0.5)
    assert schedule.factor(100, 1000) == pytest.approx(1.0)
    assert schedule.factor(550, 1000) == pytest.approx(0.2 + 0.8 * 0.5)
    assert schedule.factor(1000, 1000) == pytest.approx(0.2)
    assert schedule.factor(2000, 1000) == pytest.approx(0.2)


def test_no_warmup_starts_at_the_peak_and_a_floor_of_one_stays_there() -> None:
    assert ScheduleConfig(warmup=0).factor(0, 10) == 1.0
    assert ScheduleConfig(warmup=0, floor=1).factor(7, 10) == 1.0
    assert math.isclose(ScheduleConfig(warmup=0, floor=0).factor(10, 10), 0.0, abs_tol=1e-12)


@pytest.mark.parametrize("values", [{"warmup": 1.0}, {"warmup": -0.1}, {"floor": 1.1}])
def test_shares_outside_their_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is a share of"):
        ScheduleConfig(**values)
