"""The coordinator's durable record: which steps are committed, by whom, and what the run is. SQLite.

A step is on the disk before any worker hears of it, so a coordinator that is killed goes on from here. One coordinator
at a time: the file is held as long as it is open, and the system lets go of it however the process ends.
"""

import json
import sqlite3
import zlib
from pathlib import Path

from potluck.errors import ConfigError
from potluck.fleet.coordinator import Standing
from potluck.fleet.description import Description
from potluck.fleet.effects import StepRecord
from potluck.fleet.ledger import Range

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, first_row INTEGER NOT NULL, rows INTEGER NOT NULL,
    rows_seen INTEGER NOT NULL, samples REAL NOT NULL, loss REAL, workers TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS ranges (
    step INTEGER NOT NULL, first_row INTEGER NOT NULL, end_row INTEGER NOT NULL, worker INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS ranges_by_step ON ranges (step);
CREATE TABLE IF NOT EXISTS digests (
    step INTEGER NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (step, kind)
);
"""


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[str, str] = {}
        try:
            # The server's lock lets one thread in at a time.
            self._base = sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)
            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.execute("BEGIN EXCLUSIVE")
            self._base.execute("COMMIT")
            self._base.executescript(_TABLES)
            (found,) = self._base.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found.splitlines()[0])
        except sqlite3.OperationalError as error:
            self._close_after_refusal()
            if "locked" in str(error):
                raise ConfigError(
                    f"Another host is using {path} right now. Join that one, or name another folder with --out."
                ) from None
            raise ConfigError(f"Cannot open the journal {path}: {error}.") from None
        except sqlite3.DatabaseError as error:
            self._close_after_refusal()
            raise ConfigError(
                f"{path} is damaged ({error}). Remove it to go on from the newest checkpoint with --resume."
            ) from None

    def _close_after_refusal(self) -> None:
        if hasattr(self, "_base"):
            self._base.close()

    def record(self, record: StepRecord) -> None:
        """A step, once it is whole. A step that is computed again takes the place of the one before."""
        loss = record.loss if record.loss == record.loss else None
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.execute("DELETE FROM ranges WHERE step = ?", (record.step,))
            self._base.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.step,
                    record.epoch,
                    record.row,
                    record.rows,
                    record.rows_seen,
                    record.samples,
                    loss,
                    json.dumps(record.workers),
                ),
            )
            self._base.executemany(
                "INSERT INTO ranges VALUES (?, ?, ?, ?)", [(record.step, *found) for found in record.ranges]
            )

    def agree(self, step: int, kind: str, digest: str) -> None:
        """The right weights' digest. It need not outlive the machine, only this process: so nothing waits for it."""
        self._base.execute("PRAGMA synchronous=NORMAL")
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            values = (step, kind, digest, _checksum(step, kind, digest))
            self._base.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)", values)
        self._base.execute("PRAGMA synchronous=FULL")

    def agreed(self, since: int = 0) -> dict[int, dict[str, str]]:
        """step -> kind -> the right weights' digest. One that is damaged is left out: it would condemn the innocent."""
        found: dict[int, dict[str, str]] = {}
        rows = self._base.execute("SELECT step, kind, digest, checksum FROM digests WHERE step >= ?", (since,))
        for step, kind, digest, checksum in rows:
            if checksum == _checksum(step, kind, digest):
                found.setdefault(step, {})[kind] = digest
        return found

    def rewind(self, step: int) -> None:
        """The run has gone back to this step: what came after it never was."""
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._base.execute("DELETE FROM ranges WHERE step > ?", (step,))
            self._base.execute("DELETE FROM digests WHERE step >= ?", (step,))

    def keep(self, name: str, value: str) -> None:
        if self._kept.get(name) == value:
            return
        self._kept[name] = value
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            self._base.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def fact(self, name: str) -> str | None:
        found = self._base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return found[0] if found else None

    @property
    def description(self) -> Description | None:
        text = self.fact("description")
        return Description.from_json(text) if text else None

    def standing(self, step: int | None = None) -> Standing | None:
        """Where the run stood after a step, or stands now; none if that step is not on record."""
        described = self.description
        last = self._base.execute("SELECT max(step) FROM steps").fetchone()[0]
        step = last if step is None else step
        if not step or described is None:
            return Standing() if step in (None, 0) else None
        found = self._base.execute(
            "SELECT epoch, first_row + rows, rows_seen FROM steps WHERE step = ?", (step,)
        ).fetchone()
        if found is None:
            return None
        epoch, row, rows_seen = found
        if row >= described.rows:
            return Standing(step, epoch + 1, 0, rows_seen, [])
        return Standing(step, epoch, row, rows_seen, self.ranges(epoch, until=step))

    def ranges(self, epoch: int, *, until: int | None = None) -> list[Range]:
        """What was trained of an epoch."""
        found = self._base.execute(
            "SELECT ranges.first_row, ranges.end_row FROM ranges JOIN steps USING (step)"
            " WHERE epoch = ? AND step <= ? ORDER BY ranges.first_row",
            (epoch, until if until is not None else 1 << 62),
        )
        return [(start, end) for start, end in found]

    def steps(self) -> list[int]:
        return [step for (step,) in self._base.execute("SELECT step FROM steps ORDER BY step")]

    def close(self) -> None:
        self._base.close()


def _checksum(step: int, kind: str, digest: str) -> int:
    return zlib.crc32(f"{step} {kind} {digest}".encode())
