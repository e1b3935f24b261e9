"""The live page: what it costs a step, with somebody looking and with a thousand workers' rows; how large it is, how
soon it is painted, and whether server or tab grow while it is open.

Steps are those of a real host with one worker on one thread. A page that is open is a real one: a client reads its
stream to the end of each run. The thousand workers are rows that this process writes into a folder of its own, once a
second, with a page and a client of its own, on the same machine. Tabs are Chromium's, where there is one.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import Comparison, Result
from bench.turns import say, take_turns
from potluck.events import read_events
from potluck.page.access import Access
from potluck.page.start import PageProcess, start_page
from potluck.page.where import PageSettings

STATIC = Path(__file__).parents[1] / "src" / "potluck" / "page" / "static"
LINK = re.compile(r"The page of this run: (\S+)")
SETTINGS = ["fit.epochs=1000", "data.limit_bytes=100_000", "model.dim=96", "model.layers=2", "policy.kind='sync'"]
WARM = 10
"""Steps that are left out."""
CROWD = 1000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def measure(quick: bool) -> Result:
    steps, rounds, minutes = (30, 2, 0.2) if quick else (150, 7, 4.0)
    crowd = _Crowd()
    sides: dict[str, Callable[[], float]] = {
        "off": lambda: _step_ms(steps, "off"),
        "open": lambda: _step_ms(steps, "on"),
        "crowd": lambda: crowd.while_shown(lambda: _step_ms(steps, "on")),
    }
    found = take_turns("a step with the page", rounds, sides, "ms")
    comparisons = [
        Comparison(what="a step, page open, to none", unit="ms", ours=found["open"], bare=found["off"], target=1.01),
        Comparison(
            what="a step beside a page of 1,000 workers, to none",
            unit="ms",
            ours=found["crowd"],
            bare=found["off"],
            target=1.01,
        ),
        Comparison(what="the page in all", unit="kB", ours=[_page_kb()], bare=[], target=300.0),
    ]
    tab = _tab(crowd, minutes)
    if tab:
        comparisons += [
            Comparison(what="first paint, 1,000 workers", unit="s", ours=tab["paints_s"], bare=[], target=1.0),
            Comparison(
                what="processor time of the page's process, 1,000 workers and a tab, of each second",
                unit="s",
                ours=tab["busy"],
                bare=[],
                target=None,
            ),
            _growth("the tab's heap after minutes of updates, to its first minute", tab["heap_mb"]),
            _growth("the server's memory after minutes of updates, to its first minute", tab["server_mb"]),
        ]
    return Result(comparisons, {"steps": steps, "tab": tab})


def _growth(what: str, figures: list[float]) -> Comparison:
    part = max(1, len(figures) // 4)
    return Comparison(what=what, unit="MB", ours=[median(figures[-part:])], bare=[median(figures[:part])], target=1.1)


def _page_kb() -> float:
    return sum(path.stat().st_size for path in STATIC.iterdir()) / 1000


def _step_ms(steps: int, page: str) -> float:
    """The median step of a run of its own. Where there is a page, somebody looks."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as place:
        settings = [word for each in [*SETTINGS, "workers.threads=1"] for word in ("--set", each)]
        command = [sys.executable, "-m", "potluck.cli", "host", "demo", "-n", "1", "--out", "run", "--page", page]
        log = Path(place) / "log"
        process = subprocess.Popen([*command, *settings], cwd=place, stdout=log.open("wb"), stderr=subprocess.STDOUT)
        try:
            events = Path(place) / "run" / "events.jsonl"
            with contextlib.ExitStack() as stack:
                if page != "off":
                    _until(lambda: LINK.search(log.read_text()) is not None)
                    stack.enter_context(_looking(LINK.search(log.read_text())[1]))  # type: ignore[index]
                _until(lambda: events.exists() and events.read_text().count('"step_done"') >= steps + WARM)
            times = [event["time"] for event in read_events(events) if event["event"] == "step_done"]
        finally:
            process.kill()
            process.wait()
    return 1000 * median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False))


@contextlib.contextmanager
def _looking(link: str) -> Iterator[None]:
    """A client that reads the stream, as a browser does."""
    host, port = link.removeprefix("http://").rstrip("/").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.request("GET", "/events")
    answer = connection.getresponse()

    def read() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while answer.readline():
                pass

    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        connection.close()


class _Crowd:
    """A folder of a run with a thousand workers, one step of which is written each second."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-crowd-"))
        self.step = 0
        told = {"workers": CROWD, "device": "cpu", "parameters": 10**8, "unit": "tokens", "batch_size": 4 * CROWD}
        self._write({"event": "run_started", "name": "crowd", "folder": "", **told, "steps_total": 0, "from_step": 0})
        for _ in range(200):
            self.write_step()

    def _write(self, record: dict[str, Any]) -> None:
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time()} | record) + "\n")

    def write_step(self) -> None:
        self.step += 1
        parts = [
            {"rank": n, "rows": 4, "samples": 400.0, "busy_s": 0.1 + (n * self.step % 97) / 500, "wait_s": 0.1}
            | {"name": f"node-{n}"}
            for n in range(CROWD)
        ]
        place = {"step": self.step, "epoch": 0, "rows_seen": 4 * CROWD * self.step, "samples": 400.0 * CROWD}
        figures = {"loss": 5 / (1 + self.step), "lr": 0.1, "grad_norm": 1.0, "seconds": 1.0}
        self._write({"event": "step_done", **place, **figures, "workers": parts})

    @contextlib.contextmanager
    def shown(self) -> Iterator[PageProcess]:
        page = start_page(Access(), PageSettings(folder=self.folder))
        assert page is not None
        over = threading.Event()

        def write() -> None:
            while not over.wait(1.0):
                self.write_step()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield page
        finally:
            over.set()
            thread.join()
            page.close()

    def while_shown(self, act: Callable[[], float]) -> float:
        with self.shown() as page, _looking(page.settings.link):
            return act()


def _tab(crowd: _Crowd, minutes: float) -> dict[str, list[float]]:
    """First paints of new tabs; and for minutes of one update a second, the memory of a tab and of the server."""
    chromium = shutil.which("chromium")
    if chromium is None:
        say("There is no Chromium here, so no tab is measured: apt-get install chromium")
        return {}
    from playwright.sync_api import sync_playwright

    paints: list[float] = []
    heap: list[float] = []
    server: list[float] = []
    with crowd.shown() as page, sync_playwright() as driver:
        flags = [*FLAGS, "--js-flags=--expose-gc", "--enable-precise-memory-info"]
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        for _ in range(5):
            tab = browser.new_page()
            tab.goto(page.settings.link)
            tab.wait_for_selector("#rows tr", timeout=60_000)
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000)
            tab.close()
        tab = browser.new_page()
        tab.goto(page.settings.link)
        began, busy_s = time.monotonic(), _busy_s(page.process.pid)
        until = began + 60 * minutes
        while time.monotonic() < until:
            tab.wait_for_timeout(5000)
            tab.evaluate("gc()")
            heap.append(tab.evaluate("performance.memory.usedJSHeapSize") / 1e6)
            status = Path(f"/proc/{page.process.pid}/status").read_text()
            server.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1000)  # type: ignore[index]
        busy = (_busy_s(page.process.pid) - busy_s) / (time.monotonic() - began)
        browser.close()
    return {"busy": [busy], "paints_s": paints, "heap_mb": heap, "server_mb": server}


def _busy_s(pid: int) -> float:
    """Of the processor, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come about in {seconds:g} s; load {os.getloadavg()[0]:.1f}")
        time.sleep(0.2)
