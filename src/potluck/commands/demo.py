"""`potluck demo`."""

from dataclasses import dataclass, field

from potluck.commands.options import Data, Out, Page, Settings, Workers
from potluck.page.where import page_address
from potluck.train.arguments import data_setting


@dataclass
class Demo:
    """Three workers on this machine, one of them three times slower: Sync against Cadence, in under three minutes.

    Both train the same small language model on the same text, the source of Python's standard library, so that
    nothing is downloaded; a picture shows who computed when, and who waited.
    """

    data: Data = ()
    workers: Workers = None
    out: Out = None
    page: Page = None
    settings: Settings = field(default_factory=list)

    def __call__(self) -> int:
        from potluck.launch.demo import demo

        return demo((*self.settings, *data_setting(self.data)), self.workers, self.out, page_address(self.page))
