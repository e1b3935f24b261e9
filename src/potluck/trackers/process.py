"""The process of one tracker: `python -m potluck.trackers.process NAME FOLDER [EVENTS BYTE]`. Imports no torch.

Follows FOLDER/events.jsonl, or EVENTS from that byte on, and feeds the tracker with it until its own standard input has
ended. It answers a full stop for each record that was taken, and sentences for a person. What the library prints goes
to FOLDER/trackers/NAME.log. Where the run has ended, it tells a tracker about that run afterwards.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from potluck.events import read_records
from potluck.trackers.known import Ended, TrackedRun, Tracker, check_trackers
from potluck.trackers.scalars import Scalars, flat

TAKEN = "."
BEGIN = {"run_started", "step_done", "step_skipped", "validated", "run_ended"}
"""Events that start a tracker; a loop of one's own tells no beginning."""
FINISH_S = 60.0
"""How long a tracker may take for a record, or to finish, once the run has ended; then this ends."""
LOOK_EVERY_S = 0.2
PIECE_BYTES = 1 << 20


class _Feeding:
    def __init__(self, name: str, folder: Path, out: IO[str]) -> None:
        self.name, self._folder, self._out = name, folder, out
        self._tracker: Tracker = import_module(f"potluck.trackers.{name}").make()  # which may take seconds
        self._scalars = Scalars()
        self._has_started = False
        self._early: deque[dict[str, Any]] = deque(maxlen=256)
        self.ended: Ended = "interrupted"

    def take(self, record: dict[str, Any]) -> None:
        if not self._has_started and record["event"] not in BEGIN:  # under a host, workers come before the run begins
            self._early.append(record)
            return
        if not self._has_started:
            self._start(record if record["event"] == "run_started" else {})
        self._tell(record)
        while self._early:
            self._tell(self._early.popleft())

    def _tell(self, record: dict[str, Any]) -> None:
        match record["event"]:
            case "run_started":
                self.ended = "interrupted"
            case "run_ended":
                self.ended = record["reason"] if record["reason"] in ("finished", "interrupted") else "failed"
        step, scalars = self._scalars.of(record)
        if scalars:
            self._tracker.log(step, float(record["time"]), scalars)

    def _start(self, begun: dict[str, Any]) -> None:
        self._has_started = True
        shown = {name: value for name, value in begun.items() if name not in ("event", "time", "schema", "folder")}
        settings = flat({"run": shown} | _recipe_of(self._folder))
        name = str(begun.get("name") or self._folder.absolute().name)
        run = TrackedRun(self.name, self._folder, name, settings, int(begun.get("from_step", 0)))
        if where := self._tracker.start(run):
            self.say(f"{self.name}: {where}")

    def finish(self) -> None:
        if self._has_started:
            self._tracker.finish(self.ended)

    def say(self, words: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the run is gone, and the tracker is to be told so
            print(words, file=self._out, flush=True)


def _recipe_of(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a script of one's own has no recipe
        return {}


def _lines(events: Path, start: int) -> Iterator[str]:
    """Whole lines of the file, from this byte on, as they are written; until our input has ended and all is read."""
    is_over, moved_at, rest = threading.Event(), time.monotonic(), b""

    def wait_for_end() -> None:
        """In a thread, so that a tracker which hangs does not keep us from hearing that the run is gone."""
        for _ in sys.stdin:
            pass
        is_over.set()
        while (left_s := moved_at + FINISH_S - time.monotonic()) > 0:
            time.sleep(left_s)
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    with events.open("rb") as file:
        file.seek(start)
        while True:
            was_over = is_over.is_set()  # asked first: what is written before the end is read after it
            if data := file.read(PIECE_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    moved_at = time.monotonic()
                    yield line.decode(errors="replace")
            elif was_over:
                break
            else:
                is_over.wait(LOOK_EVERY_S)
    moved_at = time.monotonic()
    if rest:
        yield rest.decode(errors="replace")


def main(name: str, folder: Path, events: Path, start: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the run ends first, and then says so
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    (folder / "trackers").mkdir(exist_ok=True)
    log = os.open(folder / "trackers" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        check_trackers([name])
        feeding = _Feeding(name, folder, out)
        for record in read_records(_lines(events, start), str(events)):
            feeding.take(record)
            feeding.say(TAKEN)
        feeding.finish()
    except BaseException as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        print(f"{type(error).__name__}: {words[:300]}".removesuffix(": "), file=out, flush=True)
        raise
    return 0


if __name__ == "__main__":
    place = Path(sys.argv[2])
    events, start = sys.argv[3:] or (place / "events.jsonl", 0)
    sys.exit(main(sys.argv[1], place, Path(events), int(start)))
