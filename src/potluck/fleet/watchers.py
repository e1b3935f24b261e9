"""Tells those who only watch a host's events from the beginning, and how things stand, at each one's own pace.

Each watcher has a thread, which reads the run folder's files as the watcher takes them: nothing is queued for it, and
nobody else waits for it. A watcher is no member of the run, and nothing that it could send is read.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from potluck.fleet.pipe import Pipe
from potluck.wire.codec import encode_parts
from potluck.wire.messages import Watched

EVENTS, NOW = 0, 1
"""Watched.what: a piece of the events, to be put behind those before; or how things stand, in place of what was."""
PIECE_BYTES = 256 << 10
LOOK_S = 0.5
"""How often the files are looked at."""
STUCK_S = 30.0
"""A watcher that takes nothing for so long is parted with."""


class WatcherFeed:
    """To one watcher."""

    def __init__(self, pipe: Pipe, events: Path, now: Path, before: bytes, on_end: Callable[[str], None]) -> None:
        self._pipe = pipe
        self._events = events
        self._now = now
        self._before = before
        self._on_end = on_end
        self._closing = threading.Event()
        self._moved_at = time.monotonic()
        self._is_sending = False
        self._now_seen = 0

    def run(self) -> None:
        why = "it has seen all"
        try:
            if self._before:
                self._send([self._before])
            self._feed()
        except OSError:
            why = "it closed the connection"
        with contextlib.suppress(OSError):  # it may be what has ended
            self._pipe.close()
        self._on_end(why)

    def _feed(self) -> None:
        while not self._events.exists():
            if self._closing.wait(LOOK_S):
                return
        with self._events.open("rb") as file:
            while True:
                is_last = self._closing.is_set()
                while data := file.read(PIECE_BYTES):
                    self._tell(EVENTS, data)
                self._tell_now()
                if is_last:
                    return
                self._closing.wait(LOOK_S)

    def _tell_now(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # not written yet
            if (at := self._now.stat().st_mtime_ns) != self._now_seen:
                self._now_seen = at
                self._tell(NOW, self._now.read_bytes())

    def _tell(self, what: int, data: bytes) -> None:
        self._send(encode_parts(Watched(what, data)))

    def _send(self, parts: list[bytes | memoryview]) -> None:
        self._moved_at, self._is_sending = time.monotonic(), True
        self._pipe.send(parts)
        self._is_sending = False

    def end(self) -> None:
        """Once all that there is has been sent."""
        self._closing.set()

    def close(self) -> None:
        """At once."""
        self._pipe.close()

    def part_if_stuck(self, now: float) -> bool:
        is_stuck = self._is_sending and now - self._moved_at > STUCK_S
        if is_stuck:
            self.close()
        return is_stuck
