"""Options that several commands have."""

from typing import Annotated

import tyro

from potluck.config import checked
from potluck.trackers.known import LIBRARIES
from potluck.train.arguments import WorkersConfig

Settings = Annotated[
    tyro.conf.UseAppendAction[list[str]],
    tyro.conf.arg(
        name="set", metavar="A.B=VALUE", help="Change a setting of the recipe, such as fit.epochs=3. May be repeated."
    ),
]
Workers = Annotated[
    int | None,
    tyro.conf.arg(
        aliases=["-n"],
        metavar="N",
        help="Worker processes on this machine.",
        help_behavior_hint="(default: the recipe's)",
    ),
]
Count = Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N", help="Worker processes on this machine.")]
Threads = Annotated[
    int | None, tyro.conf.arg(metavar="N", help="Threads of each worker, instead of an even share of the cores.")
]
Data = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="PATH ...",
        help="Text files, or folders of them.",
        help_behavior_hint="(default: the recipe's, or the standard library)",
    ),
]
Track = Annotated[
    tyro.conf.UseAppendAction[list[str]],
    tyro.conf.arg(
        metavar="TRACKER",
        help=f"Report the run there too: {', '.join(LIBRARIES)}. May be repeated.",
        help_behavior_hint="(default: fit.track)",
    ),
]
Out = Annotated[
    str | None,
    tyro.conf.arg(metavar="FOLDER", help="The run folder.", help_behavior_hint="(default: runs/NAME, numbered)"),
]
Ranks = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="N",
        help="Processes that hold each worker's model together, where the strategy splits it.",
        help_behavior_hint="(default: one for each GPU)",
    ),
]
Only = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="WORKER",
        help="Start this one of the workers, counted from 0; the others run elsewhere, and all meet in a store.",
        help_behavior_hint="(default: all, here)",
    ),
]

Page = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="WHERE",
        help="Where the live page is: off, a port, or ADDRESS:PORT such as 0.0.0.0:8080.",
        help_behavior_hint="(default: this machine, any free port; or what POTLUCK_PAGE says)",
    ),
]


def workers_config(count: int, threads: int | None, ranks: int | None = None) -> WorkersConfig:
    return checked(lambda: WorkersConfig(count=count, threads=threads, ranks=ranks), "Workers: ")
