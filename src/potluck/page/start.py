"""How a command starts its page: says where it is at once, and that it is gone if it ends before the run does.

A page never makes a run fail. Imports neither Starlette nor uvicorn: the process that serves it does.
"""

import contextlib
import hashlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from potluck.environment import PAGE_POINTER
from potluck.errors import ConfigError
from potluck.fleet.invite import Identity, is_loopback
from potluck.page.access import Access
from potluck.page.where import PageSettings, open_place
from potluck.show.sentences import Record
from potluck.system import HAS_GROUPS
from potluck.waiting import wait_until
from potluck.words import say

ENDS_WITHIN_S = 2.0
"""How long a page has to end before it is killed: a run that has ended does not wait for a browser."""
LONGEST_ORDER = 4096


def start_page(
    address: Access | None,
    wanted: PageSettings,
    *,
    kept_in: Path | None = None,
    on_order: Callable[[Record], None] | None = None,
) -> "PageProcess | None":
    """None: there is none, and a sentence has said why if one was asked for. `kept_in`: the folder that says where the
    page was before, if not the run's. `on_order` hears what a person orders; without it the page only shows."""
    if address is None:
        return None
    try:
        return PageProcess(*prepare_page(address, replace(wanted, control=on_order is not None), kept_in), on_order)
    except (OSError, ConfigError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        at = f"{address.host} port {address.port}" if address.port else address.host
        say(f"There is no page: it cannot be served at {at} ({why}). The run is not concerned; see --page.")
        return None


def prepare_page(
    address: Access, wanted: PageSettings, kept_in: Path | None = None
) -> tuple[socket.socket, PageSettings]:
    """Return the page's socket, and the settings of its process. Beyond this machine it is encrypted."""
    identity = None
    if wanted.identity is not None and not is_loopback(address.host):
        identity = Identity.load_or_make(wanted.identity).folder
    listener, token = open_place(address, (kept_in or wanted.folder) if wanted.keeps_place else None)
    settings = replace(
        wanted,
        host=address.host,
        port=listener.getsockname()[1],
        token=token,
        descriptor=listener.fileno() if HAS_GROUPS else -1,
        encrypted=identity is not None,
        identity=identity,
    )
    return listener, settings


def fingerprint_of(identity: Path) -> str:
    """Return the fingerprint of the certificate in this folder, as browsers show it."""
    der = ssl.PEM_cert_to_DER_cert((identity / "cert.pem").read_text(encoding="ascii"))
    return hashlib.sha256(der).digest().hex(":").upper()


def tell_of(settings: PageSettings) -> None:
    """One line that says where; and what a browser will ask."""
    print(f"The page of this run: {settings.link}", flush=True)
    if settings.identity is not None:
        print(
            "  Browsers do not know its certificate, which is the run's own. Compare the SHA-256 that they show with"
            f"\n  {fingerprint_of(settings.identity)}",
            flush=True,
        )


class PageProcess:
    def __init__(
        self, listener: socket.socket, settings: PageSettings, on_order: Callable[[Record], None] | None = None
    ) -> None:
        self.settings = settings
        self._on_order = on_order
        self._is_ending = False
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the process
        with listener:
            if not HAS_GROUPS:
                listener.close()  # the process opens it again
            apart: dict[str, Any] = {"pass_fds": (settings.descriptor,), "start_new_session": True}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "potluck.page.serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                **(apart if HAS_GROUPS else {}),
            )
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the thread below says so
            self.process.stdin.write(settings.line().encode())
            self.process.stdin.flush()
        # A thread, since orders come at any time, and a page that has ended is said at once, not at the run's end.
        self._thread = threading.Thread(target=self._watch, name="page watch", daemon=True)
        self._thread.start()
        tell_of(settings)

    def _watch(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline(LONGEST_ORDER):
            if self._on_order is not None:
                with contextlib.suppress(ValueError):  # a line that its end cut short is no order
                    self._on_order(json.loads(line))
        code = self.process.wait()
        if not self._is_ending:
            self._complaints.seek(0)
            words = self._complaints.read(1 << 20).decode(errors="replace").strip().splitlines()
            why = f" ({words[-1][:300]})" if words else ""
            say(f"The page has ended, with exit code {code}{why}. The run continues without it.")

    def end(self) -> None:
        """End the page, once it has shown the last of the run to anyone who looks. Does not wait for it."""
        self._is_ending = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already, with something of ours in the pipe
            self.process.stdin.close()

    def close(self) -> None:
        self.end()
        if not wait_until(lambda: self.process.poll() is not None, ENDS_WITHIN_S):
            self.process.kill()
            self.process.wait()
        self._thread.join(timeout=1.0)  # it may stand in an order, which waits for the host
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._complaints.close()


@contextmanager
def page_of_training(address: Access | None, out: str | None) -> Iterator[None]:
    """Show a page of the runs that are started within, one by one: the process that keeps a folder says which it is."""
    if address is None:
        yield
        return
    before = os.environ.get(PAGE_POINTER)
    with tempfile.TemporaryDirectory(prefix="potluck-page-") as aside:
        pointer = Path(aside) / "folder"
        wanted = PageSettings(pointer=pointer, identity=Path(aside) / "identity")
        page = start_page(address, wanted, kept_in=Path(out) if out else None)
        os.environ[PAGE_POINTER] = str(pointer)
        try:
            yield
        finally:
            os.environ.pop(PAGE_POINTER)
            if before is not None:
                os.environ[PAGE_POINTER] = before
            if page is not None:
                page.close()
