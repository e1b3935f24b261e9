"""The file in which a run folder keeps what workers of its machine print: a line for each, with its time and worker.

It is bounded: a script that prints for ever fills no disk. The newest lines are kept, in at most two files.
"""

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from potluck.words import printable

OUTPUT, OLDER = "output.log", "output.1.log"
"""The lines of now, and those before them."""
MOST_BYTES = 8 << 20
"""The most bytes of each of the two."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line that a worker printed."""

    time: float
    """Seconds since 1970."""
    worker: str
    text: str

    def written(self) -> str:
        """Write it as `2026-11-18T23:40:12.123Z host-worker-0 text`."""
        at = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return f"{at} {self.worker.replace(' ', '-')} {printable(COLOURS.sub('', self.text))}\n"


class OutputFile:
    """Appends lines to a run folder's file. Where that is full, it takes the place of the older one."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder, self._most = folder, most_bytes
        self._file: IO[str] = (folder / OUTPUT).open("a+", encoding="utf-8")
        if (folder / OUTPUT).stat().st_size and not (folder / OUTPUT).read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a crash cut the last line, of which the next must not become part

    def write(self, line: OutputLine) -> None:
        self._file.write(line.written())
        self._file.flush()
        if self._file.tell() > self._most:
            self._file.close()
            (self._folder / OUTPUT).replace(self._folder / OLDER)
            self._file = (self._folder / OUTPUT).open("a", encoding="utf-8")

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been said
            self._file.close()


def read_output(folder: Path, last: int = 1000) -> list[OutputLine]:
    """Read the last lines that a run folder keeps, the oldest first; none if nothing was printed."""
    lines: deque[OutputLine] = deque(maxlen=last)
    for name in (OLDER, OUTPUT):
        with suppress(OSError), (folder / name).open(encoding="utf-8", errors="replace") as file:
            lines.extend(line for line in map(read_line, file) if line is not None)
    return list(lines)


def read_line(written: str) -> OutputLine | None:
    """Read a line as it was written; None if it is not whole."""
    at, _, rest = written.rstrip("\n").partition(" ")
    worker, _, text = rest.partition(" ")
    try:
        return OutputLine(datetime.fromisoformat(at).timestamp(), worker, text) if written.endswith("\n") else None
    except ValueError:  # a line that a crash cut short, and another one behind it
        return None
