"""The process that serves a page: python -m potluck.page.serve, with its settings as one line of standard input.

It ends when that input does: with the process that started it, however that ended. A person's orders are written to its
standard output, a line each. It gives way to whatever trains on the same machine.
"""

import asyncio
import contextlib
import functools
import ipaddress
import json
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from potluck.page.reader import RunReader
from potluck.page.server import PageServer
from potluck.page.where import PageSettings, keep_place
from potluck.show.sentences import Record

HEAD_S = 10.0
"""Seconds for the head of a request, and for what is left of one that was answered before it was whole."""
MOST = 128
BACKLOG = 100
"""How many are accepted in one turn: fewer than places, so that heads are read before their places are needed."""


class PageConnection(H11Protocol):
    """A browser's connection. Anyone who may not look can still connect, so it has a limited time for the head of each
    request; and where all places are taken, one that waits for a head makes room: the oldest of the peer that has the
    most of them. So half requests of strangers do not keep the owner out."""

    made = 0
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        PageConnection.made += 1
        self.number = PageConnection.made
        self._await_head()
        if len(self.connections) > MOST:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None:
            self._head.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing was asked yet, or all that was asked is answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def peer(self) -> str:
        """An address; of IPv6 its network, which is one peer's."""
        host = self.client[0] if self.client else ""
        if ":" not in host:
            return host
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_S, self._end_if_waiting)

    def _end_if_waiting(self) -> None:
        if self.is_waiting:
            self.transport.abort()

    def _make_room(self) -> None:
        waiting: list[Any] = [each for each in self.connections if isinstance(each, PageConnection) and each.is_waiting]
        counts = Counter(each.peer for each in waiting)
        # The newest is the latest to be ended, and it is all there is to end where all others are being answered.
        loser = max(waiting, key=lambda each: (counts[each.peer], -each.number))
        self.connections.discard(loser)  # its place is free now; that it was lost is heard later
        loser.transport.abort()


NICE = 10
"""How far it gives way: the page may be late, and a step may not."""
LAST_S = 0.5
"""How long pages have to take what was the last of it: without it they would show a run that never ended."""


def serve(settings: PageSettings, listener: socket.socket, *, until_input_ends: bool) -> None:
    """Serve the page until Ctrl-C, or until standard input ends."""
    beside = RunReader(settings.beside) if settings.beside is not None else None
    page = PageServer(RunReader(settings.folder, settings.pointer), settings, _pass_on, beside)
    config = uvicorn.Config(
        page.app(),
        log_config=None,
        access_log=False,
        lifespan="on",
        loop="asyncio",
        http=PageConnection,
        ws="none",
        server_header=False,
        proxy_headers=False,  # who asks is whose connection it is, and not who it says
        log_level="error",  # what strangers send that is no request is no news, and would fill what is kept of it
        backlog=BACKLOG,
        h11_max_incomplete_event_size=16 << 10,
        timeout_graceful_shutdown=1,  # a stream of updates has no end that could be waited for
        ssl_certfile=settings.identity / "cert.pem" if settings.identity else None,
        ssl_keyfile=settings.identity / "key.pem" if settings.identity else None,
    )
    asyncio.run(_run(uvicorn.Server(config), page, listener, settings, until_input_ends=until_input_ends))


async def _run(
    server: uvicorn.Server,
    page: PageServer,
    listener: socket.socket,
    settings: PageSettings,
    *,
    until_input_ends: bool,
) -> None:
    loop = asyncio.get_running_loop()
    if settings.identity:  # a stranger's half handshake, too, ends
        loop.create_server = functools.partial(loop.create_server, ssl_handshake_timeout=HEAD_S)  # type: ignore[method-assign]
    tasks = []
    if until_input_ends:
        ended = asyncio.Event()
        # A thread, since reading standard input would stop the loop that serves.
        threading.Thread(target=_wait_for_end, args=(loop, ended), name="parent watch", daemon=True).start()
        tasks.append(asyncio.create_task(_end_after(server, page, ended)))
    if settings.keeps_place:
        tasks.append(asyncio.create_task(_keep(page)))
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()


def _wait_for_end(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    with contextlib.suppress(RuntimeError):  # it has ended already
        loop.call_soon_threadsafe(ended.set)


async def _end_after(server: uvicorn.Server, page: PageServer, ended: asyncio.Event) -> None:
    """Stop the server once anyone who looks has been sent the end of the run, if it has come."""
    await ended.wait()
    while page.reader.read_on():
        await asyncio.sleep(0)
    page.ending.set()
    await asyncio.sleep(LAST_S if page.viewers else 0)
    server.should_exit = True


async def _keep(page: PageServer) -> None:
    """Keep the page's place once the run folder is there."""
    kept: Path | None = None
    while True:
        folder = page.reader.folder
        if folder is not None and folder != kept and folder.is_dir():
            kept = folder
            with contextlib.suppress(OSError):  # then the next page is elsewhere
                keep_place(folder, page.settings)
        await asyncio.sleep(1.0)


def _pass_on(order: Record) -> None:
    sys.stdout.write(json.dumps(order) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = PageSettings.read(sys.stdin.buffer.readline())
    with contextlib.suppress(OSError, AttributeError):  # not allowed, or not there: the page is as fast as training
        os.nice(NICE)
    if settings.descriptor >= 0:
        listener = socket.socket(fileno=settings.descriptor)
    else:
        listener = socket.create_server((settings.host, settings.port))
    serve(settings, listener, until_input_ends=True)


if __name__ == "__main__":
    main()
