"""The speed of a run and its time left: as its steps say, and the same in the terminal and on the page."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from potluck.events import Ordered, RunStarted, StepDone, WentBack, WorkerStep, record_of
from potluck.page.fold import Fold
from potluck.show import progress as shown
from potluck.show.pace import Pace
from potluck.show.progress import Progress
from potluck.words import duration

WORKER = WorkerStep(rank=0, rows=8, samples=800, busy_s=1.0, wait_s=0.0)


def began(from_step: int = 0) -> RunStarted:
    return RunStarted(
        name="r",
        folder="runs/r",
        workers=1,
        device="cpu",
        parameters=3,
        unit="rows",
        batch_size=8,
        steps_total=100,
        from_step=from_step,
    )


def done(step: int) -> StepDone:
    told: dict[str, Any] = {"epoch": 0, "rows_seen": 8 * step, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0}
    return StepDone(step=step, samples=800, seconds=2.0, workers=(WORKER,), **told)


def test_speed_and_time_left_are_those_of_the_last_steps() -> None:
    pace = Pace()
    assert pace.rate is None and pace.left_s(100) is None
    pace.add(10.0, 1, 50, 2.0)
    assert pace.rate == 25 and pace.left_s(11) == (20, 20, 20)
    for step in range(2, 12):
        pace.add(10.0 + step, step, 50, 2.0)
    assert pace.rate == pytest.approx(10 * 50 / 11) and pace.left_s(0) is None
    estimate, least, most = pace.left_s(111) or (0, 0, 0)
    assert estimate == pytest.approx(110) and least <= estimate <= most
    pace.clear()
    assert pace.rate is None


def test_terminal_and_page_show_the_same_speed_and_time_left_of_the_same_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shown, "LINE_EVERY_S", -1.0)
    out = io.StringIO()
    terminal, fold, at, lines = Progress(Console(file=out, width=200)), Fold(), 1000.0, 0
    resume = Ordered(action="resume", step=30, done=True, sentence="", worker=None)
    events = [began(), *map(done, range(1, 31)), resume, *map(done, range(31, 33)), WentBack(from_step=32, step=20)]
    for event in [*events, *map(done, range(21, 24)), began(23), *map(done, range(24, 26))]:
        at += 1.013 + 0.1 * (getattr(event, "step", 0) % 7)
        terminal(event, at)
        fold.take(record_of(event, at))
        if isinstance(event, StepDone):
            line, left = out.getvalue().splitlines()[-1], fold.left_s()
            told = re.search(r"step \d+/100, loss 1.0000, ([\d,]+) rows/s, (.+) left", line)
            assert told is not None and left is not None, line
            assert told[1] == f"{fold.rate:,.0f}" and told[2] == duration(left[0]), (event.step, line)
            lines += 1
    assert lines == 37
