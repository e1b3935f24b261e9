"""`potluck demo`: the same rows twice, Sync plain and then Cadence, on workers of which one is slow.

Both runs are launched like any other recipe's, and what is shown in the end is read from their events.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from potluck.errors import ConfigError
from potluck.files import first_free
from potluck.launch.options import Data, Out, Page, Settings, Workers
from potluck.launch.processes import launch
from potluck.page.start import page_of_training
from potluck.page.where import page_address
from potluck.show.closing import show_next, show_paths
from potluck.show.picture import draw_comparison, gain_sentence, read_timeline
from potluck.train.arguments import TrainArgs, WorkersConfig, as_settings, workers_of

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
TOLD = {
    "sync": "Sync: all wait for the slowest at every step",
    "cadence": "Cadence: each does what it can, and they agree once in a while",
}


@dataclass
class Demo:
    """Three workers on this machine, one of them three times slower: Sync against Cadence, in under three minutes.

    Both train the same small language model on the same text, the source of Python's standard library, so that
    nothing is downloaded; a picture shows who computed when, and who waited.
    """

    what: Annotated[
        tyro.conf.Positional[Literal["speeds", "fleet"]],
        tyro.conf.arg(help="speeds: workers of which one is slow. fleet: says where that demo is now."),
    ] = "speeds"
    data: Data = ()
    workers: Workers = None
    out: Out = None
    page: Page = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        if self.what == "fleet":
            raise ConfigError(
                "The demo in which a worker and the host are killed is an example now. In a copy of the repository:"
                " make demo-fleet, or python -m examples.demo_fleet"
            )
        if any(setting.startswith("policy") for setting in self.settings):
            raise ConfigError(
                "The demo compares two policies, so it has them from nobody. Choose one with: potluck train demo --set"
                " policy.kind=cadence"
            )
        own = as_settings({"data.paths": self.data, "workers.count": self.workers})
        settings = (*SETTINGS, *self.settings, *own)
        config = workers_of(TrainArgs(recipe=RECIPE, settings=settings))
        if config.count < 2:
            raise ConfigError(
                "The demo is of workers that differ, and needs at least two. For one: potluck train demo -n 1"
            )
        console = Console(highlight=False, soft_wrap=True)
        folders = find_folders(self.out)
        console.print(
            f"Potluck: {config.count} processes on this machine become one training run. Twice, to compare; each loads"
            " PyTorch first."
        )
        with page_of_training(page_address(self.page), None):
            for number, (policy, folder) in enumerate(folders.items(), 1):
                console.print(f"\n{number} of {len(folders)}. {TOLD[policy]}", style="bold")
                if code := _train(config, (*settings, *POLICIES[policy]), folder, is_last=number == len(folders)):
                    return code
        show_comparison(console, folders, slow=config.count - 1)
        return 0


def _train(config: WorkersConfig, settings: tuple[str, ...], folder: Path, *, is_last: bool) -> int:
    args = TrainArgs(
        recipe=RECIPE,
        settings=settings,
        out=str(folder),
        slow_worker=config.count - 1,
        summary="paragraph" if is_last else "none",
    )
    return launch(args.command(), config)


def find_folders(out: str | None) -> dict[str, Path]:
    """Return the folder of each policy's run: below --out, or runs/demo-POLICY with one number for both."""
    if out is not None:
        return {policy: Path(out) / policy for policy in POLICIES}

    def named(wanted: Path) -> dict[str, Path]:
        return {policy: wanted.with_name(f"{RECIPE}-{policy}{wanted.name[len(RECIPE) :]}") for policy in POLICIES}

    def is_taken(wanted: Path) -> bool:
        return any((folder / "checkpoints").exists() for folder in named(wanted).values())

    return named(first_free(Path("runs") / RECIPE, is_taken))


def show_comparison(console: Console, folders: dict[str, Path], slow: int) -> None:
    runs = {policy: read_timeline(folder / "events.jsonl") for policy, folder in folders.items()}
    with console.status("Drawing both timelines ..."):
        picture = draw_comparison(runs["sync"], runs["cadence"], slow, folders["cadence"] / "comparison.png")
    console.print(f"\n{gain_sentence(runs['sync'], runs['cadence'])}", style="bold", soft_wrap=not console.is_terminal)
    show_paths(console, {"picture": picture, "Sync": folders["sync"], "Cadence": folders["cadence"]})
    next_commands = (
        ("potluck train demo --data YOUR_TEXT", "a larger run of this model, on your own files or folders"),
        ("potluck train demo -n 3 --set policy.kind=cadence", "the same under Cadence"),
        ("potluck run -n 2 YOUR_SCRIPT.py", "your own loop on the same engine, as in examples/own_loop.py"),
        ("potluck host small", "a run that other machines join"),
        ("potluck doctor", "what this machine brings, and what would make it faster"),
    )
    show_next(console, next_commands)
