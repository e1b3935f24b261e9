"""Where a page is: what `--page` says, the socket that listens there, and the link to it.

Opens the socket, and speaks no word over it.
"""

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.errors import ConfigError
from potluck.files import read_table, write_whole
from potluck.fleet.invite import is_loopback, reachable
from potluck.page.access import Access, new_token

ASKED = "POTLUCK_PAGE"
"""The environment variable that says what `--page` does where that is not given."""
OFF = "off"
KEPT = "page.json"
"""File in the run folder, for its owner alone: where the page was, so that it is there again."""
MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PageAddress:
    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""

    @property
    def is_for_others(self) -> bool:
        return not is_loopback(self.host)


def page_address(asked: str | None) -> PageAddress | None:
    """Read what `--page` says: off, on, a port, or ADDRESS:PORT. None: there is no page."""
    text = (asked if asked is not None else os.environ.get(ASKED, "on")).strip()
    if text == OFF:
        return None
    if text in ("on", ""):
        return PageAddress()
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ConfigError(f"--page is off, a port, or ADDRESS:PORT such as 0.0.0.0:8080, not {text!r}.")
    return PageAddress(host.strip("[]") or "127.0.0.1", int(port))


@dataclass(slots=True)
class PagePlace:
    """A page's socket, and who may look at what is shown there."""

    listener: socket.socket
    access: Access
    fingerprint: str = field(default="")

    @property
    def link(self) -> str:
        """The whole of it, token included."""
        scheme = "https" if self.access.encrypted else "http"
        host = reachable(self.access.host)
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{self.access.port}/" + (f"?token={self.access.token}" if self.access.token else "")


def open_place(address: PageAddress, folder: Path | None, *, encrypted: bool) -> PagePlace:
    """Open the place where the page of this folder was before, if nothing else was asked for and that is free. OSError:
    it is not."""
    kept = _kept(folder) if folder is not None else {}
    token = str(kept.get("token") or "") if kept.get("host") == address.host else ""
    port = int(kept.get("port") or 0) if kept.get("host") == address.host and not address.port else 0
    listener = None
    if port:
        try:
            listener = _listen(address.host, port)
        except OSError:
            listener = None
    listener = listener or _listen(address.host, address.port)
    needed = new_token(address.host)
    access = Access(address.host, listener.getsockname()[1], (token or needed) if needed else "", encrypted)
    return PagePlace(listener, access)


def keep_place(folder: Path, access: Access) -> None:
    """OSError: it cannot be written."""
    told = {"host": access.host, "port": access.port, "token": access.token}
    write_whole(folder / KEPT, json.dumps(told) + "\n", 0o600)


def _kept(folder: Path) -> dict[str, Any]:
    kept = read_table(folder / KEPT, MOST_BYTES)
    is_right = isinstance(kept.get("port"), int) and 0 < kept["port"] < 1 << 16
    return kept if is_right and isinstance(kept.get("token"), str) else {}


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # else a port that was just left could not be had again
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
