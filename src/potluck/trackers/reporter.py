"""Reporter: a listener that hands events to a tracker's process, and never waits for it.

What the process does not take waits in a queue of bounded length, whose oldest records are left out when it is full.
Knows nothing of what a tracker does with them, nor of torch.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from potluck.event_queue import EventQueue
from potluck.events import Event, record_of
from potluck.system import HAS_GROUPS
from potluck.trackers.known import check_trackers
from potluck.trackers.process import TAKEN
from potluck.words import plural

MOST_WAITING = 4096
"""Records that may wait; each worker of a step counts as one too."""
MOST_UNDER_WAY = 32
"""Records that were sent, and not taken yet."""
HANGS_S = 60.0
"""Seconds without a sign after which a person is told."""
END_S = 20.0
"""How long a run that has ended waits for its trackers, all together."""


class Reporter:
    def __init__(self, name: str, command: Sequence[str], notice: Callable[[str], None]) -> None:
        """`command`: the process, which answers as trackers/process.py does."""
        self.name, self._tell = name, notice
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=HAS_GROUPS,  # Ctrl-C is for the run, which then says so
        )
        # Training's thread, the writer and the reader count here; never held while anything is written or said.
        self._changed = threading.Condition()
        self._queue = EventQueue(MOST_WAITING)
        self._heard = self._sent = self._taken = 0
        self._sign_at = time.monotonic()
        self._is_closing = self._is_gone = self._has_failed = self._is_said = False
        self._last_words = ""
        # Two threads, since either end of a pipe may stand still: a tracker that hangs must not stop training.
        self._writer = threading.Thread(target=self._write, name=f"to {name}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"from {name}", daemon=True)
        self._writer.start()
        self._reader.start()

    def __call__(self, event: Event) -> None:
        """Takes microseconds, whatever the tracker does."""
        with self._changed:
            if self._is_gone or self._is_closing:
                return
            self._heard += 1
            self._queue.append(event)
            self._changed.notify_all()
        self._look_for_a_sign()

    def _look_for_a_sign(self) -> None:
        if self._is_said or self._silent_s < HANGS_S:
            return
        self._is_said = True
        self._notice(
            f"The tracker {self.name} has taken nothing for {self._silent_s:.0f} s. Training does not wait for it, and"
            " what it cannot take is left out there."
        )

    @property
    def _silent_s(self) -> float:
        """How long it has had something to take, and took nothing."""
        return time.monotonic() - self._sign_at if self._sent > self._taken else 0.0

    def _notice(self, sentence: str) -> None:
        """Never while _changed is held: a notice is an event, which comes back here from another thread's lock."""
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the thread that reads
            self._tell(sentence)

    # Threads

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, which the reader sees
            while (told := self._next()) is not None:
                at, event = told
                stdin.write(json.dumps(record_of(event, at), default=_as_plain).encode() + b"\n")
                stdin.flush()
        with contextlib.suppress(OSError):  # closing writes what is left, to a process that has ended
            stdin.close()

    def _next(self) -> tuple[float, Event] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone or self._may_send or (self._is_closing and not self._queue))
            if self._is_gone or not self._queue:
                return None
            at, event = self._queue.popleft()
            assert isinstance(event, Event)
            if self._sent == self._taken:
                self._sign_at = time.monotonic()
            self._sent += 1
            return at, event

    @property
    def _may_send(self) -> bool:
        return bool(self._queue) and self._sent - self._taken < MOST_UNDER_WAY

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.decode(errors="replace").strip()
            with self._changed:
                self._sign_at = time.monotonic()
                if words == TAKEN:
                    self._taken += 1
                    self._changed.notify_all()
                    continue
            if words.startswith(f"{self.name}: "):
                self._notice(words)
            else:
                self._last_words = words
        code = self._process.wait()
        with self._changed:
            was_expected, self._is_gone = self._is_closing, True
            self._changed.notify_all()
        if code and not (was_expected and code < 0):
            self._has_failed = True
            why = self._last_words.rstrip(".") or f"its process ended with {code}"
            self._notice(f"The tracker {self.name} failed, and is left out from here on; the run continues: {why}.")

    # The end

    def end(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Wait for what is still to be taken, this long at most."""
        self._reader.join(timeout_s if self._silent_s < HANGS_S else 0.0)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
        left = self._queue.left_out + len(self._queue) + self._sent - self._taken
        if left and not self._has_failed:
            self._notice(
                f"The tracker {self.name} did not take {plural(left, 'record')} of {self._heard:,}. They are in"
                " events.jsonl, if the run has a folder."
            )


def _as_plain(value: Any) -> Any:
    """Convert a figure of one's own, such as a number of numpy's or torch's."""
    return float(value) if hasattr(value, "__float__") else str(value)


class Tracking:
    """All trackers of a run: a listener, and a context in which they are told."""

    def __init__(self, names: Iterable[str], folder: Path, notice: Callable[[str], None]) -> None:
        found = check_trackers(names)
        self._reporters = [
            Reporter(name, [sys.executable, "-P", "-m", "potluck.trackers.process", name, str(folder)], notice)
            for name in found
        ]

    def __call__(self, event: Event) -> None:
        for reporter in self._reporters:
            reporter(event)

    def close(self) -> None:
        """Waits for what the trackers have not taken yet, a bounded time for all of them together."""
        for reporter in self._reporters:
            reporter.end()
        until = time.monotonic() + END_S
        for reporter in self._reporters:
            reporter.wait(max(0.0, until - time.monotonic()))
