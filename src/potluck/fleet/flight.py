"""FlightRecorder: what a host's coordinator heard and decided, in a few files of the run folder, to be replayed.

Whoever feeds the coordinator only puts the input in a queue; a thread writes it, and never syncs a disk. The files are
a ring: each begins with the coordinator as it was, so that the oldest can go. Rows, tensors and secrets are in none of
them: see flight_lines.py.
"""

import json
import logging
import os
import re
import threading
import time
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from potluck.fleet.coordinator import Coordinator
from potluck.fleet.effects import Effect
from potluck.fleet.flight_lines import freeze, line_of
from potluck.fleet.invite import is_right_secret
from potluck.system import FOR_US_ALONE
from potluck.wire.messages import Gather, Hello, LookOn, StateChunk

log = logging.getLogger("potluck.flight")

VERSION = version("potluck")
FLIGHT = "flight"
"""The folder in the run folder."""
SEGMENT_BYTES, SEGMENTS = 2 << 20, 4
"""The most bytes of one file, packed, and the most files."""
WRITE_S = 0.5
"""How often inputs are written: a host that is killed loses those since then."""
MOST_WAITING = 50_000
"""Inputs that wait for a disk that stands still; then they are left out, and the next file begins where they end."""
START, FULL, GAP = "start", "full", "gap"
"""The words for what came before a file: a host's start, the file before it, or inputs that are missing."""
_NAME = re.compile(r"(\d{6})\.jsonl\.gz")
_BIG = (StateChunk, Gather)
"""Messages that must not be kept until they are written: their bytes may be many."""


def segments(folder: Path) -> list[tuple[int, Path]]:
    """List the files of the ring, the oldest first, each with its number."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match is not None)


class FlightRecorder:
    def __init__(self, folder: Path, core: Coordinator) -> None:
        """`core`: as it is before the first input."""
        self._folder, self._core = folder, core
        folder.mkdir(mode=0o700, exist_ok=True)
        self._next = max((number for number, _ in segments(folder)), default=0) + 1
        self._waiting: deque[tuple[Any, ...] | bytes] = deque()
        self._wants_state = ""
        """What the next file begins after, if one is to begin."""
        self._is_over = threading.Event()
        self._heard: dict[int, float] = {}
        self._inputs = 0
        self._writing = threading.Lock()  # else two threads would each take every other input, and mix their lines
        self._begin(self._state(START))
        self._thread = threading.Thread(target=self._run, name="flight recorder", daemon=True)
        self._thread.start()

    # Under the lock of whoever feeds the coordinator

    def note(self, now: float, name: str, what: tuple[Any, ...], decided: list[Effect]) -> None:
        """Note an input, after the coordinator has heard it and before anything that it decided is done."""
        if self._is_over.is_set():
            return
        if len(self._waiting) >= MOST_WAITING:
            self._wants_state = GAP  # once there is room again
            return
        self._inputs += 1
        if name == "tick":
            what = (self._changed(what[0]), *what[1:])
        is_message = name == "message"
        if is_message and isinstance(what[1], Hello | LookOn):  # whether it was the right one, and never which
            is_right = is_right_secret(what[1].secret, self._core._secret)
            what = (what[0], replace(what[1], secret="" if is_right else "wrong"), *what[2:])
        # What only travels is written by the thread; but a position that the coordinator now holds will change.
        is_lasting = isinstance(what[1], _BIG) if is_message else name not in ("tick", "payload", "mean", "taken")
        self._waiting.append(line_of(now, name, what, decided) if is_lasting else (now, name, what, decided))
        if self._wants_state:
            after, self._wants_state = self._wants_state, ""
            self._waiting.append(self._state(after))

    def _changed(self, heard: dict[int, float]) -> dict[int, float]:
        """Keep those of whom something has come since the last tick: most are silent, and there may be thousands."""
        changed = {peer: at for peer, at in heard.items() if self._heard.get(peer) != at}
        gone = {peer: -1.0 for peer in self._heard if peer not in heard}
        self._heard = heard
        return changed | gone

    def _state(self, after: str) -> bytes:
        """Write down the coordinator as it is: the first line of a file."""
        clock = time.monotonic()
        state: dict[str, Any] = {"after": after, "inputs": self._inputs, "potluck": VERSION}
        state |= {"time": time.time(), "clock": clock}
        try:
            state |= {"heard": freeze(dict(self._heard)), "core": freeze(self._core)}
        except (TypeError, RecursionError) as error:
            log.warning("the coordinator cannot be written down: %s", error)
        return json.dumps({"begins": state}).encode() + b"\n"

    # The thread

    def _run(self) -> None:
        while not self._is_over.wait(WRITE_S):
            self.write()

    def write(self) -> None:
        with self._writing:
            self._write()

    def _write(self) -> None:
        try:
            while self._waiting:
                item = self._waiting.popleft()
                line = item if isinstance(item, bytes) else line_of(*item)
                if line.startswith(b'{"begins"'):
                    self._file.write(self._packer.flush())
                    self._file.close()
                    self._begin(line)
                    continue
                self._file.write(self._packer.compress(line))
            self._file.write(self._packer.flush(zlib.Z_SYNC_FLUSH))
            self._file.flush()
            if self._file.tell() > SEGMENT_BYTES:
                self._wants_state = self._wants_state or FULL
        except (OSError, ValueError, TypeError, RecursionError) as error:  # a full disk must not end the run
            log.warning("the flight recorder ends: %s", error)
            self._is_over.set()

    def _begin(self, first: bytes) -> None:
        for _, old in segments(self._folder)[: -SEGMENTS + 1]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{self._next:06}.jsonl.gz"
        self._next += 1
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FOR_US_ALONE, 0o600), "wb")
        self._packer = zlib.compressobj(1, wbits=31)
        self._file.write(self._packer.compress(first))

    def close(self) -> None:
        """Write all that has come, and nothing that comes later."""
        was_over = self._is_over.is_set()
        self._is_over.set()
        self._thread.join(2.0)
        if self._thread.is_alive():
            return  # its disk stands still
        with suppress(OSError, ValueError):  # a full disk must not end the run, nor a file that was closed
            if not was_over:
                self.write()
                self._file.write(self._packer.flush())
            self._file.close()
