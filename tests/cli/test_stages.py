"""Stages as a person starts them: on one machine, or one worker at a time, each elsewhere, with a store between."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

RECIPE = """
name = "tiny"
[model]
dim = 32
layers = 3
heads = 2
context = 32
[data]
limit_bytes = 20_000
validation = 0.05
[batch]
size = 16
[optimizer]
lr = 1e-3
[stages.protocol]
kind = "datastore"
url = "{url}"
micro_batch_size = 4
keep_every = 3
[workers]
count = 2
threads = 1
patience_s = 40
[fit]
validate_every = 7
[fit.checkpoint]
every = 8
"""
POTLUCK = [sys.executable, "-m", "potluck.cli"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*POTLUCK, "train", str(folder.parent / "tiny.toml"), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def child_of(pid: int) -> int:
    """The worker that a launcher has started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise AssertionError("the launcher started nobody")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_elsewhere_meet_in_a_store_and_one_that_is_killed_goes_on(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE.format(url=f"file://{tmp_path}/store"))
    whole = start(tmp_path / "one", "--only", "0"), start(tmp_path / "two", "--only", "1")
    for process in whole:
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0, said
        assert "was used exactly once" in said
    expected = load_file(tmp_path / "one" / "runs" / "tiny" / "model.safetensors")

    first, second = start(tmp_path / "three", "--only", "0"), start(tmp_path / "four", "--only", "1")
    wait_for(tmp_path / "three" / "runs" / "tiny" / "checkpoints" / "step-00000008")
    os.kill(child_of(second.pid), signal.SIGKILL)
    said, _ = second.communicate(timeout=60)
    assert second.returncode != 0 and "SIGKILL" in said
    second = start(tmp_path / "five", "--only", "1")  # on another machine, as it were
    for process in (first, second):
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0, said
    found = load_file(tmp_path / "three" / "runs" / "tiny" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.equal(found[name]), name  # to the bit
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not (tmp_path / "four" / "runs").exists()  # who is not the first keeps nothing


def test_one_worker_alone_needs_a_store_to_meet_the_others_in(tmp_path: Path) -> None:
    done = subprocess.run(
        [*POTLUCK, "train", "pipeline", "--only", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "they can only meet in a store" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(
        [*POTLUCK, "train", "pipeline", "--only", "3"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "--only takes one of the workers 0 to 2, not 3." in done.stderr


@pytest.mark.slow
def test_the_example_prints_the_same_losses_on_three_workers_as_on_one(tmp_path: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "pipeline.py")
    said = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        for command in ([sys.executable, example], [*POTLUCK, "run", "-n", "3", "--threads", "1", example])
    ]
    assert all(done.returncode == 0 for done in said), said[1].stderr
    one, three = ([float(found) for found in re.findall(r"loss (\d\.\d+)\.", done.stdout)] for done in said)
    assert len(one) == 2 and one == pytest.approx(three, abs=1e-3)
    assert "worker 2 |" in said[1].stdout and "all workers hold the same weights" in said[1].stdout
