"""examples/port with other people's trainers, as a person starts them: run -n 2, and a host with a kill."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.test_cli import POTLUCK, children, start, steps, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PORTS = Path(__file__).parents[2] / "examples" / "port"
HF_SYNC = ("Trainer): ...", 'Trainer):\n    fleet_options = {"policy": "sync"}  # noqa: RUF012\n')
TRAINERS: dict[str, dict[str, Any]] = {
    "hf": {
        "weights": "hf-model/model.safetensors",
        "longer": ("num_train_epochs=2", "num_train_epochs=8"),
        "sync": HF_SYNC,
    },
    "sft": {
        "weights": "sft-model/model.safetensors",
        "longer": ("num_train_epochs=4", "num_train_epochs=12"),
        "sync": HF_SYNC,
    },
    "lightning": {
        "weights": "lightning-run/last.ckpt",
        "longer": ("max_epochs=5", "max_epochs=15"),
        "sync": ('strategy="potluck"', 'strategy=potluck.integrations.lightning.PotluckStrategy(policy="sync")'),
    },
}


def copy_of(name: str, place: Path, *changes: tuple[str, str]) -> Path:
    place.mkdir()
    text = (PORTS / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (place / name).write_text(text, encoding="utf-8")
    return place / name


def weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".ckpt":
        return torch.load(path, weights_only=True)["state_dict"]  # type: ignore[no-any-return]
    return load_file(path)


def assert_near(found: Path, expected: Path, below: float) -> None:
    ours, plain = weights(found), weights(expected)
    assert ours.keys() == plain.keys()
    assert max(float((ours[name] - plain[name]).abs().max()) for name in plain) < below


def run_plain(name: str, place: Path, *changes: tuple[str, str]) -> None:
    script = copy_of(f"{name}_plain.py", place, *changes)
    done = subprocess.run([sys.executable, str(script)], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TRAINERS)
def test_two_workers_end_with_the_weights_of_one_process(tmp_path: Path, name: str) -> None:
    told = TRAINERS[name]
    run_plain(name, tmp_path / "plain")
    script = copy_of(f"{name}_with_potluck.py", tmp_path / "ours")
    done = subprocess.run(
        [*POTLUCK, "run", "-n", "2", script.name], cwd=script.parent, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert_near(script.parent / told["weights"], tmp_path / "plain" / told["weights"], 1e-5)


def run_split(place: Path, options: str) -> subprocess.CompletedProcess[str]:
    split = (HF_SYNC[0], HF_SYNC[1].replace('"policy": "sync"', options))
    script = copy_of("sft_with_potluck.py", place, split)
    command = [*POTLUCK, "run", "-n", "2", script.name]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=150)


def test_trls_model_may_be_split_over_two_workers_and_not_cut(tmp_path: Path) -> None:
    """The other trainers' are in tests/parity/test_trainers.py."""
    run_plain("sft", tmp_path / "plain")
    done = run_split(tmp_path / "ours", '"strategy": potluck.FullShard()')
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    weights = TRAINERS["sft"]["weights"]
    assert_near(tmp_path / "ours" / weights, tmp_path / "plain" / weights, 1e-5)
    cut = run_split(tmp_path / "cut", '"stages": potluck.Stages(protocol=potluck.Pipeline(micro_batch_size=4))')
    assert cut.returncode == 2 and "Traceback" not in cut.stderr, cut.stderr
    assert "has been replaced, as TRL's trainers do" in cut.stderr and "FullShard()" in cut.stderr, cut.stderr


@pytest.mark.parametrize("name", TRAINERS)
def test_a_worker_killed_under_a_host_changes_nothing(tmp_path: Path, name: str) -> None:
    told = TRAINERS[name]
    run_plain(name, tmp_path / "plain", told["longer"])
    script = copy_of(f"{name}_with_potluck.py", tmp_path / "ours", told["longer"], told["sync"])
    _host_with_a_kill(script)
    assert_near(script.parent / told["weights"], tmp_path / "plain" / told["weights"], 1e-4)


def test_accelerates_loop_outlives_a_killed_worker(tmp_path: Path) -> None:
    longer = ("EPOCHS = 3", "EPOCHS = 4")
    said = _host_with_a_kill(copy_of("accelerate_with_potluck.py", tmp_path / "ours", longer))
    assert "epoch 4: accuracy 0.8" in said, said


def _host_with_a_kill(script: Path) -> str:
    folder = script.parent / "runs" / script.stem
    host = start(script.parent, "host", script.name, "-n", "2", "--threads", "1")
    wait_until(lambda: len(steps(folder)) >= 8 and _workers(folder) == 2, timeout_s=120)
    killed = max(children(host.pid))
    os.kill(killed, signal.SIGKILL)
    out, error = host.communicate(timeout=200)
    assert host.returncode == 0 and "Traceback" not in error, out + error
    assert "lost" in out or "left" in out, out
    shutil.rmtree(folder / "checkpoints")
    return out


def _workers(folder: Path) -> int:
    return (folder / "events.jsonl").read_text(encoding="utf-8").count('"worker_came"')
