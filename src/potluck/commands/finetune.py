"""`potluck finetune`, and `potluck chat` with what it has trained."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from potluck.commands.train import launch_recipe
from potluck.launch.options import Out, Page, Settings, Track, Workers
from potluck.words import say


@dataclass
class Finetune:
    """Fine-tune a model of Hugging Face on your rows: an adapter (LoRA), or with --full all of it.

    It ends with a sample before and after, the validation loss, and a folder that from_pretrained loads. What it does
    is a recipe: with --write it is only written, for potluck train and potluck host.
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="MODEL", help="A folder that save_pretrained wrote, or an id on the hub."),
    ]
    rows: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(
            metavar="DATA [DATA ...]",
            help="JSONL (messages; prompt and completion; text; text and label), CSV, Parquet, text, a folder of"
            " them or of datasets, or an id on the hub.",
            help_behavior_hint="(required)",
        ),
    ]
    task: Annotated[
        Literal["auto", "write", "classify"],
        tyro.conf.arg(metavar="TASK", help="write or classify; auto: classify if the rows have a label."),
    ] = "auto"
    full: Annotated[bool, tyro.conf.arg(help="Train all of the model, not an adapter.")] = False
    load: Annotated[
        Literal["plain", "4bit", "int8"],
        tyro.conf.arg(metavar="HOW", help="Keep the frozen weights in fewer bits: 4bit or int8."),
    ] = "plain"
    workers: Workers = None
    out: Out = None
    resume: Annotated[bool, tyro.conf.arg(help="Continue from the newest checkpoint of the run folder.")] = False
    write: Annotated[
        str | None,
        tyro.conf.arg(metavar="FILE.toml", help="Only write the recipe, for potluck train and potluck host."),
    ] = None
    track: Track = field(default_factory=list)
    page: Page = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        from potluck.train.arguments import finetune_args, track_setting, write_recipe

        args = finetune_args(
            self.model,
            self.rows,
            task=self.task,
            load=self.load,
            full=self.full,
            settings=(*self.settings, *track_setting(self.track)),
            workers=self.workers,
        )
        if self.write is not None:
            return write_recipe(args, Path(self.write))
        say(f"Fine-tuning {self.model} on {', '.join(self.rows)}. First PyTorch and transformers are loaded.")
        return launch_recipe(replace(args, out=self.out, resume=self.resume), None, self.page)


@dataclass
class Chat:
    """Talk to what a run of potluck finetune has trained. Reads lines, and answers as it writes; /quit ends."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN", help="A run's folder.")]
    temperature: Annotated[
        float, tyro.conf.arg(metavar="T", help="0: always what is likeliest; 1: as the model has it.")
    ] = 0.7
    length: Annotated[int, tyro.conf.arg(metavar="N", help="The most tokens of an answer.")] = 512

    def __call__(self) -> int:
        from potluck.finetune.chat import chat

        return chat(Path(self.run), temperature=self.temperature, length=self.length)
