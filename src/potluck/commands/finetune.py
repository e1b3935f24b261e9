"""`potluck finetune`, and `potluck chat` with what it has trained."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from potluck.commands.train import launch_recipe
from potluck.errors import ConfigError
from potluck.launch.options import Out, Page, Settings, Track, Workers, option
from potluck.trackers.known import check_trackers
from potluck.train.arguments import TrainArgs, as_settings, write_recipe
from potluck.words import say


@dataclass
class Finetune:
    """Fine-tune a model of Hugging Face on your rows: an adapter (LoRA), or with --full all of it.

    It ends with a sample before and after, the validation loss, and a folder that from_pretrained loads. What it does
    is a recipe: with --write it is only written, for potluck train and potluck host.
    """

    model: Annotated[tyro.conf.Positional[str], option("MODEL")]
    """A folder that save_pretrained wrote, or an id on the hub."""
    rows: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(
            metavar="DATA [DATA ...]",
            help="JSONL (messages; prompt and completion; text; text and label), CSV, Parquet, text, a folder of"
            " them or of datasets, or an id on the hub.",
            help_behavior_hint="(required)",
        ),
    ]
    task: Annotated[Literal["auto", "write", "classify"], option("TASK")] = "auto"
    """write or classify; auto: classify if the rows have a label."""
    full: bool = False
    """Train all of the model, not an adapter."""
    load: Annotated[Literal["plain", "4bit", "int8"], option("HOW")] = "plain"
    """Keep the frozen weights in fewer bits: 4bit or int8."""
    workers: Workers = None
    out: Out = None
    resume: bool = False
    """Continue from the newest checkpoint of the run folder."""
    write: Annotated[str | None, option("FILE.toml")] = None
    """Only write the recipe, for potluck train and potluck host."""
    track: Track = field(default_factory=list)
    page: Page = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        args = self._args()
        if self.write is not None:
            return write_recipe(args, Path(self.write))
        say(f"Fine-tuning {self.model} on {', '.join(self.rows)}. First PyTorch and transformers are loaded.")
        return launch_recipe(args, None, self.page)

    def _args(self) -> TrainArgs:
        """Name a built-in recipe, and what fills it in."""
        if not self.rows:
            raise ConfigError("potluck finetune takes a model, and what to train it on: potluck finetune MODEL DATA")
        given = (self.model, *self.rows)
        model, *rows = [str(Path(each).expanduser().absolute()) if Path(each).exists() else each for each in given]
        named = {"model.hf": model, "model.task": self.task, "model.load": self.load, "name": _run_name(model, rows)}
        own = as_settings({name: value for name, value in named.items() if value not in PLAIN})
        own += as_settings({"data.paths": rows, "workers.count": self.workers})
        return TrainArgs(
            recipe="finetune-full" if self.full else "finetune",
            settings=(*own, *self.settings, *as_settings({"fit.track": check_trackers(self.track)})),
            out=self.out,
            resume=self.resume,
        )


PLAIN = ("auto", "plain")
"""Settings that need not be said."""


def _run_name(model: str, rows: Sequence[str]) -> str:
    """Make a run's name from the model and the data, as far as these are names."""
    found = "-".join(re.sub(r"[^\w.-]+", "-", Path(each).stem or "data") for each in (model, rows[0]))
    return found.strip(".-")[:80] or "finetune"


@dataclass
class Chat:
    """Talk to what a run of potluck finetune has trained. Reads lines, and answers as it writes; /quit ends."""

    run: Annotated[tyro.conf.Positional[str], option("RUN")]
    """A run's folder."""
    temperature: Annotated[float, option("T")] = 0.7
    """0: always what is likeliest; 1: as the model has it."""
    length: Annotated[int, option("N")] = 512
    """The most tokens of an answer."""

    def __call__(self) -> int:
        from potluck.finetune.chat import chat

        return chat(Path(self.run), temperature=self.temperature, length=self.length)
