import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from rich.console import Console

from potluck.events import (
    CheckpointSaved,
    Decided,
    EpochDone,
    Event,
    EventFile,
    RunEnded,
    RunStarted,
    StepDone,
    StepSkipped,
    Validated,
    WentBack,
    WorkerStep,
    WorkerWent,
    read_events,
)
from potluck.fleet.ledger import prove
from potluck.show.picture import draw_losses, running_mean
from potluck.show.progress import Progress
from potluck.words import count, duration, plural, size

NAN = math.nan


def done(step: int, loss: float) -> StepDone:
    workers = tuple(WorkerStep(rank=r, rows=4, samples=400.0, busy_s=0.3, wait_s=0.1 * r) for r in range(2))
    return StepDone(step=step, epoch=0, rows_seen=8 * step, samples=800.0, loss=loss, lr=1e-3, grad_norm=1.0,
                    seconds=0.4, workers=workers)  # fmt: skip


def story() -> list[Event]:
    steps = [done(step, 5.0 - step) for step in (1, 2, 4)]
    return [
        RunStarted(name="x", folder="runs/x", workers=2, device="cpu", parameters=1_350_000, unit="tokens",
                   batch_size=8, steps_total=4, from_step=0),
        *steps[:2],
        StepSkipped(step=3, loss=float('nan'), in_a_row=1, reason="the loss of worker 1 is not finite"),
        Validated(step=2, loss=3.25),
        steps[2],
        CheckpointSaved(step=4, folder="runs/x/checkpoints/step-00000004", stall_s=0.01, bytes=16_000_000),
        EpochDone(epoch=0, used=32, total=32, same_weights=True, sentence="Epoch 1: each of its 32 samples was used"),
        RunEnded(reason="finished", step=4, rows_seen=32, seconds=2.0, loss=1.0, validation_loss=3.25, skipped=1),
    ]  # fmt: skip


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    for event in story():
        progress(event)
    said = out.getvalue()
    assert "\x1b" not in said
    assert "Training 1.35M parameters on 2 workers (cpu): 4 steps of 8 rows, in runs/x" in said
    assert "step 1/4, loss 4.0000, 2,000 tokens/s, 1 s left, waiting 0:0 % 1:25 %" in said
    assert "Step 3 was skipped on all workers: the loss of worker 1 is not finite." in said
    assert "step 4/4, loss 1.0000, validation 3.2500" in said and "1 skipped" in said
    assert "saved runs/x/checkpoints/step-00000004 (16 MB)" in said
    assert "Epoch 1: each of its 32 samples was used" in said


def test_a_live_view_with_a_line_per_worker_on_a_terminal() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=100, force_terminal=True, color_system=None))
    for event in story():
        progress(event)
    last_view = out.getvalue().rsplit("worker", 1)[1]
    assert re.search(r"^0 +12 +50 % +900 ms +0 % +1,333", last_view, re.MULTILINE), "in the end, of the whole run"
    assert re.search(r"^1 +12 +50 % +900 ms +25 % +1,000", last_view, re.MULTILINE)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_of_a_run_whose_length_nobody_told_no_total_is_shown(is_terminal: bool) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200, force_terminal=is_terminal, color_system=None))
    started, *rest = story()
    assert isinstance(started, RunStarted)
    progress(replace(started, steps_total=0, from_step=3))
    for event in rest:
        progress(event)
    said = out.getvalue()
    assert "2 workers (cpu): steps of 8 rows" in said and re.search(r"step \d, loss \d\.\d+", said)
    assert not re.search(r"step \d+/", said) and " left" not in said


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (WentBack(from_step=39, step=30), "continues from the checkpoint of step 30; 9 steps are trained again."),
        (WentBack(from_step=39, step=0), "continues from the start: none was saved; 39 steps are trained again."),
        (WentBack(from_step=39, step=38), "continues from the checkpoint of step 38; 1 step is trained again."),
    ],
)
def test_what_is_lost_is_said(event: WentBack, sentence: str) -> None:
    out = io.StringIO()
    Progress(Console(file=out, width=300))(event)
    assert out.getvalue() == f"Nobody has the weights of step 39 any more. The run {sentence}\n"


def decided(reason: str) -> Decided:
    return Decided(step=0, rows=(24, 8), reason=reason)


def test_why_the_work_is_shared_so_stands_below_the_table() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=100, force_terminal=True, color_system=None))
    first, *rest = story()
    for event in (first, decided("worker 1 is the slowest, at 90 ms a batch: 3 and 1 batches."), *rest[:-1]):
        progress(event)
    progress.close()
    table, reason = out.getvalue().rsplit("tokens/s", 1)[1].split("Worker 1 is the slowest")
    assert re.search(r"^1 +4 +50 % +300 ms +25 % +1,000", table, re.MULTILINE)
    assert reason.startswith(", at 90 ms a batch: 3 and 1 batches.")


def test_without_a_terminal_a_reason_is_said_again_only_when_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.show.progress.LINE_EVERY_S", 0.0)
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    first, step, *_ = story()
    progress(first)
    slow = "worker 1 is the slowest, at {} ms a batch: {} and 1 batches."
    for reason in (slow.format(90, 3), slow.format("90.5", 4), "worker 1 went.", slow.format("1,200", 5)):
        progress(decided(reason))
        progress(step)
    reasons = [line for line in out.getvalue().splitlines() if line.startswith("  ")]
    assert reasons == [
        "  Worker 1 is the slowest, at 90 ms a batch: 3 and 1 batches.",
        "  Worker 1 went.",
        "  Worker 1 is the slowest, at 1,200 ms a batch: 5 and 1 batches.",
    ]


def test_a_validation_without_a_loss_is_told_by_the_names_of_its_figures() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    progress(Validated(step=2, loss=None, metrics={"accuracy": 0.93, "f": 0.5}))
    progress(Validated(step=3, loss=1.5, metrics={"loss": 1.5, "accuracy": 0.93}))
    assert out.getvalue().splitlines() == [
        "step 2: validation accuracy 0.9300, f 0.5000",
        "step 3: validation loss 1.5000, accuracy 0.9300",
    ]


def test_from_steps_to_windows_and_back_is_said_at_once() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200))
    for anchor, reason in ((0, "all agree."), (0, "all still agree."), (5, "windows are shorter."), (6, "and longer.")):
        progress(Decided(step=0, rows=(24, 8), reason=reason, anchor=anchor))
    assert out.getvalue() == "  Windows are shorter.\n"


@pytest.mark.parametrize(
    ("found", "expected"),
    [(duration(5), "5 s"), (duration(125), "2 min 5 s"), (duration(7265), "2 h 1 min"), (count(999), "999"),
     (count(1.35e6), "1.35M"), (count(9e8), "900M"), (size(16.3e6), "16.3 MB"), (size(12), "12 bytes")],
)  # fmt: skip
def test_numbers_read_well(found: str, expected: str) -> None:
    assert found == expected


def test_events_survive_a_crash_and_have_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    for event in story():
        file(event)
    file(Validated(step=9, loss=float("nan")))
    file.close()
    path.write_text(path.read_text() + '{"event": "step_do')
    records = list(read_events(path))
    assert len(records) == len(story()) + 1
    assert records[1]["workers"][1]["wait_s"] == pytest.approx(0.1)
    assert '"loss": "nan"' in path.read_text().splitlines()[-2], "JSON itself has no NaN"
    assert math.isnan(records[-1]["loss"])


def test_what_happens_after_a_file_of_events_was_closed_is_in_no_file_and_no_fault(tmp_path: Path) -> None:
    """As where a disk is full: the run ends, and its last events come after the file is closed."""
    file = EventFile(tmp_path / "events.jsonl")
    file(done(1, 1.0))
    file.close()
    file(done(2, 1.0))
    assert [record["step"] for record in read_events(tmp_path / "events.jsonl")] == [1]


def test_numbers_that_are_not_finite_come_back_as_numbers_and_words_as_words(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    part = WorkerStep(rank=0, rows=1, samples=1.0, busy_s=math.inf, wait_s=0.1, name="nan")
    file(replace(done(1, NAN), grad_norm=-math.inf, workers=(part,)))
    file(WorkerWent(worker=0, name="nan", reason="inf", polite=True, workers=0))
    file(RunEnded(reason="nan", step=1, rows_seen=1, seconds=1.0, loss=math.nan, validation_loss=None, skipped=0))
    file.close()
    step, went, ended = read_events(path)
    assert math.isnan(step["loss"]) and step["grad_norm"] == -math.inf
    assert step["workers"][0]["busy_s"] == math.inf and step["workers"][0]["name"] == "nan"
    assert (went["name"], went["reason"]) == ("nan", "inf")
    assert ended["reason"] == "nan" and math.isnan(ended["loss"]) and ended["validation_loss"] is None


def test_one_of_something_is_not_several() -> None:
    assert [plural(n, "worker") for n in (0, 1, 2, 1200)] == ["0 workers", "1 worker", "2 workers", "1,200 workers"]
    assert [plural(n, "micro-batch") for n in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert plural(2, "epoch") == "2 epochs"
    console = Console(file=io.StringIO(), width=200)
    alone = RunStarted(name="x", folder="runs/x", workers=1, device="cpu", parameters=9, unit="rows", batch_size=1,
                       steps_total=1, from_step=0)  # fmt: skip
    Progress(console)(alone)
    assert "on 1 worker (cpu): 1 step of 1 row, in runs/x" in console.file.getvalue()  # type: ignore[attr-defined]
    assert str(prove([(0, 1)], 1)) == "its one sample was used exactly once"


def test_the_picture_counts_the_workers_that_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host is told of one worker when it starts, whoever joins later."""
    titles: list[str] = []
    draw = Axes.set
    monkeypatch.setattr(Axes, "set", lambda self, **told: titles.append(told["title"]) or draw(self, **told))
    for workers, said in ((1, "x: 1,350,000 parameters, 2 workers"), (0, "x: 1,350,000 parameters, 1 worker")):
        file = EventFile(tmp_path / f"{workers}.jsonl")
        for event in story():
            if isinstance(event, RunStarted):
                event = replace(event, workers=1)
            if isinstance(event, StepDone) and not workers:
                event = replace(event, workers=event.workers[:1])
            file(event)
        file.close()
        draw_losses(tmp_path / f"{workers}.jsonl", tmp_path / "loss.png")
        assert titles[-1] == said


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    for event in story():
        file(event)
    file.close()
    picture = draw_losses(tmp_path / "events.jsonl", tmp_path / "loss.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize("losses", [[NAN], [NAN, NAN], [3.0, NAN, 2.0], [NAN, 2.0, math.inf, 1.0, -math.inf]])
@pytest.mark.filterwarnings(
    "error::RuntimeWarning", "error::UserWarning"
)  # not every: another test's socket may end here
def test_a_run_with_losses_that_are_no_numbers_is_drawn(losses: list[float], tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events.jsonl")
    for number, loss in enumerate(losses, 1):
        file(done(number, loss))
        file(Validated(step=number, loss=loss))
        file(Validated(step=number, loss=None, metrics={"right": loss}))
    file.close()
    assert draw_losses(tmp_path / "events.jsonl", tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_running_mean_passes_over_what_is_no_number() -> None:
    found = running_mean([NAN, 2.0, NAN, 4.0, math.inf, 9.0, 9.0], keep=0.5)
    assert math.isnan(found[0]) and found[1:] == [2.0, 2.0, 3.0, 3.0, 6.0, 7.5]


def test_a_running_mean_starts_from_the_first_value() -> None:
    assert running_mean([2.0, 4.0, 9.0, 9.0], keep=0.5) == [2.0, 3.0, 6.0, 7.5]
