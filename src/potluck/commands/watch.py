"""`potluck watch`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from potluck.launch.options import Page


@dataclass
class WatchRun:
    """Show the live page of a run: of its folder, finished or running, or of a host elsewhere by its invite.

    It only shows. Whoever watches takes no part in the run, and does not slow it.
    """

    what: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|INVITE", help="A run folder; or the line that `potluck host` printed, or its file."),
    ]
    page: Page = None

    def __call__(self) -> int:
        from potluck.launch.watch import watch

        return watch(self.what, self.page)
