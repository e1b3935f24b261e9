"""`potluck train` and `potluck run`: workers on this machine, for a recipe or for a script of yours."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from potluck.errors import ConfigError
from potluck.launch.options import (
    Count,
    Data,
    Only,
    Out,
    Page,
    Settings,
    Threads,
    Track,
    Workers,
    tell_of_options,
    workers_config,
)
from potluck.launch.processes import launch
from potluck.page.start import page_of_training
from potluck.page.where import page_address
from potluck.trackers.known import check_trackers
from potluck.train.arguments import TrainArgs, as_settings, built_in_recipes, workers_of


@dataclass
class Train:
    """Train a recipe: a file, or a built-in one by its name."""

    recipe: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RECIPE", help=f"A TOML file, or one of: {', '.join(built_in_recipes())}."),
    ]
    data: Data = ()
    workers: Workers = None
    out: Out = None
    resume: Annotated[bool, tyro.conf.arg(help="Continue from the newest checkpoint of the run folder.")] = False
    only: Only = None
    track: Track = field(default_factory=list)
    page: Page = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        if self.recipe.endswith(".py"):
            raise ConfigError(
                f"potluck train takes a recipe, and {self.recipe} is a script: potluck run {self.recipe} runs it on"
                f" workers of this machine, and potluck host {self.recipe} so that others can join."
            )
        given = {"data.paths": self.data, "fit.track": check_trackers(self.track), "workers.count": self.workers}
        settings = (*self.settings, *as_settings(given))
        args = TrainArgs(recipe=self.recipe, settings=settings, out=self.out, resume=self.resume)
        return launch_recipe(args, self.only, self.page)


def launch_recipe(args: TrainArgs, only: int | None, page: str | None) -> int:
    config, address = workers_of(args), page_address(page)
    with page_of_training(address, args.out):
        return launch(args.command(), config, only)


@dataclass
class Run:
    """Run your own script on several workers. It calls potluck.init(), and runs under torchrun too.

    Options come before the script: everything after its name is passed to it.
    """

    script: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SCRIPT [ARGUMENTS ...]", help="A Python file.")]
    workers: Count = 2
    threads: Threads = None
    only: Only = None

    def __call__(self, *arguments: str) -> int:
        if not Path(self.script).is_file():
            raise ConfigError(f"There is no script {self.script}.")
        tell_of_options("run", self, self.script, arguments)
        return launch([self.script, *arguments], workers_config(self.workers, self.threads), self.only)
