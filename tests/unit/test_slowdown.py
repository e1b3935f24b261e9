"""One worker is made slower, by pauses in proportion; the others are not."""

import pytest

from potluck.train import recipe
from potluck.train.recipe import slowed


class Clock:
    """Time that was computed, and pauses."""

    def __init__(self, *seconds: float) -> None:
        self.process_time = iter(seconds).__next__
        self.slept: list[float] = []
        self.sleep = self.slept.append


def test_the_slow_one_pauses_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "time", clock := Clock(0.0, 0.1))
    first, second, slow = (slowed(len, 2, rank) for rank in range(3))
    said = capsys.readouterr().out
    assert said == "Worker 2 is slowed 3-fold: it pauses 2 times as long as it computes.\n"
    assert first is len and second is len
    assert slow("abc") == 3 and clock.slept == pytest.approx([0.2])


def test_pauses_are_in_proportion_to_compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches of uneven cost; the clock is of computing, so that sleeping does not move it. What was computed
    before the first of them is not paused for."""
    monkeypatch.setattr(recipe, "time", clock := Clock(10.0, 10.1, 10.1, 10.4, 11.4))
    slow = slowed(len, 0, 0)
    for _ in range(4):
        slow("abc")
    assert clock.slept == pytest.approx([0.2, 0.0, 0.6, 2.0])
