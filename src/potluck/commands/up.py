"""`potluck up`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from potluck.commands.options import Data, Ranks, Settings, Threads
from potluck.config import checked
from potluck.environment import check_patience
from potluck.errors import ConfigError
from potluck.train.arguments import data_setting


@dataclass
class Up:
    """Train on all nodes that a scheduler has given: SLURM, Ray, MPI or torchrun, found by what they say of themselves.

    One command on every node, as in `srun potluck up RECIPE`. Nodes that are alike become a fixed group; otherwise the
    first is a host that the others join. A run that the run folder holds resumes. After a script's name, everything
    is passed to it.
    """

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
        Literal["group", "host"] | None,
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
    patience: Annotated[
        float, tyro.conf.arg(metavar="SECONDS", help="How long a node may be silent, or out of reach.")
    ] = 30.0
    at_least: Annotated[int, tyro.conf.arg(metavar="N", help="Workers that a host waits for at first.")] = 1
    settings: Settings = field(default_factory=list)

    def __call__(self, *arguments: str) -> int:
        from potluck.cluster.options import UpOptions
        from potluck.cluster.running import up

        checked(lambda: check_patience("--patience", self.patience))
        if (self.workers is not None and self.workers < 1) or not 0 <= self.port < 1 << 16:
            raise ConfigError("--workers is at least 1, and --port below 65,536.")
        options = UpOptions(
            what=self.what,
            arguments=arguments,
            settings=(*self.settings, *data_setting(self.data)),
            workers=self.workers,
            threads=self.threads,
            ranks=self.ranks,
            out=self.out,
            led=self.led,
            port=self.port,
            address=self.address,
            patience_s=self.patience,
            at_least=self.at_least,
        )
        return up(options, self.on)
