"""Exports in the program that they are for: lm-eval has our likelihoods.

It may be installed in an environment of its own, whose Python is named by LM_EVAL_PYTHON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import potluck
from potluck.cli import Export
from potluck.config import to_toml
from potluck.train.model import GPT, ModelConfig
from potluck.train.recipe import RunConfig
from potluck.train.text import TOKENIZER, learn_pieces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIZES = ModelConfig(vocab=300, dim=24, layers=2, heads=4, kv_heads=2, hidden=40, context=64)
TASK = """
task: made_up
dataset_path: json
dataset_kwargs:
  data_files: {file}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{asked}}}}"
doc_to_target: "{{{{right}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
"""
ASKED = [
    {"asked": f"the {a} and the", "right": n % 2, "choices": ["cat", "hat"]}
    for n, a in enumerate(["bat", "cat", "hat", "rat", "mat"])
]


def python_with(library: str, variable: str) -> str:
    found = os.environ.get(variable, sys.executable)
    if subprocess.run([found, "-c", f"import {library}"], capture_output=True).returncode:
        pytest.skip(f"{library} is not installed for {found}. Name a Python that has it: {variable}=...")
    return found


@pytest.fixture(params=["bytes", "learnt"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, GPT, Any]:
    """A run's folder, its model, and how it reads text."""
    folder = tmp_path / "run"
    torch.manual_seed(0)
    model = GPT(SIZES)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    fleet = potluck.init()
    fleet.prepare(model, torch.optim.SGD(model.parameters()))
    fleet.save(folder / "checkpoints")
    fleet.wait_for_saves()
    fleet.close()
    (folder / "run.toml").write_text(to_toml(RunConfig(name="mine", model=SIZES)))
    if request.param == "bytes":
        return folder, model, lambda text: list(text.encode())
    learnt = learn_pieces(b"the cat and the hat and the bat, it's 12 o'clock\n" * 20, 300)
    (folder / TOKENIZER).write_text(learnt.json)
    return folder, model, lambda text: learnt.encode(text.encode()).tolist()


def test_lm_eval_has_our_likelihoods(run: tuple[Path, GPT, Any], tmp_path: Path) -> None:
    """A task that is made up here, of two choices each. The judge adds up our own model's log-probabilities."""
    python = python_with("lm_eval", "LM_EVAL_PYTHON")
    folder, model, encode = run
    assert Export(source=str(folder), out=str(tmp_path / "hf"), hf=True)() == 0
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    (tasks / "made_up.yaml").write_text(TASK.format(file=tasks / "rows.jsonl"))
    command = [python, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={tmp_path / 'hf'},dtype=float32"]
    command += ["--tasks", "made_up", "--include_path", str(tasks), "--device", "cpu", "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = next((tmp_path / "out").rglob("samples_made_up*.jsonl")).read_text().splitlines()
    right = 0
    for row, sample in zip(ASKED, sorted(map(json.loads, samples), key=lambda each: each["doc_id"]), strict=True):
        expected = [likelihood(model, encode, row["asked"], f" {choice}") for choice in row["choices"]]
        assert [float(each[0][0]) for each in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right += expected.index(max(expected)) == row["right"]
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    assert results["results"]["made_up"]["acc,none"] == pytest.approx(right / len(ASKED))


def likelihood(model: GPT, encode: Any, asked: str, answer: str) -> float:
    whole = encode(asked + answer)
    begins = len(encode(asked))
    with torch.no_grad():
        logs = model(torch.tensor([whole]))[0].log_softmax(-1)
    return sum(float(logs[at - 1, whole[at]]) for at in range(begins, len(whole)))
