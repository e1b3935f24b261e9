"""PageSettings: what a page shows, what may be done there, and where it is; for the process that serves it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

PATHS = ("folder", "pointer", "invite", "identity")


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    folder: Path | None = None
    pointer: Path | None = None
    """A file that names the folder, once it is known."""
    invite: Path | None = None
    """Where the line to join is; None: there is none."""
    identity: Path | None = None
    """Where the key and the certificate of a page for others are, or will be; the process gets it if the page is
    encrypted."""
    led: bool = False
    """Whether a host leads the run."""
    keeps_place: bool = True
    """Whether the run folder says where the page is, so that it is there again."""
    control: bool = False
    """Whether a person may order something there."""
    host: str = ""
    port: int = 0
    token: str = ""
    descriptor: int = -1
    """Descriptor of the socket that listens, which the process inherits; -1: it opens one itself."""

    def line(self) -> str:
        return json.dumps(asdict(self), default=lambda path: str(path.absolute())) + "\n"

    @classmethod
    def read(cls, line: bytes) -> "PageSettings":
        told = json.loads(line)
        return cls(**told | {name: Path(told[name]) for name in PATHS if told[name] is not None})
