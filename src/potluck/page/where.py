"""Where a page is: what `--page` says, and the socket that listens there; and PageSettings.

Opens the socket, and speaks no word over it.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.files import read_table, write_whole
from potluck.page.access import Access, new_token
from potluck.system import listen

ASKED = "POTLUCK_PAGE"
"""The environment variable that says what `--page` does where that is not given."""
OFF = "off"
KEPT = "page.json"
"""File in the run folder, for its owner alone: where the page was, so that it is there again."""
MOST_BYTES = 4096


def page_address(asked: str | None) -> Access | None:
    """Read what `--page` says: off, on, a port, or ADDRESS:PORT. None: there is no page."""
    text = (asked if asked is not None else os.environ.get(ASKED, "on")).strip()
    if text == OFF:
        return None
    if text in ("on", ""):
        return Access()
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f"--page is off, a port, or ADDRESS:PORT such as 0.0.0.0:8080, not {text!r}.")
    return Access(host.strip("[]") or "127.0.0.1", int(port))


def open_place(address: Access, folder: Path | None) -> tuple[socket.socket, str]:
    """Open the place where the page of this folder was before, if nothing else was asked for and that is free. Returns
    the socket and the token of those who may look. OSError: it is not free."""
    kept = _kept(folder) if folder is not None else {}
    token = str(kept.get("token") or "") if kept.get("host") == address.host else ""
    port = int(kept.get("port") or 0) if kept.get("host") == address.host and not address.port else 0
    try:
        listener = listen(address.host, port or address.port)
    except OSError:
        if not port:
            raise
        listener = listen(address.host, address.port)
    needed = new_token(address.host)
    return listener, (token or needed) if needed else ""


def keep_place(folder: Path, access: Access) -> None:
    """OSError: it cannot be written."""
    told = {"host": access.host, "port": access.port, "token": access.token}
    write_whole(folder / KEPT, json.dumps(told) + "\n", 0o600)


def _kept(folder: Path) -> dict[str, Any]:
    kept = read_table(folder / KEPT, MOST_BYTES)
    is_right = isinstance(kept.get("port"), int) and 0 < kept["port"] < 1 << 16
    return kept if is_right and isinstance(kept.get("token"), str) else {}


PATHS = ("folder", "beside", "pointer", "invite", "identity")


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings(Access):
    """Where a page is and who may look, and what its process shows there."""

    folder: Path | None = None
    beside: Path | None = None
    """Folder of another run, whose curves are drawn over this one's."""
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
    descriptor: int = -1
    """Descriptor of the socket that listens, which the process inherits; -1: it opens one itself."""

    def line(self) -> str:
        return json.dumps(asdict(self), default=lambda path: str(path.absolute())) + "\n"

    @classmethod
    def read(cls, line: bytes) -> "PageSettings":
        told = json.loads(line)
        return cls(**told | {name: Path(told[name]) for name in PATHS if told[name] is not None})
