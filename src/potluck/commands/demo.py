"""`potluck demo`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from potluck.launch.options import Data, Out, Page, Settings, Workers
from potluck.page.where import page_address
from potluck.train.arguments import data_setting


@dataclass
class Demo:
    """Three workers on this machine, one of them three times slower: Sync against Cadence, in under three minutes.

    Both train the same small language model on the same text, the source of Python's standard library, so that
    nothing is downloaded; a picture shows who computed when, and who waited.

    `potluck demo fleet` shows another promise, in about a minute: of a host and three workers that joined it one is
    killed with -9, another joins, then the host itself is killed and resumes. The weights are, bit for bit, those of
    the same run undisturbed.
    """

    what: Annotated[
        tyro.conf.Positional[Literal["speeds", "fleet"]],
        tyro.conf.arg(help="speeds: workers of which one is slow. fleet: workers that are killed and that join."),
    ] = "speeds"
    data: Data = ()
    workers: Workers = None
    out: Out = None
    page: Page = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        if self.what == "fleet":
            from potluck.launch.demo_fleet import FleetOrder, demo_fleet

            return demo_fleet(
                FleetOrder(
                    settings=tuple(self.settings),
                    data=self.data,
                    joiners=3 if self.workers is None else self.workers,
                    out=self.out,
                    page=self.page,
                )
            )
        from potluck.launch.demo import demo

        return demo((*self.settings, *data_setting(self.data)), self.workers, self.out, page_address(self.page))
