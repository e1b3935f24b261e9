"""Trackers with their real libraries, offline: what each keeps of a run, and that a resumed run is the same one there.

TensorBoard's is there wherever tests are. The others are large: `make trackers` installs them, and runs this.
"""

import importlib.util
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from potluck.events import (
    Event,
    EventFile,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
    WorkerCame,
    WorkerStep,
    record_of,
)
from potluck.trackers import process
from potluck.trackers.known import LIBRARIES, TrackedRun
from potluck.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}


def needs(library: str) -> None:
    try:
        is_there = importlib.util.find_spec(LIBRARIES[library]) is not None
    except ImportError:
        is_there = False
    if not is_there:
        pytest.skip(f"{library} is not installed here; make trackers installs it")


def test_a_long_run_may_be_told_afterwards_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All lines are there at once, and the tracker takes each in its time."""
    ended: list[int] = []
    monkeypatch.setattr(process, "FINISH_S", 1.2)
    monkeypatch.setattr(process.os, "_exit", ended.append)
    monkeypatch.setattr(process.sys, "stdin", io.StringIO())
    (tmp_path / "events.jsonl").write_text("a line\n" * 8)
    began = time.monotonic()
    for number, _ in enumerate(process._lines(tmp_path / "events.jsonl", 0), 1):
        wait_until(lambda done=number: time.monotonic() > began + 0.2 * done, 30)  # type: ignore[misc]
        assert not ended
    assert time.monotonic() - began > process.FINISH_S
    assert wait_until(lambda: ended == [1], 30)  # it does not finish


def part_of_a_run(from_step: int, reason: str) -> list[Event]:
    parts = tuple(
        WorkerStep(rank=rank, rows=2, samples=2.0, busy_s=0.1, wait_s=0.0, name=name)
        for rank, name in enumerate(("fast one", ""))
    )
    steps = [
        StepDone(
            step=step,
            epoch=0,
            rows_seen=4 * step,
            samples=4.0,
            loss=1 / step,
            lr=0.1,
            grad_norm=float("nan"),
            seconds=0.1,
            workers=parts,
        )
        for step in range(from_step + 1, from_step + 4)
    ]
    begun = RunStarted(
        name="tiny",
        folder="/secret/place",
        workers=2,
        device="cpu",
        parameters=10,
        unit="rows",
        batch_size=4,
        steps_total=9,
        from_step=from_step,
    )
    ended = RunEnded(
        reason=reason, step=from_step + 3, rows_seen=12, seconds=1.0, loss=0.3, validation_loss=0.5, skipped=0
    )
    return [begun, *steps, Validated(step=from_step + 3, loss=0.5, metrics={"accuracy": 0.9}), ended]


def tell(tracker: str, place: Path, events: list[Event]) -> list[str]:
    """The lines that its process answers, without those that say that a record was taken."""
    (place / "run").mkdir(exist_ok=True)
    (place / "run" / "run.toml").write_text('name = "tiny"\n[optimizer]\nlr = 0.1\n')
    kept = {"MLFLOW_TRACKING_URI": (place / "mlruns").as_uri(), "TRACKIO_DIR": str(place / "trackio")}
    (place / "run" / "events.jsonl").write_text("".join(json.dumps(record_of(event)) + "\n" for event in events))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "potluck.trackers.process", tracker, "run"],
        cwd=place,
        env=os.environ | OFFLINE | kept,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    log = place / "run" / "trackers" / f"{tracker}.log"
    assert done.returncode == 0, (done.stdout, log.read_text())
    lines = done.stdout.splitlines()
    assert lines.count(".") == len(events)
    return [line for line in lines if line != "."]


def test_tensorboard_has_every_number_and_drops_what_is_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = tell("tensorboard", tmp_path, part_of_a_run(0, "interrupted"))
    assert said == ["tensorboard: see the curves with tensorboard --logdir run/tensorboard"]
    came = WorkerCame(worker=3, name="x", kind="cpu", step=2, workers=2)
    tell("tensorboard", tmp_path, [came, *part_of_a_run(2, "finished")])  # from the checkpoint of step 2
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    losses = [(entry.step, round(entry.value, 4)) for entry in found.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, 0.3333), (4, 0.25), (5, 0.2)]
    names = set(found.Tags()["scalars"])
    assert {"train/lr", "train/grad_norm", "validation/loss", "validation/accuracy"} <= names
    assert [entry.step for entry in found.Scalars("worker_came/workers")] == [2], "though it came before the run began"
    assert {"workers/fast-one/busy_s", "workers/1/rows"} <= names
    assert not (tmp_path / "run" / "trackers" / "tensorboard.log").read_text(), "it had something to complain about"


def test_a_signal_to_all_processes_of_a_machine_does_not_keep_the_end_from_a_tracker(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "potluck.trackers.process", "tensorboard", "."]
    file, (*begun, ended) = EventFile(tmp_path / "events.jsonl"), part_of_a_run(0, "interrupted")
    with subprocess.Popen(command, cwd=tmp_path, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for event in begun:
            file(event)
        assert process.stdout.readline()  # it has begun
        process.send_signal(signal.SIGTERM)
        file(ended)
        process.stdin.close()
        assert process.wait(60) == 0 and process.stdout.read().splitlines().count(".") == len(begun) + 1


def test_a_trackers_process_imports_no_torch() -> None:
    look = "import sys, potluck.trackers.process, potluck.trackers.tensorboard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


def test_an_id_that_was_kept_is_used_again_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    run = TrackedRun("wandb", tmp_path, "tiny")
    assert run.id_to_use() == run.id_to_use() == run.kept_id()
    (tmp_path / "trackers" / "wandb.json").write_text("{")
    assert run.kept_id() is None


@pytest.mark.slow
def test_wandb_keeps_two_parts_of_a_run_under_one_id(tmp_path: Path) -> None:
    needs("wandb")
    said = tell("wandb", tmp_path, part_of_a_run(0, "interrupted"))
    assert said == ["wandb: this run is kept in run/wandb"]
    tell("wandb", tmp_path, part_of_a_run(2, "finished"))
    own = json.loads((tmp_path / "run" / "trackers" / "wandb.json").read_text())["id"]
    kept = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(kept) == 2 and all(folder.name.endswith(own) for folder in kept)
    assert not (tmp_path / "wandb").exists(), "nothing is left beside the run"
    records = [record for folder in kept for record in wandb_records(next(folder.glob("*.wandb")))]
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    losses = [(row["step"], row["train/loss"]) for row in history if "train/loss" in row]
    assert losses == [(step, 1 / step) for step in (1, 2, 3, 3, 4, 5)]
    assert any(row.get("validation/accuracy") == 0.9 for row in history)
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0]
    settings = {update.key: update.value_json for r in records if r.HasField("run") for update in r.run.config.update}
    assert settings["optimizer.lr"] == "0.1" and "/secret/place" not in str(settings)


def wandb_records(path: Path) -> list[Any]:
    """Its file is a LevelDB log after seven bytes: blocks of 32 KiB, with parts of records, each after seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.slow
def test_mlflow_keeps_two_parts_of_a_run_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    tell("mlflow", tmp_path, part_of_a_run(0, "The loss was not finite."))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    own = json.loads((tmp_path / "run" / "trackers" / "mlflow.json").read_text())["id"]
    assert client.get_run(own).info.status == "FAILED"
    tell("mlflow", tmp_path, part_of_a_run(2, "finished"))
    run = client.get_run(own)
    assert run.info.status == "FINISHED" and run.info.run_name == "tiny"
    assert len(client.search_runs([run.info.experiment_id])) == 1
    losses = [(entry.step, entry.value) for entry in client.get_metric_history(own, "train/loss")]
    assert sorted(losses) == [(step, 1 / step) for step in (1, 2, 3, 3, 4, 5)]
    assert run.data.metrics["validation/accuracy"] == 0.9 and run.data.metrics["workers/fast-one/rows"] == 2
    assert run.data.params["optimizer.lr"] == "0.1" and run.data.params["run.batch_size"] == "4"


@pytest.mark.slow
def test_trackio_keeps_two_parts_of_a_run_under_one_name(tmp_path: Path) -> None:
    needs("trackio")
    said = tell("trackio", tmp_path, part_of_a_run(0, "interrupted"))
    own = json.loads((tmp_path / "run" / "trackers" / "trackio.json").read_text())["id"]
    assert own.startswith("tiny-") and said == [f"trackio: see the run {own} with trackio show --project potluck"]
    tell("trackio", tmp_path, part_of_a_run(2, "finished"))
    with sqlite3.connect(tmp_path / "trackio" / "potluck.db") as kept:
        rows = kept.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, _, _ in rows} == {own}
    told = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [(step, row["train/loss"]) for step, row in told if "train/loss" in row] == [
        (step, 1 / step) for step in (1, 2, 3, 3, 4, 5)
    ]
    assert any(row.get("validation/accuracy") == 0.9 for _, row in told)


@pytest.mark.slow
def test_opentelemetry_has_each_number_as_a_gauge(tmp_path: Path) -> None:
    needs("otel")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from potluck.trackers.otel import make

    reader = InMemoryMetricReader()
    tracker = make(reader)
    tracker.start(TrackedRun("otel", tmp_path, "tiny"))
    tracker.log(1, 1.0, {"train/loss": 0.7})
    tracker.log(2, 2.0, {"train/loss": 0.5, "workers/a/rows": 3.0})
    (told,) = reader.get_metrics_data().resource_metrics
    tracker.finish("finished")
    found = {m.name: m.data.data_points[0].value for scope in told.scope_metrics for m in scope.metrics}
    assert found == {"potluck.train.step": 2.0, "potluck.train.loss": 0.5, "potluck.workers.a.rows": 3.0}
    assert told.resource.attributes["potluck.run"] == "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_one_without_an_account_or_a_place_says_why(tracker: str, tmp_path: Path) -> None:
    needs(tracker)
    (tmp_path / "events.jsonl").write_text(json.dumps(record_of(part_of_a_run(0, "finished")[0])) + "\n")
    without = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW"))}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "potluck.trackers.process", tracker, str(tmp_path)],
        cwd=tmp_path,
        env=without
        | {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "MLFLOW_TRACKING_URI": "file:mlruns"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stdout.startswith({"wandb": "UsageError: ", "mlflow": "MlflowException: "}[tracker]), done.stdout
    assert done.stdout.count("\n") == 1
