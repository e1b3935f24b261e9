"""Reporter: starts a tracker's process, which follows the run's events in their file, and says if it hangs or fails.

No step waits for it: a step's event is written to the file, and counted here. Knows nothing of what a tracker does with
it, nor of torch.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from potluck.events import Event
from potluck.system import HAS_GROUPS
from potluck.trackers.known import check_trackers
from potluck.trackers.process import TAKEN
from potluck.words import plural

HANGS_S = 60.0
"""Seconds without a sign after which a person is told."""
END_S = 20.0
"""How long a run that has ended waits for its trackers, all together: one without a network would try for ever."""


class Reporter:
    """A listener that counts events, and the process that takes them from the file."""

    def __init__(self, name: str, command: Sequence[str], notice: Callable[[str], None]) -> None:
        """`command`: the process, which answers as trackers/process.py does, and ends once its input does."""
        self.name, self._tell = name, notice
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=HAS_GROUPS,  # Ctrl-C is for the run, which then says so
        )
        self._written = self.taken = 0
        self._sign_at = time.monotonic()
        self._is_closing = self._has_failed = self._is_said = False
        self._last_words = ""
        # A thread, since a tracker that hangs answers nothing, and training must not wait for that.
        self._reader = threading.Thread(target=self._read, name=f"from {name}", daemon=True)
        self._reader.start()

    def __call__(self, event: Event) -> None:
        if self._written <= self.taken:
            self._sign_at = time.monotonic()
        self._written += 1
        if not self._is_said and self.silent_s >= HANGS_S:
            self._is_said = True
            self._notice(
                f"The tracker {self.name} has taken nothing for {self.silent_s:.0f} s. Training does not wait for it,"
                " and what it has not taken by the end of the run is left out there."
            )

    @property
    def silent_s(self) -> float:
        """How long it has had something to take, and took nothing."""
        is_waiting = self._written > self.taken and self._reader.is_alive()
        return time.monotonic() - self._sign_at if is_waiting else 0.0

    def _notice(self, sentence: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the thread that reads
            self._tell(sentence)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.decode(errors="replace").strip()
            self._sign_at = time.monotonic()
            if words == TAKEN:
                self.taken += 1
            elif words.startswith(f"{self.name}: "):
                self._notice(words)
            else:
                self._last_words = words
        code = self._process.wait()
        if code and not (self._is_closing and code < 0):
            self._has_failed = True
            why = self._last_words.rstrip(".") or f"its process ended with {code}"
            self._notice(f"The tracker {self.name} failed, and is left out from here on; the run continues: {why}.")

    def end(self) -> None:
        """Tells the process that nothing more is written."""
        assert self._process.stdin is not None
        self._is_closing = True
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> None:
        """Waits for what it has not taken yet, this long at most."""
        self._reader.join(timeout_s if self.silent_s < HANGS_S else 0.0)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
        left = self._written - self.taken
        if left > 0 and not self._has_failed:
            self._notice(
                f"The tracker {self.name} did not take {plural(left, 'record')} of {self._written:,}. They are in"
                " events.jsonl, if the run has a folder."
            )


class Tracking:
    """All trackers of a run: a listener that counts what was written for them."""

    def __init__(self, names: Iterable[str], folder: Path, events: Path, notice: Callable[[str], None]) -> None:
        """`folder`: the run's. `events`: the file that is there already, and that they follow from its end."""
        found = check_trackers(names)
        place = [str(folder), str(events), str(events.stat().st_size)]
        self._reporters = [
            Reporter(name, [sys.executable, "-P", "-m", "potluck.trackers.process", name, *place], notice)
            for name in found
        ]

    def __call__(self, event: Event) -> None:
        for reporter in self._reporters:
            reporter(event)

    def close(self) -> None:
        """Waits for what the trackers have not taken yet, a bounded time for all of them together."""
        for reporter in self._reporters:  # all are told before any is waited for: the first would take the others' time
            reporter.end()
        until = time.monotonic() + END_S
        for reporter in self._reporters:
            reporter.wait(max(0.0, until - time.monotonic()))
