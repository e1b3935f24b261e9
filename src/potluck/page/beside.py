"""Reads what a run folder has beside its events: the recipe, and the newest lines that its script printed.

Stays within bounds, and never writes. A run that is watched from elsewhere has neither.
"""

import os
import tomllib
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

from potluck.page.view import settings_of
from potluck.show.output import OUTPUT, read_line

RECIPE = "run.toml"
MOST_OF_RECIPE = 64 << 10
"""Bytes; a longer recipe is not shown."""
MOST_LINES, MOST_OF_LINE = 200, 1000
"""Lines of output that are kept, and letters of one."""
TAIL_BYTES = 256 << 10
"""How much of the output is read at once: its end, where a page is opened late."""


class OutputTail:
    """Follows the file of what a run's workers print."""

    def __init__(self, folder: Path) -> None:
        self.lines: deque[tuple[int, float, str, str]] = deque(maxlen=MOST_LINES)
        """(number, time, worker, text)"""
        self.count = 0
        """How many there were."""
        self._path = folder / OUTPUT
        self._file: IO[bytes] | None = None
        self._inode = 0
        self._rest = b""

    def read_on(self) -> None:
        """Read what is new."""
        with suppress(OSError):  # nothing was printed yet, or the folder is gone
            if self._file is None:
                self._open(from_end=True)
            self._take()
            if self._path.stat().st_ino != self._inode:  # it was full, and another one is written
                self._take()
                self._open(from_end=False)
                self._take()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, *, from_end: bool) -> None:
        self.close()
        self._file = self._path.open("rb")
        told = os.fstat(self._file.fileno())
        self._inode, self._rest = told.st_ino, b""
        if from_end and told.st_size > TAIL_BYTES:
            self._file.seek(told.st_size - TAIL_BYTES)
            self._file.readline(TAIL_BYTES)  # the middle of a line

    def _take(self) -> None:
        assert self._file is not None
        data = self._file.read(TAIL_BYTES)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:TAIL_BYTES]
        for line in lines[-MOST_LINES:]:
            if (found := read_line(line.decode(errors="replace") + "\n")) is not None:
                self.count += 1
                self.lines.append((self.count, found.time, found.worker[:100], found.text[:MOST_OF_LINE]))


def read_recipe(folder: Path) -> dict[str, str]:
    """Read the settings of the folder's recipe as `fit.epochs: 3`; none where there is no recipe, as of a script."""
    try:
        with (folder / RECIPE).open("rb") as file:
            data = file.read(MOST_OF_RECIPE + 1)
        return settings_of(tomllib.loads(data.decode())) if len(data) <= MOST_OF_RECIPE else {}
    except (OSError, ValueError, RecursionError):
        return {}
