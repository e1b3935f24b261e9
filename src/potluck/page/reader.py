"""RunReader: follows a run folder that somebody else writes: its events, line by line, and how things stand now.

Reads, and never writes or locks: whatever becomes of the page, the run does not notice.
"""

from pathlib import Path
from typing import IO, Any

from potluck.files import table_in
from potluck.page.beside import OutputTail, read_recipe
from potluck.page.fold import MOST_OF_NAME, MOST_WORKERS, Fold, cut
from potluck.show.sentences import Record

PIECE_BYTES = 1 << 20
"""The most bytes that are read at once, so that a long run does not keep those waiting who look."""
LONGEST_LINE = 2 << 20
"""A step of thousands of workers has less. Longer ones are passed over: as objects they take twenty times as much."""
NOW = "now.json"
"""File beside the events with what is not one, such as how long a worker has been silent. Its writer replaces it
whole."""
EVENTS = "events.jsonl"

Kinds = dict[str, type | tuple[type, ...]]
NUMBER = (int, float)
OF_NOW: Kinds = {"members": int, "waits_for": int}
OF_BYTES: Kinds = {"sent": NUMBER, "received": NUMBER, "saved": NUMBER}
OF_WORKER: Kinds = {"id": int, "name": str, "phase": str, "doing": str, "silent_s": NUMBER}
MORE_OF_WORKER: Kinds = {"kind": str, "address": str, "rtt_s": NUMBER, "uses": dict}


class RunReader:
    def __init__(self, folder: Path | None, pointer: Path | None = None) -> None:
        """`pointer`: a file that names the folder, once it is known, and another when another run follows."""
        self.folder = folder
        self.fold = Fold()
        self.now: Record = {}
        self.number = 0
        """Changes when another run, or another file of it, is followed."""
        self.is_caught_up = False
        self.recipe: dict[str, str] = {}
        """Settings of the recipe, if the folder has one."""
        self.output: OutputTail | None = None
        """What the run's script prints; None: there is no folder yet."""
        self._pointer = pointer
        self._file: IO[bytes] | None = None
        self._inode = 0
        self._rest = b""
        self._now_seen: tuple[int, int] = (0, 0)

    def read_on(self) -> bool:
        """A piece of what is new; whether there may be more of it at once."""
        self._follow_pointer()
        if self.folder is None:
            return False
        if self.output is None:
            self.output = OutputTail(self.folder)
        self.output.read_on()
        try:
            self._read_now()
            return self._read_events()
        except OSError:  # it is not there yet, or it is gone
            self.is_caught_up = True
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.output is not None:
            self.output.close()
            self.output = None

    def _follow_pointer(self) -> None:
        if self._pointer is None:
            return
        try:
            named = self._pointer.read_text(encoding="utf-8").strip()
        except OSError:
            return
        if named and Path(named) != self.folder:
            self.folder = Path(named)
            self._begin()

    def _begin(self) -> None:
        self.close()
        self.fold, self.now, self._rest, self.is_caught_up = Fold(), {}, b"", False
        self.recipe = {}
        self.number += 1

    def _read_events(self) -> bool:
        assert self.folder is not None
        path = self.folder / EVENTS
        if self._file is None:
            self._file = path.open("rb")
            self._inode = path.stat().st_ino
            self.recipe = read_recipe(self.folder)
        data = self._file.read(PIECE_BYTES)
        if not data:
            self.is_caught_up = True
            told = path.stat()
            if told.st_ino != self._inode or told.st_size < self._file.tell():  # another file, or it was cut
                self._begin()
                return True
            return False
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[: LONGEST_LINE + 1]  # of one that is too long, enough to know it by
        for line in lines:
            if len(line) <= LONGEST_LINE and (record := table_in(line)):
                self.fold.take(record)
        has_more = len(data) == PIECE_BYTES
        self.is_caught_up |= not has_more  # a run of many steps a second never leaves a look without news
        return has_more

    def _read_now(self) -> None:
        assert self.folder is not None
        path = self.folder / NOW
        try:
            told = path.stat()
        except OSError:
            return
        if (seen := (told.st_mtime_ns, told.st_ino)) != self._now_seen:
            self._now_seen = seen
            with path.open("rb") as file:
                self.now = now_record(file.read(LONGEST_LINE)) or self.now


def now_record(data: bytes) -> Record | None:
    """Read now.json, if it is as it should be: it may come from another machine."""
    record = table_in(data)
    workers = record.get("workers", [])
    if not isinstance(workers, list) or not _is_like(record, {"time": NUMBER}, OF_NOW):
        return None
    if "bytes" in record and not _is_like(record["bytes"], OF_BYTES):
        return None
    rows = [cut(row, MOST_OF_NAME) for row in workers[:MOST_WORKERS] if _is_like(row, OF_WORKER, MORE_OF_WORKER)]
    kept: Record = cut(record) | {"workers": rows}
    return kept


def _is_like(found: Any, must: Kinds, may: Kinds | None = None) -> bool:
    """Whether it has all that it must have, and whatever it has is of the right kind."""
    return (
        isinstance(found, dict)
        and all(isinstance(found.get(name), kind) for name, kind in must.items())
        and all(isinstance(found[name], kind) for name, kind in (may or {}).items() if name in found)
    )
