"""The process that serves a page: python -m potluck.page.serve, with its settings as one line of standard input.

It ends when that input does: with the process that started it, however that ended. A person's orders are written to its
standard output, a line each. It gives way to whatever trains on the same machine.
"""

import asyncio
import contextlib
import functools
import json
import os
import socket
import sys
import threading
from pathlib import Path

import uvicorn

from potluck.page.access import Access
from potluck.page.connections import BACKLOG, HEAD_S, PageConnection
from potluck.page.reader import RunReader
from potluck.page.server import PageServer
from potluck.page.settings import PageSettings
from potluck.page.where import keep_place
from potluck.show.sentences import Record

NICE = 10
"""How far it gives way: the page may be late, and a step may not."""
LAST_S = 0.5
"""How long pages have to take what was the last of it."""


def serve(settings: PageSettings, listener: socket.socket, *, until_input_ends: bool) -> None:
    """Serve the page until Ctrl-C, or until standard input ends."""
    access = Access(settings.host, listener.getsockname()[1], settings.token, bool(settings.identity))
    page = PageServer(RunReader(settings.folder, settings.pointer), access, settings, _pass_on)
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
        timeout_graceful_shutdown=1,
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
                keep_place(folder, page.access)
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
