"""UpOptions: the options of `potluck up`, and what each node makes of them. Imports no torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from potluck.cluster.plan import As, NodeResources
from potluck.errors import ConfigError
from potluck.launch.options import Data, HostArgs, HostOptions, Ranks, Settings, Threads, host_args, option
from potluck.save.run_folder import holds_run, name_fault
from potluck.train.arguments import TrainArgs, WorkersConfig, recipe_table, workers_in
from potluck.words import say


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    what: Annotated[tyro.conf.Positional[str], option("RECIPE|SCRIPT [ARGUMENTS ...]")]
    """A recipe, as for train; or a Python file, as for run."""
    data: Data = ()
    workers: Annotated[int | None, option("N", default="one for each GPU, or one", aliases=["-n"])] = None
    """Workers on each node."""
    threads: Threads = None
    ranks: Ranks = None
    out: Annotated[str | None, option("FOLDER", default="runs/NAME, with the job's number if it has one")] = None
    """The run folder, which all nodes share."""
    led: Annotated[
        As | None, option("{group,host}", default="a group where all nodes are alike and will stay", name="as")
    ] = None
    """A fixed group, or a host that nodes may join and leave."""
    on: Annotated[str | None, option("ray|ADDRESS", default="whatever started this")] = None
    """The Ray cluster of this machine, or of that address."""
    port: Annotated[int, option("N")] = 0
    """Port of the first node; 0: any that is free."""
    address: Annotated[str | None, option("NAME", default="its name")] = None
    """How others reach the first node."""
    patience_s: Annotated[float, option("SECONDS", name="patience")] = HostOptions.patience_s
    """How long a node may be silent, or out of reach."""
    at_least: Annotated[int, option("N")] = 1
    """Workers that a host waits for at first."""
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
        return recipe_table(self.what, self.settings)

    def workers_here(self, resources: NodeResources, local_tasks: int) -> int:
        """One for each GPU; where the recipe splits a model over ranks, one that has all of them."""
        if self.workers is not None:
            return self.workers
        splits = not self.is_script and "strategy" in self._table() and self.led != "group"
        return 1 if splits else max(1, len(resources.gpus) // local_tasks)

    def workers_config(self, count: int, resources: NodeResources, local_tasks: int) -> WorkersConfig:
        """Threads: an even share of what the scheduler gave, unless somebody has chosen."""
        config = WorkersConfig() if self.is_script else workers_in(self._table())
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
        return host_args(options, self.arguments if self.is_script else ())

    def group_command(self, folder: Path, *, resume: bool) -> list[str]:
        """Return the command that a rank of a fixed group runs: as under potluck train, or potluck run."""
        if self.is_script:
            return [self.what, *self.arguments]
        args = TrainArgs(recipe=self.what, settings=tuple(self.settings), out=str(folder), resume=resume)
        return args.command()


def resumes(folder: Path) -> bool:
    """Whether the run folder holds a run, which is said: it resumes."""
    if holds_run(folder):
        say(f"{folder} holds a run, which resumes.")
        return True
    return False
