"""potluck demo: the same model over the same rows twice, Sync plain and then Cadence, on workers of which one is slow.

Imports no torch: both runs are launched like any other recipe's, and what is shown in the end is read from their
events.
"""

import itertools
import json
from pathlib import Path

from rich.console import Console

from potluck.config import to_dict
from potluck.errors import ConfigError
from potluck.launch.processes import launch
from potluck.page.start import page_of_training
from potluck.page.where import PageAddress
from potluck.show.picture import draw_comparison, gain_sentence, read_timeline
from potluck.train.arguments import TrainArgs, WorkersConfig, workers_of
from potluck.train.slowdown import Slowdown

RECIPE = "demo"
SETTINGS = (
    "workers.count=3",
    "workers.threads=1",
    "data.limit_bytes=250_000",
    "data.validation=0.03",
    "model.dim=64",
    "model.layers=2",
    "model.context=128",
    "batch.size=12",
    "optimizer.lr=6e-3",
    "fit.epochs=3",
    "fit.validate_every=50",
    "fit.checkpoint.every=1_000_000",
)
"""Settings that differ from the recipe, so that both runs together stay well below three minutes on two cores."""
POLICIES = {
    "sync": ("policy.kind=sync", "policy.balance=false"),
    "cadence": ("policy.kind=cadence",),
}


def demo(settings: tuple[str, ...], workers: int | None, out: str | None, page: PageAddress | None = None) -> int:
    """Returns the exit code."""
    if any(setting.startswith("policy") for setting in settings):
        raise ConfigError(
            "The demo compares two policies, so it has them from nobody. Choose one with: potluck train demo --set"
            " policy.kind=cadence"
        )
    extra = (f"workers.count={workers}",) if workers is not None else ()
    settings = (*SETTINGS, *settings, *extra)
    config = workers_of(TrainArgs(recipe=RECIPE, settings=settings))
    if config.count < 2:
        raise ConfigError(
            "The demo is of workers that differ, and needs at least two. For one: potluck train demo -n 1"
        )
    console = Console(highlight=False, soft_wrap=True)
    folders = find_folders(out)
    said = {
        "sync": "Sync: all wait for the slowest at every step",
        "cadence": "Cadence: each does what it can, and they agree once in a while",
    }
    console.print(
        f"Potluck: {config.count} processes on this machine become one training run. Twice, to compare; each loads"
        " PyTorch first."
    )
    with page_of_training(page, None):
        for number, (policy, folder) in enumerate(folders.items(), 1):
            console.print(f"\n{number} of {len(folders)}. {said[policy]}", style="bold")
            if code := _train(config, (*settings, *POLICIES[policy]), folder, is_last=number == len(folders)):
                return code
    show_comparison(console, folders, slow=config.count - 1)
    return 0


def _train(config: WorkersConfig, settings: tuple[str, ...], folder: Path, *, is_last: bool) -> int:
    args = TrainArgs(
        recipe=RECIPE,
        settings=settings,
        out=str(folder),
        slowdown=Slowdown(worker=config.count - 1),
        summary="paragraph" if is_last else "none",
    )
    return launch(["--recipe", json.dumps(to_dict(args))], config)


def find_folders(out: str | None) -> dict[str, Path]:
    """Return the folder of each policy's run: below --out, or runs/demo-POLICY with one number for both."""
    if out is not None:
        return {policy: Path(out) / policy for policy in POLICIES}
    for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
        folders = {policy: Path("runs") / f"{RECIPE}-{policy}{suffix}" for policy in POLICIES}
        if not any((folder / "checkpoints").exists() for folder in folders.values()):
            break
    return folders


def show_comparison(console: Console, folders: dict[str, Path], slow: int) -> None:
    runs = {policy: read_timeline(folder / "events.jsonl") for policy, folder in folders.items()}
    with console.status("Drawing both timelines ..."):
        picture = draw_comparison(runs["sync"], runs["cadence"], slow, folders["cadence"] / "comparison.png")
    console.print(f"\n{gain_sentence(runs['sync'], runs['cadence'])}", style="bold", soft_wrap=not console.is_terminal)
    rows = {"picture": picture, "Sync": folders["sync"], "Cadence": folders["cadence"]}
    for name, path in rows.items():
        console.print(f"  {name:<8} {path}")
    console.print("\nWhat to try next", style="bold")
    for command, what in (
        ("potluck train demo --data YOUR_TEXT", "a larger run of this model, on your own files or folders"),
        ("potluck train demo -n 3 --set policy.kind=cadence", "the same under Cadence"),
        ("potluck run -n 2 YOUR_SCRIPT.py", "your own loop on the same engine, as in examples/own_loop.py"),
        ("potluck host small", "a run that other machines join"),
        ("potluck doctor", "what this machine brings, and what would make it faster"),
    ):
        console.print(f"  {command}\n      {what}")
