"""One worker is made slower, by pauses in proportion; the others are not."""

import pytest

from potluck.events import RunStarted
from potluck.train.slowdown import Brake, Pauses, Slowdown

STARTED = RunStarted(
    name="x", folder="x", workers=3, device="cpu", parameters=1, unit="rows", batch_size=3, steps_total=1, from_step=0
)


def test_the_slow_one_pauses_and_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    brakes = [Brake(Slowdown(worker=2), rank) for rank in range(3)]
    for brake in brakes:
        brake(STARTED)
    said = capsys.readouterr().out
    assert said == "Worker 2 is slowed 3-fold: it pauses 2 times as long as it computes.\n"
    assert brakes[0].slow(len) is len and brakes[1].slow(len) is len
    calls: list[str] = []
    brakes[2].pauses = Pauses(3.0, computed_s=lambda: 0.0, sleep=lambda _: calls.append("pause"))
    assert brakes[2].slow(lambda word: calls.append(word) or len(word))("abc") == 3
    assert calls == ["abc", "pause"]


def test_what_came_before_the_run_is_not_paused_for() -> None:
    clock = iter([0.0, 10.0, 10.1])
    slept: list[float] = []
    pauses = Pauses(3.0, computed_s=lambda: next(clock), sleep=slept.append)
    pauses.start()  # as it does when the run begins
    pauses.pause()
    assert slept == pytest.approx([0.2])


def test_pauses_are_in_proportion_to_compute_alone() -> None:
    """Four batches of uneven cost; the clock is of computing, so that sleeping does not move it."""
    clock = iter([10.0, 10.1, 10.1, 10.4, 11.4])
    slept: list[float] = []
    pauses = Pauses(3.0, computed_s=lambda: next(clock), sleep=slept.append)
    for _ in range(4):
        pauses.pause()
    assert slept == pytest.approx([0.2, 0.0, 0.6, 2.0])
