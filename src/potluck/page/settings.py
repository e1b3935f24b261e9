"""PageSettings: the settings of the process that serves a page, from the one that starts it."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    """The settings that the page's process gets, as JSON. Paths are absolute; empty: there is none."""

    host: str
    port: int
    token: str
    descriptor: int
    """Descriptor of the socket that listens, which it inherits; -1: it opens one itself."""
    folder: str = ""
    pointer: str = ""
    """A file that names the folder, once it is known."""
    invite: str = ""
    identity: str = ""
    """The folder of key and certificate, where the page is encrypted."""
    led: bool = False
    control: bool = False
    keeps_place: bool = True
    """Writes where the page is into the run folder, so that it is there again."""

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"
