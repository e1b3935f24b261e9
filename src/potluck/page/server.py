"""The page's server: three files, one stream of what has changed, and the figures as Prometheus reads them.

Reads a run folder through RunReader. A person's orders go to the process that started this one, if it allows them.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from potluck.files import table_in
from potluck.fleet.invite import is_right_secret
from potluck.machine_use import LOOK_S as USE_S
from potluck.page.access import HEADERS
from potluck.page.metrics import CONTENT_TYPE, exposition
from potluck.page.ranks import RankUses
from potluck.page.reader import RunReader
from potluck.page.view import Viewer
from potluck.page.where import PageSettings
from potluck.show.sentences import Record

UPDATE_S = 1.0
"""A page hears of what has changed this often at most."""
ROWS_PER_S = 250
"""The most rows of workers that a page is sent: where there are more workers, rows are sent less often."""
LOOK_S = 0.5
MOST_VIEWERS = 32
MOST_ORDER = 1000
"""Bytes of an order."""
ACTIONS = ("pause", "resume", "save", "let_go")
FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css", "/icon.svg": "icon.svg"}
Answer = Callable[[Request], Awaitable[Response]]
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(slots=True)
class PageServer:
    reader: RunReader
    settings: PageSettings
    pass_on: Callable[[Record], None]
    """Passes on what was ordered, if the settings allow orders."""
    beside: RunReader | None = None
    """Another run, whose curves are drawn over those of the first."""
    order_token: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    viewers: int = 0
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    uses: RankUses = field(default_factory=RankUses)

    def app(self) -> Starlette:
        shown = dict.fromkeys(FILES, self._file) | {"/events": self._events, "/metrics": self._metrics}
        asked = {"/invite": self._invite, "/order": self._order}
        routes = [Route(path, self._guarded(answer), methods=["GET"]) for path, answer in shown.items()]
        routes += [Route(path, self._guarded(answer), methods=["POST"]) for path, answer in asked.items()]
        return Starlette(routes=routes, lifespan=self._lifespan)

    def _guarded(self, answer: Answer) -> Answer:
        """Answer those who may look, and the others with a sentence."""

        async def guarded(request: Request) -> Response:
            peer, own = request.scope.get("client"), request.scope.get("server")
            ends = ((peer[0], peer[1]), (own[0], own[1])) if peer and own else None
            refusal = self.settings.refusal(request.headers, request.query_params, ends)
            return _say(refusal, 403) if refusal else await answer(request)

        return guarded

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._measure())]
        yield
        for task in tasks:
            task.cancel()
        for reader in (self.reader, self.beside):
            if reader is not None:
                reader.close()

    async def _read(self) -> None:
        """Follow the folder. Between two pieces, anyone who looks has a turn."""
        while True:
            has_more = self.reader.read_on()
            has_more = (self.beside is not None and self.beside.read_on()) or has_more
            await asyncio.sleep(0 if has_more else LOOK_S)

    async def _measure(self) -> None:
        """Measure what the ranks of a group use, while somebody looks; of a host's workers, the host tells."""
        while True:
            folder, fold = self.reader.folder, self.reader.fold
            if self.viewers and folder is not None and fold.run and not fold.ended and not self.reader.now:
                self.uses.start(folder)
            await asyncio.sleep(USE_S)

    async def _file(self, request: Request) -> Response:
        name = FILES[request.url.path]
        data = (resources.files("potluck.page") / "static" / name).read_bytes()
        answer = Response(data, headers=HEADERS, media_type=TYPES[name[name.rindex(".") :]])
        if self.settings.token:
            answer.set_cookie(
                self.settings.cookie,
                self.settings.token,
                httponly=True,
                samesite="strict",
                secure=self.settings.encrypted,
                path="/",
            )
        return answer

    async def _events(self, request: Request) -> Response:
        if self.viewers >= MOST_VIEWERS:
            return _say(f"{MOST_VIEWERS} pages look at this run, the most at once. Close one.", 503)
        return StreamingResponse(self._updates(), headers=HEADERS, media_type="text/event-stream")

    async def _updates(self) -> AsyncIterator[str]:
        """Yield what has changed, for one page, until it is closed."""
        self.viewers += 1
        try:
            yield "retry: 1000\n\n"
            number, viewer, rows_at = -1, Viewer(), 0.0
            other = _Other(self.beside) if self.beside is not None else None
            while True:
                reader, now = self.reader, time.time()
                if number != reader.number:
                    number, viewer, rows_at = reader.number, Viewer(), 0.0
                    first: Record = {"reset": True}
                else:
                    first = {}
                is_due = now >= rows_at
                uses = {rank: asdict(use) for rank, use in self.uses.newest.items()}
                sent = first | viewer.update(reader.fold, reader.now, self._more(), with_rows=is_due, uses=uses)
                if is_due:
                    rows_at = now + len(viewer.rows) / ROWS_PER_S
                if reader.output is not None and (lines := viewer.new_lines(reader.output.lines)):
                    sent["output"] = lines
                if other is not None and (news := other.update()):
                    sent["other"] = news
                # Also where nothing has changed: the page knows by it that somebody is there, and what time it is here.
                yield f"data: {_as_json(sent | {'time': round(now, 2)})}\n\n"
                if self.ending.is_set():
                    return
                with contextlib.suppress(TimeoutError):  # the usual case: the next update is due
                    await asyncio.wait_for(self.ending.wait(), UPDATE_S if reader.is_caught_up else LOOK_S)
        finally:
            self.viewers -= 1

    def _more(self) -> Record:
        settings, now = self.settings, self.reader.now
        can = {
            "order": self.order_token if settings.control else None,
            "invite": settings.invite is not None and settings.invite.exists(),
            "led": settings.led or bool(now),
        }
        return {
            "can": can,
            "caught_up": self.reader.is_caught_up,
            "host_at": now.get("time"),
            "recipe": self.reader.recipe,
        }

    async def _metrics(self, request: Request) -> Response:
        text = exposition(self.reader.fold, self.reader.now, time.time())
        return Response(text, headers=HEADERS | {"Content-Type": CONTENT_TYPE})

    async def _invite(self, request: Request) -> Response:
        if not self.settings.is_same_origin(request.headers):
            return _say("The line to join is shown on this page alone.", 403)
        line, invite = "", self.settings.invite
        with contextlib.suppress(OSError):
            line = invite.read_text(encoding="utf-8").strip() if invite is not None else ""
        if not line:
            return _say("There is no line to join this run.", 404)
        return PlainTextResponse(f"potluck join {line}", headers=HEADERS)

    async def _order(self, request: Request) -> Response:
        if not self.settings.control:
            return _say("This page only shows. Start the host with --control to allow more.", 403)
        is_ours = is_right_secret(request.headers.get("x-potluck-order", ""), self.order_token)
        if not is_ours or not self.settings.is_same_origin(request.headers):
            return _say("Orders are taken from this page alone.", 403)
        order = await _read_order(request)
        if order is None:
            return _say(f"An order is one of: {', '.join(ACTIONS)}.", 400)
        try:
            self.pass_on(order)
        except OSError:
            return _say("Whoever leads the run does not hear this page any more.", 503)
        return _say("It was passed on.", 202)


OF_OTHER = ("run", "head", "looks", "series", "recipe")
"""Sections of the run beside: what curves and a table of both are made of."""


class _Other:
    """Remembers what one page has been sent of the run beside."""

    def __init__(self, reader: RunReader) -> None:
        self._reader, self._number, self._viewer = reader, -1, Viewer()

    def update(self) -> Record:
        reader, first = self._reader, Record()
        if self._number != reader.number:
            self._number, self._viewer, first = reader.number, Viewer(), {"reset": True}
        told = self._viewer.update(reader.fold, reader.now, {"recipe": reader.recipe}, with_rows=False)
        return first | {name: told[name] for name in OF_OTHER if name in told}


def _say(sentence: str, status: int) -> Response:
    return PlainTextResponse(sentence + "\n", status, HEADERS)


def _as_json(sent: Record) -> str:
    """A browser stumbles over a number that is not finite, and a host elsewhere may tell anything."""
    try:
        return json.dumps(sent, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(sent), parse_constant=lambda word: None), separators=(",", ":"))


async def _read_order(request: Request) -> Record | None:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_ORDER:
            return None
    order = table_in(body)
    if order.get("action") not in ACTIONS:
        return None
    worker = order.get("worker")
    if (order["action"] == "let_go") != isinstance(worker, int) or isinstance(worker, bool):
        return None
    return {"action": order["action"], "worker": worker}
