"""A worker of a split model dies by kill -9, and the others go on from what they had kept in memory."""

import json
import os
import re
import runpy
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from potluck.engine.engine import Engine
from potluck.events import read_events
from tests.cli.test_cli import RECIPE, ROOT, children, is_alive, start, steps, wait_until

MARK = """
import json, os
def mark(text):
    with open(f"marked-{os.environ['RANK']}.part", "w") as file:
        file.write(json.dumps([os.getpid(), os.environ["POTLUCK_MEMORY"], text]))
    os.rename(file.name, file.name.replace(".part", ""))
"""
SCRIPT = """
import signal, sys, time
import torch
from safetensors.torch import save_file
import potluck
from potluck.events import kind_of
from potluck.save.buddies import Buddies
from tests.gathered import gathered

def build():
    torch.manual_seed(0)
    block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    blocks = torch.nn.ModuleList(block() for _ in range(3))
    return torch.nn.Sequential(torch.nn.Linear(6, 16), *blocks, torch.nn.Linear(16, 1))

def train(fleet, epochs, at_step=lambda step: None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    heard = []
    fleet.events.listeners.append(lambda event: heard.append(event))
    model, optimizer, loader = fleet.prepare(model, optimizer, rows, batch_size=8)
    while loader.position.epoch < epochs:
        for batch in loader:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            fleet.backward(loss, samples=len(batch))
            fleet.step()
            at_step(fleet.step_number)
    whole = {name: gathered(parameter) for name, parameter in model.named_parameters()}
    return heard, whole

def stop_at(step):
    if step == 8 and os.environ["RANK"] in victims:
        mark("waits to be killed")
        time.sleep(60)

if __name__ == "__main__":
    strategy, when, victims = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
    fleet = potluck.init(potluck.Sync(balance=False), getattr(potluck, strategy)(buddy=True, buddy_every=3))
    passes = Buddies._pass_on
    def die(self, name, *arguments):
        if os.environ["RANK"] in victims and self._number == 2 and name.startswith("optimizer"):
            mark("dies in a refresh")
            os.kill(os.getpid(), signal.SIGKILL)
        passes(self, name, *arguments)
    if fleet.run.recovery is None and when == "refresh":
        Buddies._pass_on = die
    is_first = fleet.run.recovery is None and when == "step"
    heard, whole = train(fleet, 2, stop_at if is_first else lambda step: None)
    if fleet.rank == 0:
        with open("heard.json", "w") as file:
            json.dump([[kind_of(event), getattr(event, "step", 0), getattr(event, "loss", 0.0),
                        getattr(event, "sentence", "")] for event in heard], file)
        save_file(whole, "whole.safetensors")
"""  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + MARK + SCRIPT)
    return tmp_path


def marked(place: Path, *ranks: int) -> list[tuple[int, Path]]:
    """Waits until they are where they will die: their process, and the run's folder in memory."""
    files = [place / f"marked-{rank}" for rank in ranks]
    wait_until(lambda: all(file.exists() for file in files))
    told = [json.loads(file.read_text()) for file in files]
    return [(pid, Path(memory).parent) for pid, memory, _ in told]


def ended(process: subprocess.Popen[str]) -> str:
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr, stderr
    return stderr


def assert_as_undisturbed(place: Path, from_step: int) -> None:
    """Losses of each step and the weights in the end, against one process that nobody killed."""
    heard, whole = runpy.run_path(str(place / "script.py"))["train"](Engine(), 2)
    expected = {event.step: event.loss for event in heard if type(event).__name__ == "StepDone"}
    told: list[list[Any]] = json.loads((place / "heard.json").read_text())
    losses = {step: loss for kind, step, loss, _ in told if kind == "step_done"}
    assert list(losses) == list(range(from_step + 1, 15))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-4), step
    assert [step for kind, step, *_ in told if kind == "recovered"] == [from_step]
    proofs = [sentence for kind, *_, sentence in told if kind == "epoch_done"]
    assert len(proofs) == 2 and all("each of its 50 samples was used exactly once" in proof for proof in proofs)
    for name, tensor in load_file(place / "whole.safetensors").items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_of_three_go_on_with_a_model_that_was_split_over_all(place: Path) -> None:
    process = start(place, "run", "-n", "3", "--threads", "1", "script.py", "FullShard", "step", "1")
    ((victim, memory),) = marked(place, 1)
    assert memory.is_dir()
    os.kill(victim, signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0, said
    assert "Worker 1 was ended by SIGKILL. 2 workers continue from step 6, which they had kept in memory." in said
    assert_as_undisturbed(place, from_step=6)
    assert not memory.exists()


@pytest.mark.slow
def test_a_kill_within_a_refresh_leaves_the_one_before(place: Path) -> None:
    process = start(place, "run", "-n", "2", "--threads", "1", "script.py", "ShardGradOp", "refresh", "0")
    said = ended(process)
    assert process.returncode == 0, said
    assert "Worker 0 was ended by SIGKILL. 1 worker continues from step 3, which it had kept in memory." in said
    assert_as_undisturbed(place, from_step=3)
    assert not marked(place, 0)[0][1].exists()


def test_two_neighbours_lost_at_once_end_the_run(place: Path) -> None:
    """What the launcher finds in memory is enough for this: nothing is trained."""
    (place / "keep.py").write_text(
        "import sys, time\nfrom pathlib import Path\n"
        + MARK
        + "home = Path(os.environ['POTLUCK_MEMORY']) / f\"rank-{os.environ['RANK']}\"\n"
        "for kind in ('own', 'neighbour'):\n"
        "    (home / f'{kind}-00000001').mkdir(parents=True)\n"
        "    (home / f'{kind}-00000001' / 'standing.json').write_text(json.dumps({'step': 5}))\n"
        "mark('waits to be killed')\n"
        "while not Path('killed').exists(): time.sleep(0.01)\n"
        "sys.exit(75)\n"
    )
    process = start(place, "run", "-n", "3", "keep.py")
    victims = marked(place, 0, 1, 2)
    for victim, _ in victims[1:]:
        os.kill(victim, signal.SIGKILL)
    (place / "killed").touch()
    said = ended(process)
    assert process.returncode == 128 + signal.SIGKILL
    assert re.search(r"Worker [12] was ended by SIGKILL, so the others stopped too.", said)
    assert "Worker 2, which kept a copy of worker 1's part, was lost with it." in said
    assert not victims[0][1].exists()


@pytest.mark.slow
def test_a_recipe_goes_on_in_its_folder_and_ctrl_c_still_saves_it(place: Path) -> None:
    (place / "tiny.toml").write_text(
        RECIPE.replace("every = 5", "") + "[strategy]\nkind = 'full_shard'\nbuddy = true\n"
    )
    (place / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(900))[:10_000])
    process = start(place, "train", "tiny.toml", "--out", "mine", "--set", "fit.epochs=1000")
    wait_until(lambda: len(steps(place / "mine")) >= 12)
    workers = children(process.pid)
    told = Path(f"/proc/{workers[1]}/environ").read_text().split("\0")
    memory = Path(next(line for line in told if line.startswith("POTLUCK_MEMORY=")).partition("=")[2]).parent
    os.kill(workers[1], signal.SIGKILL)
    wait_until(lambda: "recovered" in [record["event"] for record in read_events(place / "mine" / "events.jsonl")])
    assert memory.is_dir()
    process.send_signal(signal.SIGINT)
    said = ended(process)
    assert process.returncode == 130 and "Saved in mine/checkpoints/step-" in said
    records = list(read_events(place / "mine" / "events.jsonl"))
    first, second = (record for record in records if record["event"] == "run_started")
    assert first["workers"] == 2 and second["workers"] == 1
    assert second["from_step"] >= 10 and second["from_step"] % 10 == 0
    assert not memory.exists()


def test_a_killed_launcher_leaves_nothing_in_memory(place: Path) -> None:
    (place / "wait.py").write_text(f"import time\n{MARK}\nmark('waits')\ntime.sleep(60)\n")
    process = start(place, "run", "-n", "1", "wait.py")
    ((worker, memory),) = marked(place, 0)
    assert memory.is_dir()
    process.kill()
    process.communicate()
    wait_until(lambda: not is_alive(worker) and not memory.exists(), 10)
