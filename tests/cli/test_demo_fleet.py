"""The fleet's demo for real: the kills happen, the weights are the same, and it can tell when they are not."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from potluck.events import read_events
from tests.cli.test_cli import children, is_alive, run, steps, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "examples.demo_fleet"]
AT_ROOT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def demo(place: Path, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=place, env=AT_ROOT, capture_output=True, text=True, timeout=timeout_s)


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_events(folder / "events.jsonl"))


def test_the_weights_of_a_run_with_kills_and_a_newcomer_are_those_of_the_undisturbed_one(tmp_path: Path) -> None:
    done = demo(tmp_path, *DEMO, timeout_s=600)
    said = done.stdout
    print(said)
    assert done.returncode == 0, said + done.stderr
    folder = tmp_path / "runs" / "demo-fleet"
    records = events(folder / "disturbed")
    lost = [r for r in records if r["event"] == "worker_went" and not r["polite"]]
    assert len(lost) == 1, "one worker was killed without a word, and no other was lost"
    begun = [r for r in records if r["event"] == "run_started"]
    assert len(begun) == 2 and begun[0]["from_step"] == 0 and begun[1]["from_step"] >= 35, "the host resumed"
    names = {r["name"] for r in records if r["event"] == "worker_came"}
    assert len(names) == 4, "three, and a newcomer"
    first = next(i for i, r in enumerate(records) if r["event"] == "step_done")
    last = records.index(begun[1])
    newcomer = [r for r in records[first:last] if r["event"] == "worker_came" and r["step"] >= 20]
    assert len({r["name"] for r in newcomer} - {lost[0]["name"]}) >= 1
    done_steps = [r["step"] for r in records if r["event"] == "step_done"]
    assert done_steps == sorted(set(done_steps)) and done_steps[-1] == 285, "none was done twice"
    assert (folder / "disturbed.safetensors").read_bytes() == (folder / "undisturbed.safetensors").read_bytes()
    told = re.search(r"joiner-2 is killed \(-9\), after step (\d+)\.", said)
    assert told and 20 <= int(told[1]) < lost_at(records)
    assert "The host is killed (-9), after step" in said and "The same weights, bit for bit" in said
    assert said.count("was used exactly once; all workers hold the same weights") == 3
    assert not (folder / "too-short-1").exists()


def lost_at(records: list[dict[str, Any]]) -> int:
    """The first step that was done after the worker had gone."""
    at = next(i for i, r in enumerate(records) if r["event"] == "worker_went" and not r["polite"])
    return int(next(r["step"] for r in records[at:] if r["event"] == "step_done"))


def test_another_seed_makes_other_weights_and_that_is_said(tmp_path: Path) -> None:
    """And a run that is over before anybody could join is done again, longer."""
    order = 'FleetOrder(settings=["data.limit_bytes=20_000"], joiners=2, undisturbed=("fit.seed=5",))'
    code = f"import sys; from examples.demo_fleet.__main__ import *; sys.exit(demo_fleet({order}))"
    done = demo(tmp_path, sys.executable, "-c", code, timeout_s=800)
    said = done.stdout
    print(said)
    assert done.returncode == 1, said + done.stderr
    assert "it is too short for this machine. Once more, with 12 epochs." in said
    assert (tmp_path / "runs" / "demo-fleet" / "too-short-1" / "events.jsonl").exists()
    assert "The weights of the disturbed run are not those of the undisturbed one." in said
    assert "This is not as promised." in said and "bit for bit" not in said


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*DEMO, "--out", "mine"], cwd=tmp_path, env=AT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: len(steps(tmp_path / "mine" / "disturbed")) >= 2, 200)
    ours = children(process.pid)
    workers = [pid for child in ours for pid in children(child)]
    assert len(ours) >= 4 and len(workers) >= 3
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(map(is_alive, [*ours, *workers]))


def test_the_last_words_of_a_child_that_fails_are_shown(tmp_path: Path) -> None:
    done = demo(tmp_path, *DEMO, "--set", "model.heads=7", timeout_s=300)
    assert done.returncode == 1
    assert re.search(r"potluck: joiner-\d stopped with exit code 2\. The last it said, in .*heads", done.stderr, re.S)
    assert "Traceback" not in done.stderr


def test_the_command_that_it_was_says_where_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "fleet")
    assert done.returncode == 2 and "python -m examples.demo_fleet" in done.stderr
