"""`potluck pause` and `potluck resume`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

Name = Annotated[
    tyro.conf.Positional[str | None],
    tyro.conf.arg(metavar="[NAME]", help="Which worker, if several of yours are here; or all."),
]


@dataclass
class Pause:
    """Have your card back: the worker on this machine hands over what it holds, and goes until it is to come back.

    The process that joined stays, and holds no memory of the card. The run continues with the others.
    """

    name: Name = None
    length: Annotated[
        str | None,
        tyro.conf.arg(
            name="for",
            metavar="1h",
            help="It comes back by itself after this long.",
            help_behavior_hint="(default: when you say potluck resume)",
        ),
    ] = None

    def __call__(self) -> int:
        from potluck.launch.control import pause

        return pause(self.name, self.length)


@dataclass
class Resume:
    """Let a worker on this machine that was paused come back now, if it is within its hours."""

    name: Name = None

    def __call__(self) -> int:
        from potluck.launch.control import resume

        return resume(self.name)
