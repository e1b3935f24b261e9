"""What the page shows is what a plain recomputation from all events gives, of bounded size however long the run is."""

import json
import math
import random
from pathlib import Path
from typing import Any

from potluck.page.beside import MOST_LINES, TAIL_BYTES
from potluck.page.fold import MOST_EPOCHS, MOST_GONE, MOST_LOOKS, MOST_STORY, MOST_WORKERS, Fold
from potluck.page.metrics import exposition
from potluck.page.peaks import peak_of
from potluck.page.reader import LONGEST_LINE, RunReader, now_record
from potluck.page.series import MOST_CELLS, MOST_POINTS
from potluck.page.server import _as_json
from potluck.page.view import MOST_OF_SETTING, MOST_SETTINGS, Viewer, head_of, machine_of, rows_of
from potluck.show.output import OutputFile, OutputLine

START = 1_790_000_000.0


def started(**more: Any) -> dict[str, Any]:
    told = {"name": "a", "folder": "runs/a", "workers": 2, "device": "cpu", "parameters": 1000, "unit": "tokens"}
    told |= {"batch_size": 8, "steps_total": 0, "from_step": 0, "settings": {}}
    return {"event": "run_started", "time": START, **told, **more}


def step(number: int, workers: int = 2, *, loss: float | str = 1.0, at: float | None = None) -> dict[str, Any]:
    parts = [
        {"rank": rank, "rows": 4, "samples": 40.0, "busy_s": 0.1 * (rank + 1), "wait_s": 0.1, "name": f"w{rank}"}
        for rank in range(workers)
    ]
    place = {"step": number, "epoch": 0, "rows_seen": 8 * number, "samples": 80.0, "loss": loss, "lr": 0.1}
    time = START + (number if at is None else at)
    return {"event": "step_done", "time": time, **place, "grad_norm": 2.0, "seconds": 1.0, "workers": parts}


def folded(*records: dict[str, Any]) -> Fold:
    fold = Fold()
    for record in records:
        fold.take(json.loads(json.dumps(record)))
    return fold


def view(fold: Fold) -> dict[str, Any]:
    return Viewer().update(fold, {}, {})


def test_points_of_a_long_run_are_a_plain_recomputation_of_it() -> None:
    draw = random.Random(3)
    losses = [draw.uniform(1, 5) for _ in range(10_000)]
    fold = folded(started(), *(step(number + 1, loss=loss) for number, loss in enumerate(losses)))
    series = fold.series
    assert series.span == 16 and len(series.points) <= MOST_POINTS
    for index, point in enumerate(series.points):
        part = losses[index * series.span : (index + 1) * series.span]
        assert (point.first, point.last) == (index * series.span + 1, index * series.span + len(part))
        assert (point.least, point.most) == (min(part), max(part))
        assert point.loss is not None and math.isclose(point.loss, sum(part) / len(part))
        assert point.rows == 8 * point.last and point.at_s == point.last
    assert sum(point.steps for point in series.points) == len(losses)


def test_the_timeline_adds_up_to_what_each_worker_did() -> None:
    fold = folded(started(), *(step(number, workers=3) for number in range(1, 1001)))
    assert len(fold.timeline.points) <= MOST_CELLS
    for rank in range(3):
        busy = sum(cell.done[rank][0] for cell in fold.timeline.points)
        assert math.isclose(busy, 1000 * 0.1 * (rank + 1), rel_tol=1e-9)


def test_a_view_that_was_sent_in_pieces_is_the_one_that_is_sent_at_once() -> None:
    """As the page puts them together: it must not matter when it was opened."""
    records = [started(), *(step(number) for number in range(1, 1500))]
    records[700:700] = [{"event": "validated", "time": START, "step": 699, "loss": 0.5, "metrics": {}}]
    fold, viewer, page = Fold(), Viewer(), dict[str, Any]()
    points, cells, rows = list[Any](), list[Any](), dict[int, Any]()
    for number, record in enumerate(records):
        fold.take(record)
        if number % 97 and number != len(records) - 1:
            continue
        sent = json.loads(json.dumps(viewer.update(fold, {}, {})))
        page |= {name: sent[name] for name in ("run", "head", "looks") if name in sent}
        if "series" in sent:
            points[sent["series"]["start"] :] = sent["series"]["points"]
        if "timeline" in sent:
            cells[sent["timeline"]["start"] :] = sent["timeline"]["cells"]
        rows |= sent.get("workers", {}).get("changed", {})
    whole = json.loads(json.dumps(view(fold)))
    assert points == whole["series"]["points"] and cells == whole["timeline"]["cells"]
    assert rows == whole["workers"]["changed"]
    assert all(page[name] == whole[name] for name in ("run", "head", "looks"))


def test_nothing_is_sent_of_what_has_not_changed() -> None:
    fold, viewer = folded(started(), step(1), step(2)), Viewer()
    assert {"run", "head", "series", "timeline", "workers", "story"} <= viewer.update(fold, {}, {}).keys()
    assert viewer.update(fold, {}, {}) == {}


def test_a_thousand_workers_and_many_events_stay_small() -> None:
    fold = folded(started(), *(step(number, workers=1000) for number in range(1, 40)))
    assert len(json.dumps(view(fold))) < 500_000
    for number in range(5000):
        fold.take({"event": "noticed", "time": START, "sentence": "x" * 100})
        fold.take({"event": "validated", "time": START, "step": number, "loss": 1.0, "metrics": {}})
        came = {"event": "worker_came", "time": START + number, "worker": 5000 + number, "name": "x", "kind": "cpu"}
        fold.take(came | {"step": 0, "workers": 1})
        fold.take(
            {"event": "worker_went", "time": START, "worker": 5000 + number, "name": "x", "reason": "", "polite": 1}
        )
    assert len(fold.story()) <= sum(MOST_STORY.values()) and len(fold.looks) <= MOST_LOOKS
    assert sum(not row.is_in for row in fold.workers.values()) <= MOST_GONE


def test_a_killed_worker_and_a_save_stay_told_under_a_thousand_decisions() -> None:
    went = {"event": "worker_went", "time": START, "worker": 1, "name": "w1", "reason": "killed", "polite": False}
    saved = {"event": "checkpoint_saved", "time": START, "step": 1, "folder": "a/step-1", "bytes": 9, "stall_s": 0.0}
    fold, viewer = folded(started(), step(1), went | {"workers": 1}, saved), Viewer()
    viewer.update(fold, {}, {})
    for number in range(1000):
        names = f"w{'abcdefghij'[number % 10]}{'abcdefghij'[number // 10 % 10]}"
        fold.take({"event": "decided", "time": START, "step": 2, "rows": [4, 4], "reason": f"{names} is the slowest."})
        fold.take({"event": "noticed", "time": START, "sentence": f"{names} was noticed."})
    told = fold.story()
    assert [each[0] for each in told] == sorted(each[0] for each in told)
    groups = {group: [each for each in told if each[3] == group] for group in MOST_STORY}
    assert "w1 is lost" in groups["workers"][0][5] and "a/step-1" in groups["saves"][0][5]
    assert len(groups["decisions"]) == MOST_STORY["decisions"] and len(groups["run"]) == MOST_STORY["run"]
    assert {each[3] for each in viewer.update(fold, {}, {})["story"]} == {"decisions", "run"}


def test_settings_are_told_by_name_and_however_many_a_host_tells_few_are_kept() -> None:
    fold = folded(started(settings={"optimizer": "AdamW", "optimizer.lr": 0.1, "amsgrad": False, "fit": {"epochs": 3}}))
    assert view(fold)["run"]["settings"] == {
        "optimizer": "AdamW",
        "optimizer.lr": "0.1",
        "amsgrad": "false",
        "fit.epochs": "3",
    }
    long = "x" * 5000
    deep = {f"{number}{long}": {f"{each}": [long] * 3 for each in range(40)} for number in range(30)}
    many = view(folded(started(settings=deep)))["run"]["settings"]
    assert len(many) <= MOST_SETTINGS and len(json.dumps(many)) < 4 * MOST_SETTINGS * MOST_OF_SETTING
    assert folded(started(), started(settings=7)).run["settings"] == {}


def test_whatever_a_hostile_host_tells_a_watcher_keeps_little_of_it() -> None:
    """Workers that come and never go, long sentences and names, many figures: each more than is kept of it."""
    long, many = "x" * 300_000, {f"m{number}": 1.0 for number in range(20_000)}
    fold = folded(started(), step(1))
    for number in range(2 * MOST_WORKERS):
        name = long if number % 100 == 0 else "x"
        fold.take({"event": "worker_came", "time": START, "worker": number, "name": name, "kind": name, "step": 0})
    odd = {"reason": long, "step": 1, "seconds": 1, "sentence": long, "prompt": long, "text": long, "more": [long] * 9}
    odd |= {"epoch": 0, "used": 1, "total": 1, "same_weights": True, "source": long, "workers": 1, "detail": [many] * 9}
    for number in range(400):
        fold.take({"event": "noticed", "time": START, **odd})
        fold.take({"event": "decided", "time": START, **odd, "sentence": f"{number}{long}"})
        if number < 20:
            fold.take({"event": "validated", "time": START, "step": number, "loss": 1.0, "metrics": many | {long: 1}})
            fold.take({"event": "epoch_done", "time": START, **odd, "epoch": number})
            fold.take({"event": "sampled", "time": START, **odd})
            fold.take({"event": "step_skipped", "time": START, **odd})
    fold.take(started(name=long, layout=[many] * 20, device_name=long) | {"more": many})
    fold.take(step(2) | {"more": many, "name": long})
    fold.take(step(3) | {"step": [long]})
    fold.take(step(3, workers=2 * MOST_WORKERS))
    fold.take({"event": "run_ended", "time": START, **odd})
    assert len(fold.workers) <= MOST_WORKERS and fold.last["step"] == 2 and fold.ended is not None
    assert len(repr(fold)) < 4_000_000 and len(exposition(fold, {}, START)) < 4_000_000
    assert len(json.dumps(view(fold))) < 4_000_000
    rows = [{"id": n, "name": long[:900], "phase": "in", "doing": long[:900], "silent_s": 0.0} for n in range(5000)]
    now = now_record(json.dumps({"time": START, "members": 1, "waits_for": 0, "workers": rows, "x": many}).encode())
    assert now is not None and len(json.dumps(now)) < 4_000_000


def test_a_run_that_writes_at_every_look_is_caught_up_with(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    with (tmp_path / "events.jsonl").open("w") as file:
        for record in (started(), step(1), step(2)):
            file.write(json.dumps(record) + "\n")
            file.flush()
            assert not reader.read_on() and reader.is_caught_up
    assert reader.fold.last["step"] == 2
    reader.close()


def test_a_line_that_is_too_long_is_passed_over_and_the_next_is_read(tmp_path: Path) -> None:
    long = step(1) | {"more": "x" * (3 * LONGEST_LINE)}
    lines = [json.dumps(each) for each in (started(), long, step(2))]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    reader = RunReader(tmp_path)
    while reader.read_on():
        assert len(reader._rest) <= LONGEST_LINE + 1
    assert [point.last for point in reader.fold.series.points] == [2]
    reader.close()


def test_what_a_script_prints_is_followed_line_by_line_also_into_another_file(tmp_path: Path) -> None:
    def line(number: int) -> OutputLine:
        return OutputLine(START + number, "host-worker-0", f"epoch {number}")

    file, reader, viewer = OutputFile(tmp_path, most_bytes=2000), RunReader(tmp_path), Viewer()
    reader.read_on()
    told: list[Any] = []
    for number in range(100):
        file.write(line(number))
        if number % 7 == 0 or number == 99:  # now and then several lines, and the file has changed
            reader.read_on()
            assert reader.output is not None
            told += viewer.new_lines(reader.output.lines)
    assert (tmp_path / "output.1.log").exists()
    assert [each[1:] for each in told] == [[START + n, "host-worker-0", f"epoch {n}"] for n in range(100)]
    with (tmp_path / "output.log").open("a") as half:
        half.write("2026-11-18T23:40:12.123Z host-worker-0 half")
    reader.read_on()
    assert reader.output is not None and viewer.new_lines(reader.output.lines) == []
    file.close()
    reader.close()


def test_of_a_script_that_prints_and_prints_the_newest_lines_are_kept(tmp_path: Path) -> None:
    lines = [OutputLine(START, "w", "x" * 50 + str(number)).written() for number in range(20_000)]
    long = OutputLine(START, "w", "y" * 3 * TAIL_BYTES).written()
    (tmp_path / "output.log").write_text("".join(lines))
    reader = RunReader(tmp_path)
    reader.read_on()
    assert reader.output is not None and len(reader.output.lines) == MOST_LINES
    assert [each[3] for each in reader.output.lines] == ["x" * 50 + str(n) for n in range(20_000 - MOST_LINES, 20_000)]
    with (tmp_path / "output.log").open("a") as file:
        file.write(long + lines[0])
    for _ in range(5):
        reader.read_on()
        assert len(reader.output._rest) <= TAIL_BYTES
    assert reader.output.lines[-1][3] == "x" * 50 + "0" and all(len(each[3]) <= 1000 for each in reader.output.lines)
    reader.close()


def test_the_recipe_of_a_run_folder_is_read_as_settings_and_a_broken_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps(started()) + "\n")
    for recipe, settings in (
        ('name = "a"\n[fit]\nepochs = 3\nclip = true\n', {"name": "a", "fit.epochs": "3", "fit.clip": "true"}),
        ("name = [", {}),
        ("x = 1\n" * (1 << 15), {}),
        ("\n".join(f"x{number} = '{'y' * 90}'" for number in range(3000)), {}),
    ):
        (tmp_path / "run.toml").write_text(recipe)
        reader = RunReader(tmp_path)
        reader.read_on()
        assert reader.recipe == settings
        reader.close()


def test_steps_that_are_done_again_take_the_place_of_those_before() -> None:
    back = {"event": "went_back", "time": START + 20, "from_step": 20, "step": 12}
    fold = folded(started(), *(step(n) for n in range(1, 21)), back, *(step(n, at=n + 10) for n in range(13, 16)))
    assert [point.last for point in fold.series.points] == list(range(1, 16))


def test_the_time_between_a_stop_and_a_restart_is_not_training() -> None:
    ended = {"event": "run_ended", "time": START + 10, "reason": "interrupted", "step": 10, "seconds": 10.0}
    again = started(time=START + 5000, from_step=10)
    fold = folded(started(), *(step(n) for n in range(1, 11)), ended, again, step(11, at=5001))
    assert fold.trained_s == 11 and fold.ended is None


def test_a_pause_is_no_training_and_tells_nothing_of_the_speed() -> None:
    before, after = [step(n) for n in range(1, 21)], [step(n, at=5000 + n) for n in range(21, 24)]
    resumed = {"event": "ordered", "time": START + 5020, "action": "resume", "step": 20, "done": True, "sentence": "s"}
    fold = folded(started(steps_total=100), *before, resumed, *after)
    assert fold.trained_s == 23 and fold.rate == 80.0 and fold.left_s() == (77.0, 77.0, 77.0)


def test_steps_that_are_done_again_do_not_spoil_the_predicted_end() -> None:
    lost = {"event": "recovered", "time": START + 20, "step": 12, "lost": [1], "workers": 1}
    again = [step(n, at=n + 8) for n in range(13, 16)]
    fold = folded(started(steps_total=100), *(step(n) for n in range(1, 21)), lost, *again)
    assert [point.last for point in fold.series.points] == list(range(1, 16))
    assert fold.left_s() == (85.0, 85.0, 85.0)


def test_epochs_are_counted_beyond_those_that_are_kept_and_one_that_is_done_again_once() -> None:
    told = {"event": "epoch_done", "time": START, "total": 9, "same_weights": True, "sentence": "s"}
    fold = folded(*(told | {"epoch": n, "used": 9 - (n == 3)} for n in (*range(70), 69)))
    assert view(fold)["head"]["epochs"] == [69, 70] and len(fold.epochs) == MOST_EPOCHS
    assert "potluck_epochs_total 70" in exposition(fold, {}, START).splitlines()


def test_one_that_the_host_does_not_know_any_more_is_not_counted() -> None:
    """It came, and its host was killed before it had computed anything or gone."""
    came = {"event": "worker_came", "time": START, "worker": 7, "name": "x", "kind": "cpu", "step": 0, "workers": 3}
    fold = folded(started(), came, step(1), step(2))
    rows = [{"id": n, "name": f"w{n}", "phase": "ready", "doing": "", "silent_s": 0.0} for n in range(2)]
    assert head_of(fold, {"time": START + 9, "workers": rows})["workers"] == 2


def test_the_predicted_end_has_a_band_from_how_the_speed_has_changed() -> None:
    slow = [step(n, at=2.0 * n) for n in range(1, 101)]
    quick = [step(n, at=200 + 0.5 * (n - 100)) for n in range(101, 201)]
    left = folded(started(steps_total=300), *slow, *quick).left_s()
    assert left is not None
    best, least, most = left
    assert math.isclose(best, 50.0, rel_tol=0.01) and math.isclose(least, 50.0, rel_tol=0.01)
    assert 100 < most <= 200 + 1e-6


def test_lines_that_are_no_events_change_nothing() -> None:
    fold = folded(started(), step(1))
    before = json.dumps(view(fold))
    odd: list[Any] = [{}, {"event": 3}, {"event": "step_done"}, {"event": "step_done", "time": "x", "workers": 3}]
    odd += [started(steps_total="x"), started(wire=[]), {"event": "run_ended", "time": START, "reason": "finished"}]
    odd += [{"event": "worker_came", "time": START, "worker": 5, "name": "x", "kind": 3, "step": 0, "workers": 1}]
    for record in [*odd, {"event": "worker_went", "worker": []}, {"event": "unheard of", "time": 0.0}]:
        fold.take(record)
    assert json.dumps(view(fold)) == before


def test_a_loss_that_is_no_number_leaves_a_gap_and_no_nan_in_what_is_sent() -> None:
    fold = folded(started(), step(1), step(2, loss="nan"), step(3))
    points = view(fold)["series"]["points"]
    assert [point[2] for point in points] == [1.0, None, 1.0]
    json.dumps(view(fold), allow_nan=False)


def test_mfu_is_told_where_every_device_is_known_and_nowhere_else() -> None:
    run = started(device_name="NVIDIA H200", flops_per_sample=1e12)
    fold = folded(run, step(1), step(2), step(3))
    assert fold.usage(["NVIDIA H200, torch 2.13.0", "NVIDIA H200"]) == 80 * 1e12 / (2 * 989e12)
    assert fold.usage(["NVIDIA H200", "AMD EPYC, 2 threads"]) is None
    assert peak_of("NVIDIA GeForce RTX 3080") == 59.5e12 and peak_of("NVIDIA H200 NVL") == 835e12
    assert not any(map(peak_of, ("NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU")))
    assert peak_of("NVIDIA L40S") == 362e12 and peak_of("NVIDIA L4") == 121e12 and peak_of("NVIDIA A1000") is None


def test_a_silent_worker_is_told_with_when_it_was_last_heard() -> None:
    fold = folded(started(), step(1), step(2))
    silent = {"id": 0, "name": "w0", "phase": "ready", "doing": "computing", "silent_s": 12.5, "address": "10.0.0.7"}
    now = {"time": START + 20, "workers": [silent | {"rtt_s": 0.0021}]}
    rows = rows_of(fold, now)
    assert rows[0][8:12] == ["10.0.0.7, 2.1 ms", "ready", "computing", START + 7.5]
    assert rows[0][13] and not rows[1][13]  # the host no longer knows the other
    assert rows_of(fold, now | {"members": 5000})[1][13]  # of a crowd it does not tell of all


USES = {"cores": 1.5, "of_cores": 2, "memory_bytes": 4e9, "of_memory_bytes": 16_000_000_000, "gpu": 0.0}
NO_GPU, A_GPU = {"gpu_bytes": 0, "of_gpu_bytes": 0}, {"gpu": 0.93, "gpu_bytes": 20e9, "of_gpu_bytes": 80_000_000_000}


def test_what_a_worker_uses_of_its_machine_is_told_under_a_host_and_in_a_group() -> None:
    fold = folded(started(), step(1), step(2))
    live = {"id": 0, "name": "w0", "phase": "ready", "doing": "", "silent_s": 0.1, "uses": USES | NO_GPU}
    hosted = rows_of(fold, now_record(json.dumps({"time": START + 3, "workers": [live]}).encode()) or {})
    assert hosted[0][14] == [["processor", 0.75, "1.5 of 2 cores"], ["memory", 0.25, "4 GB of 16 GB"]]
    group = rows_of(fold, {}, {1: USES | A_GPU})
    assert group[0][14] is None and [part[0] for part in group[1][14]] == ["processor", "GPU", "memory", "GPU memory"]
    assert group[1][14][1] == ["GPU", 0.93, "93 % busy"] and group[1][14][3][2] == "20 GB of 80 GB"
    ended = {"event": "run_ended", "time": START, "step": 2, "seconds": 1.0, "reason": "finished"}
    assert rows_of(folded(started(), step(1), ended), {}, {0: USES | NO_GPU})[0][14] is None
    for odd in ({}, USES, USES | {"cores": "x"}, USES | A_GPU | {"of_gpu_bytes": None}):
        assert machine_of(odd) == []  # a host elsewhere may tell anything


def test_how_things_stand_is_taken_from_another_machine_only_as_it_should_be() -> None:
    row = {"id": 0, "name": "w0", "phase": "ready", "doing": "", "silent_s": 1.0}
    told = now_record(json.dumps({"time": 1.0, "workers": [row, row | {"rtt_s": "x"}, row | {"kind": 3}, 7]}).encode())
    assert told == {"time": 1.0, "workers": [row]}
    for odd in ({"time": "x"}, {"time": 1, "bytes": {}}, {"time": 1, "bytes": 3}, {"time": 1, "members": "x"}, []):
        assert now_record(json.dumps(odd).encode()) is None


def test_a_number_that_is_not_finite_does_not_reach_a_browser() -> None:
    assert json.loads(_as_json({"a": [float("inf"), 1.5], "b": float("nan")})) == {"a": [None, 1.5], "b": None}


def test_figures_for_prometheus_escape_what_people_have_named() -> None:
    record = step(1)
    record["workers"][0]["name"] = 'a"b\\c\nd'
    text = exposition(folded(started(), record), {}, START + 3)
    assert 'potluck_worker_share_ratio{worker="0",name="a\\"b\\\\c\\nd"} 0.5' in text.splitlines()
    assert "potluck_steps_total 1" in text.splitlines() and "# TYPE potluck_steps_total counter" in text
    assert all(line.startswith(("#", "potluck_")) for line in text.splitlines())
