"""The page as a person has it: real commands, a real browser (Debian's Chromium), kill -9, and what `watch` shows.

Everything here starts processes that train, and is slow.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from potluck.events import read_events
from potluck.page.access import Access
from potluck.page.start import start_page
from potluck.page.where import PageSettings
from potluck.show.output import OutputFile, OutputLine
from potluck.waiting import wait_until
from tests.unit.test_page_fold import START, step
from tests.unit.test_page_fold import started as run_started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
SMALL = [
    "workers.threads=1",
    "data.limit_bytes=60_000",
    "model.dim=32",
    "model.layers=1",
    "model.context=64",
    "fit.validate_every=20",
]
LINK = re.compile(r"The page of this run: (https?://\S+)")


class Command:
    """A command of ours, with a page."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.log = folder / f"{arguments[0]}-{len(list(folder.iterdir()))}.log"
        settings = [word for each in SMALL for word in ("--set", each)] if arguments[0] in ("host", "train") else []
        environment = {name: value for name, value in os.environ.items() if name != "POTLUCK_PAGE"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "potluck.cli", *arguments, *settings],
            cwd=folder,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
        )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def link(self) -> str:
        assert wait_until(lambda: LINK.search(self.said) is not None, 60), self.said
        found = LINK.search(self.said)
        assert found is not None
        return found[1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "events.jsonl"
        return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []

    def wait_for(self, kind: str, count: int = 1, seconds: float = 90) -> None:
        assert wait_until(lambda: len(self.events(kind)) >= count, seconds), self.said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


@contextmanager
def started(*arguments: Any) -> Iterator[Command]:
    command = Command(*arguments)
    try:
        yield command
    finally:
        command.close()


@contextmanager
def browsed(**options: Any) -> Iterator[tuple[Any, list[str], list[str]]]:
    """A tab; what its console complained of; and the addresses that it asked for."""
    playwright = pytest.importorskip("playwright.sync_api")
    complaints: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = browser.new_context(ignore_https_errors=True, **options).new_page()
        tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        yield tab, complaints, asked
        browser.close()


def step_of(tab: Any) -> int:
    found = re.search(r"Step ([\d,]+)", tab.inner_text("#steps"))
    return int(found[1].replace(",", "")) if found is not None else 0


def until(tab: Any, holds: Callable[[], bool], seconds: float = 60) -> bool:
    """The browser's own events are handled only while it is waited for."""
    for _ in range(int(seconds / 0.2)):
        if holds():
            return True
        tab.wait_for_timeout(200)
    return False


@needs_browser
def test_the_page_follows_a_run_through_its_hosts_death_and_back(tmp_path: Path) -> None:
    long = ["--out", "run", "--set", "fit.epochs=400", "--set", "fit.checkpoint.every=5"]
    with started(tmp_path, "host", "demo", "-n", "2", "--control", *long) as host, browsed() as (tab, said, asked):
        tab.goto(host.link)
        assert until(tab, lambda: step_of(tab) > 5), host.said
        first = step_of(tab)
        assert until(tab, lambda: step_of(tab) > first)
        assert tab.inner_text("#state") == "Training" and tab.locator("#rows tr").count() == 2
        assert until(tab, lambda: tab.locator("#writes pre").count() > 0)
        assert until(tab, lambda: tab.locator("td.machine .use").count() >= 4)  # processor and memory of each
        assert re.search(r"processor\s+\d[\d.]* of \d+ core", tab.inner_text("td.machine >> nth=0"))
        host.wait_for("checkpoint_saved")
        host.kill()
        assert until(tab, lambda: "Nobody answers" in tab.inner_text("#state"), 20)
        assert step_of(tab) > 0  # what was shown stays
        said.clear()  # that nobody answered is no fault of the page
        last = step_of(tab)
        with started(tmp_path, "host", "demo", "-n", "2", *long, "--resume") as again:
            assert again.link == host.link
            assert until(tab, lambda: tab.inner_text("#state") == "Training" and step_of(tab) > last, 90), again.said
            assert "Continuing from step" in tab.inner_text("#story")
            again.close()
            assert until(tab, lambda: tab.inner_text("#state") == "Stopped", 20)
    assert [text for text in said if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text] == []
    assert asked and all(address.startswith(host.link) for address in asked)


@needs_browser
def test_a_person_pauses_saves_lets_go_and_sees_the_line_to_join_by_keyboard_alone(tmp_path: Path) -> None:
    command = ("host", "demo", "-n", "2", "--control", "--out", "run", "--set", "fit.epochs=400")
    with started(tmp_path, *command) as host, browsed() as (tab, said, _):
        tab.on("dialog", lambda dialog: dialog.accept())
        tab.goto(host.link)
        assert until(tab, lambda: step_of(tab) > 2)

        def press(name: str) -> None:
            tab.evaluate("document.activeElement.blur()")
            for _ in range(40):
                tab.keyboard.press("Tab")
                if tab.evaluate("document.activeElement.textContent") == name:
                    assert tab.evaluate("document.activeElement.matches(':focus-visible')")
                    tab.keyboard.press("Enter")
                    return
            raise AssertionError(f"no way to {name}")

        press("Pause")
        assert until(tab, lambda: tab.inner_text("#state") == "Paused")
        stood = step_of(tab)
        press("Save now")
        host.wait_for("checkpoint_saved")
        assert step_of(tab) - stood <= 1
        assert host.events("checkpoint_saved")[0]["step"] == host.events("step_done")[-1]["step"]
        press("Resume")
        assert until(tab, lambda: step_of(tab) > stood + 1)
        assert tab.is_hidden("#join")
        press("Line to join")
        assert until(tab, lambda: tab.inner_text("#line").startswith("potluck join potluck://127.0.0.1:"))
        press("Let go")
        host.wait_for("worker_went")
        assert host.events("worker_went")[0]["polite"]
        assert [event["action"] for event in host.events("ordered")] == ["pause", "save", "resume", "let_go"]
        tab.keyboard.press("t")
        assert tab.get_attribute("#by-time", "aria-pressed") == "true"
        assert said == []


@needs_browser
@pytest.mark.parametrize(
    "options",
    [
        {"viewport": {"width": 375, "height": 780}},
        {"color_scheme": "dark"},
        {"viewport": {"width": 1320, "height": 900}},
    ],
    ids=["phone", "dark", "desktop"],
)
def test_a_finished_run_is_shown_as_it_was_on_any_screen(options: dict[str, Any], tmp_path: Path) -> None:
    with started(tmp_path, "train", "demo", "-n", "2", "--out", "run", "--set", "fit.epochs=1") as run:
        assert run.link.startswith("http://127.0.0.1:")
        assert run.process.wait(120) == 0, run.said
    with started(tmp_path, "watch", "run") as watch, browsed(**options) as (tab, said, asked):
        tab.goto(watch.link)
        assert until(tab, lambda: tab.inner_text("#state") == "Finished")
        ended = run.events("run_ended")[0]
        assert step_of(tab) == ended["step"] and "used exactly once" in tab.inner_text("#epochs")
        assert tab.locator("#rows tr").count() == 2 and tab.locator("#actions button").count() == 0
        assert "under way" not in tab.inner_text("#epochs")  # what is proved is not to come
        width = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1]  # nothing is cut off, and nothing scrolls sideways
        lit = tab.evaluate("getComputedStyle(document.body.parentElement).backgroundColor")
        assert (lit == "rgb(22, 20, 18)") == (options.get("color_scheme") == "dark")
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert paint < 5000  # bench/page.py measures it
        assert said == [] and all(address.startswith(watch.link) for address in asked)


def write_run(folder: Path, name: str, lr: float, accuracies: list[float]) -> Path:
    """A run with a kill and a save under a thousand decisions, two figures beside its loss, and words of a script."""
    path = folder / name
    path.mkdir()
    settings = {"optimizer": "AdamW", "optimizer.lr": lr, "arguments": "train.py --epochs 3"}
    records = [run_started(name=name, settings=settings), *(step(number) for number in range(1, 21))]
    went = {"event": "worker_went", "time": START + 5, "worker": 1, "name": "w1", "reason": "killed", "polite": False}
    saved = {
        "event": "checkpoint_saved",
        "time": START + 5,
        "step": 5,
        "folder": "a/step-5",
        "bytes": 9,
        "stall_s": 0.0,
    }
    records[6:6] = [went | {"workers": 1}, saved]
    for number, accuracy in enumerate(accuracies):
        figures = {"loss": 1 - accuracy, "accuracy": accuracy, "f1": accuracy / 2}
        looked = {"event": "validated", "step": 2 * number + 1, "loss": 1 - accuracy, "metrics": figures}
        records.append(looked | {"time": START + 30 + number})
    for number in range(1000):
        names = f"w{'abcdefghij'[number % 10]}{'abcdefghij'[number // 10 % 10]}"
        decided = {"event": "decided", "step": 20, "rows": [4, 4], "reason": f"{names} is the slowest."}
        records.append(decided | {"time": START + 60 + number})
    (path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = OutputFile(path)
    output.write(OutputLine(START, "w0", "epoch 1 of <b>3</b>"))
    output.close()
    return path


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_watcher_finds_a_kill_each_figure_and_what_differs_between_two_runs(width: int, tmp_path: Path) -> None:
    first = write_run(tmp_path, "first", 0.1, [0.5, 0.7, 0.9])
    second = write_run(tmp_path, "second", 0.2, [0.5, 0.6, 0.8])
    page = start_page(Access(), PageSettings(folder=first, beside=second, keeps_place=False))
    assert page is not None
    try:
        with browsed(viewport={"width": width, "height": 844}) as (tab, said, asked):
            tab.goto(page.settings.link)
            assert until(tab, lambda: "w1 is lost" in tab.inner_text("#story") and tab.locator("#both tr").count() > 0)
            assert "is the slowest" in tab.inner_text("#decided") and "is the slowest" not in tab.inner_text("#story")
            assert "w1 is lost" in tab.inner_text("#story li >> nth=0")  # it is pinned
            tab.click("#groups button[data-group=saves]")
            assert until(tab, lambda: "a/step-5" in tab.inner_text("#story") and "w1" not in tab.inner_text("#story"))
            tab.click("#groups button[data-group=workers]")
            assert until(
                tab, lambda: "w1 is lost" in tab.inner_text("#story") and "step-5" not in tab.inner_text("#story")
            )
            assert until(tab, lambda: tab.locator("#small canvas").count() == 4)
            labels = [canvas.get_attribute("aria-label") for canvas in tab.locator("#small canvas").all()]
            assert {"accuracy over rows: now 0.9000", "f1 over rows: now 0.4500"} <= set(labels)
            assert "train.py --epochs 3" in tab.inner_text("#settings") and "optimizer.lr" in tab.inner_text(
                "#settings"
            )
            assert "epoch 1 of <b>3</b>" in tab.inner_text("#output")
            both = tab.inner_text("#both")
            assert re.search(r"optimizer.lr\s+0.1\s+0.2", both) and re.search(r"accuracy\s+0.9000\s+0.8000", both)
            assert "optimizer\t" not in both and "arguments" not in both  # what is alike is not listed
            wide = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1] and said == []
            assert all(address.startswith(page.settings.link) for address in asked)
    finally:
        page.close()


def test_a_host_elsewhere_is_watched_by_its_invite_and_its_numbers_do_not_change(tmp_path: Path) -> None:
    """By the same bits: the losses of a run that was watched, and of one that was not."""
    losses = []
    for name in ("watched", "alone"):
        folder = tmp_path / name
        command = ("host", "demo", "-n", "1", "--page", "off", "--out", "run", "--set", "fit.epochs=4")
        with started(folder, *command, "--set", "policy.kind='sync'") as host:
            if name == "watched":
                host.wait_for("step_done", 2)
                with started(folder, "watch", "run/invite") as watch:
                    host.wait_for("run_ended")
                    assert wait_until(partial(has_ended, watch.link), 30), watch.said
            assert host.process.wait(120) == 0, host.said
            losses.append([(event["step"], event["loss"]) for event in host.events("step_done")])
            assert not host.events("worker_went") or len(host.events("worker_came")) == 1
    assert losses[0] == losses[1]


def has_ended(link: str) -> bool:
    with urlopen(f"{link}metrics", timeout=10) as answer:
        return b"potluck_ended 1" in answer.read().splitlines()


def test_training_with_a_page_that_samples_gives_the_same_bits_as_without(tmp_path: Path) -> None:
    weights = []
    for name, page in (("on", "on"), ("off", "off")):
        command = ("train", "demo", "-n", "1", "--out", "run", "--page", page, "--set", "fit.epochs=1")
        with started(tmp_path / name, *command) as run:
            assert run.process.wait(120) == 0, run.said
        assert bool(run.events("sampled")) == (page == "on")
        assert ("The page of this run" in run.said) == (page == "on")
        weights.append((tmp_path / name / "run" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_folder_without_a_run_and_a_line_that_is_none_are_refused_in_words(tmp_path: Path) -> None:
    for what, words in ((".", "There is no run in ."), ("nowhere", "There is neither a run folder nowhere")):
        with started(tmp_path, "watch", what) as watch:
            assert watch.process.wait(30) == 2
            assert words in watch.said


def test_what_is_kept_beside_the_run_is_for_its_owner_alone(tmp_path: Path) -> None:
    with started(tmp_path, "host", "demo", "-n", "1", "--out", "run", "--set", "fit.epochs=200") as host:
        host.wait_for("step_done")
        assert wait_until((tmp_path / "run" / "page.json").exists, 20)
        assert (tmp_path / "run" / "page.json").stat().st_mode & 0o077 == 0
        now = tmp_path / "run" / "now.json"
        assert wait_until(lambda: json.loads(now.read_text())["bytes"]["received"] > 0, 20)  # told once a second
        assert json.loads(now.read_text())["workers"][0]["name"] == "host-worker-0"
