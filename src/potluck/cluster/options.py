"""UpOptions: the options of `potluck up`, and what each node makes of them. Imports no torch."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.cluster.plan import As, NodeResources
from potluck.config import from_dict, parse_toml, to_dict
from potluck.errors import ConfigError
from potluck.save.run_folder import holds_run, name_fault
from potluck.train.arguments import HostArgs, Listening, TrainArgs, WorkersConfig, find_recipe, host_args

PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpOptions:
    what: str
    arguments: tuple[str, ...] = ()
    """Arguments of a script."""
    settings: tuple[str, ...] = ()
    workers: int | None = None
    threads: int | None = None
    ranks: int | None = None
    out: str | None = None
    led: As | None = None
    port: int = 0
    address: str | None = None
    patience_s: float = PATIENCE_S
    at_least: int = 1

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
        return parse_toml(text, source=source, overrides=self.settings)

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
        listening = Listening(
            host="0.0.0.0",
            port=self.port,
            address=self.address or address,
            patience_s=self.patience_s,
            at_least=self.at_least,
            insecure=False,
        )
        args = host_args(
            what=self.what,
            settings=self.settings,
            workers=local,
            threads=config.threads,
            ranks=config.ranks,
            out=str(folder),
            resume=holds_run(folder),
            listening=listening,
        )
        return replace(args, command=(*args.command, *self.arguments) if self.is_script else args.command)

    def group_command(self, folder: Path, *, resume: bool) -> list[str]:
        """Return the command that a rank of a fixed group runs: as under potluck train, or potluck run."""
        if self.is_script:
            return [self.what, *self.arguments]
        args = TrainArgs(recipe=self.what, settings=self.settings, out=str(folder), resume=resume)
        return ["--recipe", json.dumps(to_dict(args))]
