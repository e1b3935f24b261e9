"""Fine-tuning that others join, as a person would: the commands, real processes, a joiner that is killed."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.test_cli import POTLUCK, children, start, steps, wait_until
from tests.cli.test_host import invite_of
from tests.finetune.made import judge, make_place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(place: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=200, **options)


def losses_of(run: Path) -> list[float]:
    records = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "step_done"]


def test_two_joiners_of_which_one_is_killed_learn_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place(tmp_path)
    judged = judge(place, epochs=4)
    host = start(
        place, "host", "tuned.toml", "-n", "0", "--at-least", "2", "--patience", "10", "--set", "fit.epochs=4",
    )  # fmt: skip
    folder = place / "runs" / "tuned"
    line = invite_of(folder)
    own = ("join", "--threads", "1", "--data", "rows.jsonl")
    lacking = run(place, "join", "--data", "rows.jsonl", line)
    assert lacking.returncode == 2 and "--base FOLDER" in lacking.stderr and "--fetch-base" in lacking.stderr
    first = start(place, *own, "--base", "base", line)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    second = start(place, *own, "--fetch-base", line)
    wait_until(lambda: len(steps(folder)) >= 2, timeout_s=120)
    for pid in (*children(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    out, error = host.communicate(timeout=120)
    _, said = second.communicate(timeout=60)
    assert host.returncode == 0 and second.returncode == 0, (out, error, said)
    assert "The model is in" in said and list((tmp_path / "cache" / "potluck" / "bases").glob("*/config.json"))
    assert losses_of(folder) == pytest.approx(judged["losses"], rel=1e-5)
    assert "after:" in out and f"potluck chat {Path('runs') / 'tuned'}" in out, out + error
    alone = run(place, "train", "tuned.toml", "--out", "alone", "--set", "fit.epochs=4")
    assert alone.returncode == 0, alone.stderr
    theirs, ours = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (folder, place / "alone"))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_command_writes_a_recipe_trains_resumes_and_chats(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    told = ("finetune", "base", "rows.jsonl", "--set", "optimizer.lr=1e-2", "--set", "batch.size=4")
    written = run(place, *told, "--write", "mine.toml")
    assert written.returncode == 0 and "potluck host mine.toml" in written.stdout
    again = run(place, *told, "--write", "mine.toml")
    assert again.returncode == 2 and "is not overwritten" in again.stderr
    done = run(place, *told, "-n", "2", "--out", "here", "--set", "fit.epochs=1", "--set", "workers.threads=1")
    assert done.returncode == 0, done.stderr
    for words in ("Finished", "validation loss", "before:", "after:", "here/adapter", "potluck chat here"):
        assert words in done.stdout, done.stdout
    more = run(place, "train", "here/run.toml", "--out", "here", "--resume", "--set", "fit.epochs=2")
    assert more.returncode == 0 and "here/adapter" in more.stdout, more.stderr
    talked = run(place, "chat", "here", "--temperature", "0", "--length", "5", input="what is one and two?\n/quit\n")
    assert talked.returncode == 0 and len(talked.stdout.splitlines()) == 1, talked.stderr
    assert "Traceback" not in done.stderr + more.stderr + talked.stderr
    assert run(place, "chat", "base").returncode == 2
