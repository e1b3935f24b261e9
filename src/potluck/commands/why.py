"""`potluck why`."""

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass
class Why:
    """Say who waits for whom in a run that seems to hang, what is owed, and where each process is.

    Asks those of its processes that are yours and on this machine, and does not disturb them. Ctrl-\\ in the terminal
    of a run, or kill -QUIT to one of its processes, says the same there.
    """

    run: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="[RUN]", help="A run folder.", help_behavior_hint="(default: all of yours here)"),
    ] = None

    def __call__(self) -> int:
        from potluck.launch.why import why

        return why(self.run)
