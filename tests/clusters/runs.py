"""A small run for clusters, what it must come to, and where its secret must not be."""

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from potluck.events import read_events
from tests.cli.test_cli import RECIPE

POTLUCK = (sys.executable, "-m", "potluck.cli")
STEPS = 40
SETTINGS = ("--set", f"fit.max_steps={STEPS}", "--set", "workers.threads=1")
LONG = ("--set", "fit.epochs=1000", "--set", "fit.max_steps=400", "--set", "workers.threads=1")

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import potluck

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
x = torch.randn(96, 4)
fleet = potluck.init("sync")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = fleet.prepare(model, optimizer, (x, x[:, :1]), batch_size=12)
for a, b in loader:
    fleet.backward(F.mse_loss(model(a), b), samples=len(a))
    fleet.step()
total = sum(p.double().sum().item() for p in model.parameters())
if fleet.rank == 0:
    open(sys.argv[1], "w").write(f"{fleet.link.world} {total:.12f}")
fleet.close()
"""


def furnish(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "tiny.toml").write_text(RECIPE)
    (place / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(900))[:10_000])
    (place / "own.py").write_text(SCRIPT)
    return place


def alone(place: Path, *arguments: str) -> None:
    """A command on this machine, without any scheduler."""
    done = subprocess.run([*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def losses(run: Path) -> list[float]:
    return [float(str(each["loss"])) for each in events(run) if each["event"] == "step_done"]


def events(run: Path) -> list[dict[str, object]]:
    return list(read_events(run / "events.jsonl")) if (run / "events.jsonl").exists() else []


def steps(run: Path) -> list[int]:
    return [int(str(each["step"])) for each in events(run) if each["event"] == "step_done"]


def workers(run: Path) -> int:
    """That have come so far."""
    return sum(each["event"] == "worker_came" for each in events(run))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def secret_of(run: Path) -> str:
    return (run / "identity" / "secret").read_text().strip()


def processes_that_show(secret: str) -> list[str]:
    """By their arguments or their environment, of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                if int(path.name) != os.getpid() and secret.encode() in (path / name).read_bytes():
                    found.append(f"{path.name} {name}")
    return found


def files_that_show(secret: str, folders: Iterable[Path]) -> list[Path]:
    """Of all below these folders, but for those that hold it for their owner alone."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file() and secret.encode() in path.read_bytes():
                    is_private = path.stat().st_mode & 0o077 == 0 and path.name in ("secret", "invite")
                    found += [] if is_private else [path]
    return found
