"""Both timelines and the measured gain, from what runs wrote down."""

import json
import math
from pathlib import Path

import pytest

from potluck.show.picture import Timeline, draw_comparison, gain_sentence, read_timeline


def write_run(
    path: Path,
    steps: list[tuple[float, list[tuple[int, float]], float]],
    validation: float | None,
    looks: dict[int, float] | None = None,
) -> Path:
    """Steps of (seconds, each worker's (rows, busy seconds), loss), as a run would have told them. `looks`: validation
    losses, by the step after which they were taken."""
    now = 1000.0
    records: list[dict[str, object]] = [{"event": "run_started", "time": now}]
    for number, (seconds, workers, loss) in enumerate(steps, start=1):
        now += seconds
        told = [{"rows": rows, "busy_s": busy_s, "wait_s": seconds - busy_s} for rows, busy_s in workers]
        records.append({"event": "step_done", "time": now, "seconds": seconds, "loss": loss, "workers": told})
        if looks and number in looks:
            records.append({"event": "validated", "time": now + 0.1, "loss": looks[number]})
    if validation is not None:
        records.append({"event": "validated", "time": now + 5, "loss": validation})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def sync(tmp_path: Path) -> Timeline:
    steps = [(0.3, [(2, 0.1), (2, 0.1), (2, 0.3)], 5.0 - 0.03 * step) for step in range(70)]
    return read_timeline(write_run(tmp_path / "sync.jsonl", steps, 2.23))


@pytest.fixture
def cadence(tmp_path: Path) -> Timeline:
    first = (1.5, [(10, 0.5), (10, 0.5), (10, 1.5)], 4.5)
    windows = [(1.5, [(30, 1.4), (30, 1.5), (10, 1.5)], 4.0 - 0.3 * window) for window in range(5)]
    last = (0.7, [(17, 0.7), (17, 0.7), (6, 0.7)], 2.4)
    return read_timeline(write_run(tmp_path / "cadence.jsonl", [first, *windows, last], 2.249))


def test_who_computed_when_and_who_waited(sync: Timeline, cadence: Timeline) -> None:
    assert sync.seconds == pytest.approx(21.0) and sync.rows == 420 and sync.rows_of == [140, 140, 140]
    assert [sync.busy_share(worker) for worker in range(3)] == pytest.approx([1 / 3, 1 / 3, 1.0])
    second = cadence.lanes[0][1]
    assert (second.start_s, second.busy_until_s, second.end_s) == pytest.approx((1.5, 2.9, 3.0))
    assert cadence.rows_of == [177, 177, 66]


def test_a_first_step_that_counts_what_was_before_the_run_does_not_reach_back(tmp_path: Path) -> None:
    path = write_run(tmp_path / "x.jsonl", [(0.5, [(1, 0.4)], 1.0)], None)
    path.write_text(
        path.read_text().replace('"seconds": 0.5', '"seconds": 9.0').replace('"busy_s": 0.4', '"busy_s": 9')
    )
    (span,) = read_timeline(path).lanes[0]
    assert (span.start_s, span.busy_until_s, span.end_s) == pytest.approx((0.0, 0.5, 0.5))


def test_the_gain_is_a_sentence_of_what_was_measured(sync: Timeline, cadence: Timeline, tmp_path: Path) -> None:
    assert gain_sentence(sync, cadence) == (
        "Cadence took 9.7 s for the same 420 rows, and Sync 21.0 s: 2.2 times as fast; validation loss 2.25 against"
        " 2.23."
    )
    part = read_timeline(write_run(tmp_path / "part.jsonl", [(5.0, [(200, 4.0), (10, 5.0)], 3.0)], None))
    assert gain_sentence(sync, part) == "Cadence took 5.0 s for 210 rows, and Sync 21.0 s for 420: 2.1 times as fast."


def test_the_gain_is_told_to_the_lowest_loss_that_both_reached(tmp_path: Path) -> None:
    steps = [(1.0, [(6, 1.0)], 3.0)] * 10
    slow = read_timeline(write_run(tmp_path / "slow.jsonl", steps, 1.5, {2: 3.0, 6: 2.0}))
    fast = read_timeline(write_run(tmp_path / "fast.jsonl", steps[:5], 1.6, {1: 3.0, 3: 2.0}))
    assert slow.looks == [(2.0, 3.0), (6.0, 2.0), (10.0, 1.5)]
    sentence, _ = gain_sentence(slow, fast).split("fast. ")
    assert sentence == "To a validation loss of 1.60 Cadence took 5.0 s, and Sync 9.2 s: 1.8 times as "


def test_losses_are_compared_over_equally_many_rows(sync: Timeline) -> None:
    means = sync.means_over(30)
    assert [mean.rows for mean in means] == [30] * 14
    assert means[0].loss == pytest.approx(5.0 - 0.03 * 2) and means[0].end_s == pytest.approx(1.5)
    assert [mean.rows for mean in sync.means_over(300)] == [420], "a short rest counts with what is before it"


def test_steps_without_a_loss_are_drawn_and_do_not_spoil_a_mean(sync: Timeline, tmp_path: Path) -> None:
    steps = [(1.0, [(10, 0.5)], loss) for loss in (4.0, math.nan, 2.0, math.nan, math.nan)]
    path = write_run(tmp_path / "holed.jsonl", steps, math.nan)
    path.write_text(path.read_text().replace("NaN", '"nan"'))  # as EventFile writes it
    holed = read_timeline(path)
    first, second = holed.means_over(30)
    assert first.loss == 3.0 and first.rows == 30
    assert math.isnan(second.loss) and second.rows == 20
    assert draw_comparison(sync, holed, slow=0, picture=tmp_path / "both.png").exists()
    assert gain_sentence(sync, holed).endswith("validation loss nan against 2.23.")


def test_the_picture_of_both_is_a_png(sync: Timeline, cadence: Timeline, tmp_path: Path) -> None:
    picture = draw_comparison(sync, cadence, slow=2, picture=tmp_path / "both.png")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
