"""What scripts print beside the live table, as a person sees it in a terminal."""

import io
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, ConsoleRenderable, RenderHook
from tqdm import tqdm

from potluck.events import RunEnded, RunStarted
from potluck.launch.processes import _forward
from potluck.show.progress import Progress
from potluck.words import say
from tests.unit.test_output import Screen
from tests.unit.test_pace import began
from tests.unit.test_progress import done


def started() -> RunStarted:
    return replace(began(), batch_size=2, steps_total=9)


def ended() -> RunEnded:
    return RunEnded(reason="finished", step=0, rows_seen=0, seconds=1.0, loss=None, validation_loss=None, skipped=0)


def test_lines_stand_above_the_table_and_stay_and_a_bar_stands_below_it_until_it_is_done() -> None:
    screen = Screen()
    progress = Progress(Console(file=screen, force_terminal=True, width=80, highlight=False))
    progress(started())
    progress.say_of("host-worker-0", ["epoch 1: train 0.5"], [" 50%|###  | 3/6"])
    progress._live.refresh()  # type: ignore[union-attr]
    rows = screen.terminal.drawn
    assert any("[host-worker-0]  50%|###  | 3/6" in row for row in rows)
    assert not any("epoch 1" in row for row in rows) and any("epoch 1: train 0.5" in line for line in screen.lines)
    progress.say_of("host-worker-0", ["100%|#####| 6/6", "epoch 2"])
    progress(ended())
    shown = screen.end()
    assert sum("[host-worker-0] epoch 1: train 0.5" in line for line in shown) == 1
    assert sum("epoch 2" in line for line in shown) == 1 and not any("50%" in line for line in shown)


class DrawsMeanwhile(RenderHook):
    """While the first thing is printed, another thread draws the table, if it may."""

    def __init__(self, draw: Callable[[], None]) -> None:
        self.drawer = threading.Thread(target=draw)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        if self.drawer.ident is None:
            self.drawer.start()
            self.drawer.join(0.2)  # one that must wait until the line is printed does not end before
        return renderables


def test_a_table_that_grows_while_a_line_is_printed_leaves_no_row_of_it_behind() -> None:
    screen = Screen()
    progress = Progress(Console(file=screen, force_terminal=True, width=80, color_system=None))
    progress(started())
    progress._live.refresh()  # type: ignore[union-attr]
    progress(done(1, 1.0))  # which is to be drawn, with two workers
    progress.console.push_render_hook(hook := DrawsMeanwhile(progress._live.refresh))  # type: ignore[union-attr]
    progress.say_of("host-worker-0", ["epoch 1"])
    hook.drawer.join()
    progress.say_of("host-worker-0", ["epoch 2"])
    progress(ended())
    shown = [line.rstrip() for line in screen.end()]
    assert [line for line in shown if "epoch" in line] == [f"[host-worker-0] epoch {number}" for number in (1, 2)]
    assert sum("step 1/9" in line for line in shown) == 1, shown


def test_without_a_terminal_lines_are_lines_and_errors_go_where_errors_go(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=80))
    progress.say_of("host-worker-1", ["\x1b[31mred\x1b[0m"], ["10%"])
    progress.say_of("host-worker-1", ["careful"], is_error=True)
    assert out.getvalue() == "[host-worker-1] red\n"
    assert capsys.readouterr().err == "[host-worker-1] careful\n"


def test_what_this_process_prints_goes_above_the_table_and_a_bar_of_its_own_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, error = Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", error)
    progress = Progress(Console(file=screen, force_terminal=True, width=80, highlight=False))
    progress(started())
    print("epoch 1: train 0.5")
    bar = tqdm(range(3), file=sys.stderr, ncols=60, mininterval=0)
    for number, _ in enumerate(bar):
        progress._live.refresh()  # type: ignore[union-attr]
        assert any(f"{number}/3" in row for row in screen.terminal.drawn)
    print("epoch 2")
    progress(ended())
    assert sys.stdout is screen and sys.stderr is error
    print("after")
    bar.write("late", file=bar.fp)
    shown = screen.end()
    for text in ("epoch 1: train 0.5", "epoch 2", "after"):
        assert sum(text in line for line in shown) == 1, (text, shown)
    assert not any("1/3" in line for line in shown) and sum("3/3" in line for line in shown) == 1


def test_a_bar_that_clears_itself_and_empty_lines_leave_no_line_with_a_name_alone() -> None:
    told: list[str] = []
    read, write = os.pipe()
    os.write(write, b"\r 10%|#\r 90%|#########\r      \r\n\nafter\n\x1b[0m\n  \n")
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as stream:
        _forward(stream, lambda lines, drawn: told.extend(lines))  # type: ignore[arg-type]
    assert told == ["after"]


def test_a_sentence_of_ours_clears_a_bar_away_that_stands_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "__stderr__", screen)
    print("\r 50%|#####     | 3/6 [00:01<00:01, ?it/s]", end="", file=screen)
    say("host-worker-0 joined.")
    assert [line.rstrip() for line in screen.end() if line.strip()] == ["potluck: host-worker-0 joined."]
