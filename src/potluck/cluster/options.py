"""UpOptions: the options of `potluck up`, and what each node makes of them. Imports no torch."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from potluck.cluster.plan import As, NodeResources
from potluck.config import from_dict, parse_toml, to_dict
from potluck.errors import ConfigError
from potluck.launch.host_options import HostArgs, HostOptions, host_args
from potluck.launch.options import Data, Ranks, Settings, Threads
from potluck.save.run_folder import holds_run, name_fault
from potluck.train.arguments import TrainArgs, WorkersConfig, find_recipe
from potluck.words import say


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    what: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            metavar="RECIPE|SCRIPT [ARGUMENTS ...]", help="A recipe, as for train; or a Python file, as for run."
        ),
    ]
    data: Data = ()
    workers: Annotated[
        int | None,
        tyro.conf.arg(
            aliases=["-n"],
            metavar="N",
            help="Workers on each node.",
            help_behavior_hint="(default: one for each GPU, or one)",
        ),
    ] = None
    threads: Threads = None
    ranks: Ranks = None
    out: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FOLDER",
            help="The run folder, which all nodes share.",
            help_behavior_hint="(default: runs/NAME, with the job's number if it has one)",
        ),
    ] = None
    led: Annotated[
        As | None,
        tyro.conf.arg(
            name="as",
            help="A fixed group, or a host that nodes may join and leave.",
            help_behavior_hint="(default: a group where all nodes are alike and will stay)",
        ),
    ] = None
    on: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="ray|ADDRESS",
            help="The Ray cluster of this machine, or of that address.",
            help_behavior_hint="(default: whatever started this)",
        ),
    ] = None
    port: Annotated[int, tyro.conf.arg(metavar="N", help="Of the first node; 0: any that is free.")] = 0
    address: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="NAME", help="How others reach the first node.", help_behavior_hint="(default: its name)"
        ),
    ] = None
    patience_s: Annotated[
        float,
        tyro.conf.arg(name="patience", metavar="SECONDS", help="How long a node may be silent, or out of reach."),
    ] = 30.0
    at_least: Annotated[int, tyro.conf.arg(metavar="N", help="Workers that a host waits for at first.")] = 1
    settings: Settings = field(default_factory=list)
    arguments: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Arguments of a script."""

    @property
    def is_script(self) -> bool:
        return self.what.endswith(".py")

    def folder(self, job: str) -> Path:
        """Return the run folder, which is the same on all nodes, and when the job is started again."""
        if self.out is not None:
            return Path(self.out)
        name = Path(self.what).stem if self.is_script else self._table().get("name", "run")
        if fault := name_fault(name):
            raise ConfigError(f"{self.what}: name {fault}.")
        return Path("runs") / (f"{name}-{job}" if job else name)

    def _table(self) -> dict[str, Any]:
        text, source = find_recipe(self.what)
        return parse_toml(text, source=source, overrides=tuple(self.settings))

    def workers_here(self, resources: NodeResources, local_tasks: int) -> int:
        """One for each GPU; where the recipe splits a model over ranks, one that has all of them."""
        if self.workers is not None:
            return self.workers
        splits = not self.is_script and "strategy" in self._table() and self.led != "group"
        return 1 if splits else max(1, len(resources.gpus) // local_tasks)

    def workers_config(self, count: int, resources: NodeResources, local_tasks: int) -> WorkersConfig:
        """Threads: an even share of what the scheduler gave, unless somebody has chosen."""
        config = WorkersConfig()
        if not self.is_script and isinstance(table := self._table().get("workers"), dict):
            config = from_dict(WorkersConfig, table, "workers")
        even = max(1, resources.cores // (count * local_tasks))
        return replace(
            config, count=count, threads=self.threads or config.threads or even, ranks=self.ranks or config.ranks
        )

    def host_args(self, folder: Path, config: WorkersConfig, *, local: int, address: str) -> HostArgs:
        options = HostOptions(
            what=self.what,
            settings=self.settings,
            workers=local,
            threads=config.threads,
            ranks=config.ranks,
            out=str(folder),
            resume=holds_run(folder),
            host="0.0.0.0",
            port=self.port,
            address=self.address or address,
            patience_s=self.patience_s,
            at_least=self.at_least,
        )
        args = host_args(options)
        return replace(args, command=(*args.command, *self.arguments) if self.is_script else args.command)

    def group_command(self, folder: Path, *, resume: bool) -> list[str]:
        """Return the command that a rank of a fixed group runs: as under potluck train, or potluck run."""
        if self.is_script:
            return [self.what, *self.arguments]
        args = TrainArgs(recipe=self.what, settings=tuple(self.settings), out=str(folder), resume=resume)
        return ["--recipe", json.dumps(to_dict(args))]


def joining_settings(args: HostArgs) -> tuple[str, ...]:
    """Return the settings of workers that join this host from nodes of the same job; a script has none."""
    return tuple(json.loads(args.command[1])) if args.recipe else ()


def resumes(folder: Path) -> bool:
    """Whether the run folder holds a run, which is said: it resumes."""
    if holds_run(folder):
        say(f"{folder} holds a run, which resumes.")
        return True
    return False
