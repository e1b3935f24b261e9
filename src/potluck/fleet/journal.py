"""The coordinator's durable record: which steps are committed, by whom, and what the run is. SQLite.

A step is on the disk before any worker hears of it, so the next coordinator resumes from here if this one is killed.
One coordinator at a time: the file is held as long as it is open, and the system releases it however the process ends.

Every row has a checksum, and one fact, the seal, says how many there are: what comes back from a disk is what was
written, or is refused when the journal is opened. A file beside it counts the writes, since SQLite itself drops the end
of its log in silence where that is damaged.

All of it is read before a host answers, so it does not grow with the run: the last steps are held one by one, and those
before them added up in one fact, the snapshot.
"""

import hashlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from potluck.agree.records import Position, Range
from potluck.errors import ConfigError, JournalError, PotluckError
from potluck.fleet.coordinator_state import Resumed
from potluck.fleet.description import Description
from potluck.fleet.effects import StepRecord
from potluck.fleet.ledger import Ledger
from potluck.fleet.phases import enter_phase

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
VERSION = 2
"""SQLite's user_version. From 1 on, all rows have checksums; 2 has a snapshot, of which older programs know nothing."""
SEAL = "seal"
SNAPSHOT = "snapshot"
TAIL = 1024
"""The last steps that are held one by one: at least this many, and less than twice as many."""
_DAMAGE = (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError, PotluckError)


@dataclass(kw_only=True)
class JournalSnapshot:
    """The steps that the journal no longer holds one by one, added up: where the run stood after `step`, and what was
    trained until then."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    rows_seen: int = 0
    turn: int = 0
    steps: list[Range] = field(default_factory=list)
    """The numbers of the steps that were added up, as half-open intervals."""
    whole: list[Range] = field(default_factory=list)
    """Epochs of which each row was trained exactly once, as half-open intervals."""
    ranges: dict[int, list[Range]] = field(default_factory=dict)
    """Rows of every other epoch, neighbours as one. A row that was trained twice is in two of them."""

    @property
    def position(self) -> Position:
        return Position(version=self.step, epoch=self.epoch, row=self.row, rows_seen=self.rows_seen, turn=self.turn)

    def stand_at(self, position: Position) -> None:
        self.step, self.epoch, self.row = position.version, position.epoch, position.row
        self.rows_seen, self.turn = position.rows_seen, position.turn

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | None) -> "JournalSnapshot":
        if text is None:
            return cls()
        fields = json.loads(text)
        for name in ("steps", "whole"):
            fields[name] = _pairs(fields[name])
        fields["ranges"] = {int(epoch): _pairs(ranges) for epoch, ranges in fields["ranges"].items()}
        return cls(**fields)

    def add(self, epoch: int, ranges: Iterable[Range], rows: int) -> None:
        """Adds what later steps have trained of an epoch, which has so many rows."""
        merged = Ledger(sorted([*self.ranges.pop(epoch, []), *ranges])).ranges
        if merged == [(0, rows)] and not self._is_whole(epoch):
            self.whole = Ledger(sorted([*self.whole, (epoch, epoch + 1)])).ranges
        elif merged:
            self.ranges[epoch] = merged

    def trained(self, epoch: int, rows: int) -> list[Range]:
        """The ranges of an epoch that were trained until this snapshot."""
        return [*([(0, rows)] if self._is_whole(epoch) else []), *self.ranges.get(epoch, [])]

    def _is_whole(self, epoch: int) -> bool:
        return any(start <= epoch < end for start, end in self.whole)

    def back_to(self, kept: Position) -> "JournalSnapshot":
        """The snapshot of a checkpoint that is older than this one."""
        snapshot = JournalSnapshot(
            steps=_until(self.steps, kept.version + 1),
            whole=_until(self.whole, kept.epoch),
            ranges={epoch: ranges for epoch, ranges in self.ranges.items() if epoch < kept.epoch}
            | ({kept.epoch: list(kept.ranges)} if kept.ranges else {}),
        )
        snapshot.stand_at(kept)
        return snapshot


def _pairs(found: list[list[int]]) -> list[Range]:
    return [(int(start), int(end)) for start, end in found]


def _until(intervals: list[Range], limit: int) -> list[Range]:
    return [(start, min(end, limit)) for start, end in intervals if start < limit]


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[str, str] = {}
        self._writes = self._steps = 0
        self._outside = -1
        is_new = not path.exists()
        try:
            # The server's lock lets one thread in at a time.
            # And 0.2 s, since another host would hold the file for as long as it runs.
            self._base = sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)
            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.execute("BEGIN EXCLUSIVE")
            self._base.execute("COMMIT")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            if path.name == ":memory:":  # of SQLite: such a journal leaves no file, and so its counter leaves none
                self._outside = os.memfd_create("journal-writes")
            else:
                self._outside = os.open(path.with_name(f"{path.name}-writes"), flags, 0o600)
            self._open(is_new)
        except OSError as error:
            self.close()
            raise ConfigError(f"Cannot open the journal {path}: {error.strerror}.") from None
        except _DAMAGE as error:
            self.close()
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> ConfigError:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError):
            if "locked" in text:
                return ConfigError(
                    f"Another host is using {self.path} right now. Join that one, or name another folder with --out."
                )
            if not self.path.is_file() or "disk is full" in text or not os.access(self.path, os.W_OK):
                return ConfigError(f"Cannot open the journal {self.path}: {text}.")
        reason = text.removesuffix(".") or type(error).__name__
        return JournalError(
            f"{self.path} is damaged ({reason}). Remove it to continue from the newest checkpoint with --resume."
        )

    def _open(self, is_new: bool) -> None:
        """Makes the tables, or sees to it that what is in them is what was written."""
        (found,) = self._base.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(str(found).splitlines()[0])
        (version,) = self._base.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= VERSION:
            raise ValueError(f"it has version {version}, and this Potluck reads version {VERSION}")
        self._base.executescript(_TABLES)
        for table in ("facts", "steps"):  # of an older journal, and of a new one
            if "checksum" not in [row[1] for row in self._base.execute(f"PRAGMA table_info({table})")]:
                self._base.execute(f"ALTER TABLE {table} ADD COLUMN checksum TEXT")
        if version == 0:
            self._seal_all()
        self._verify(0 if is_new else self._count_outside())
        self._count_write()
        if self._steps >= 2 * TAIL:  # of the time before snapshots: it takes long to open this once
            with self._writing():
                self._shorten()
            self._base.execute("VACUUM")

    def _seal_all(self) -> None:
        """Checksum all of a new journal, or of one from before there were checksums: it is believed as it is, this
        once."""
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            facts = self._base.execute("SELECT name, value FROM facts").fetchall()
            for name, value in facts:
                self._put_fact(name, value)
            for row, ranges in list(self._rows()):
                checksum = _row_checksum(row, ranges)
                self._base.execute("UPDATE steps SET checksum = ? WHERE step = ?", (checksum, row["step"]))
            (self._steps,) = self._base.execute("SELECT count(*) FROM steps").fetchone()
            self._seal()
            self._base.execute("PRAGMA user_version = 1")

    def _verify(self, writes: int) -> None:
        """Checks every row, and that none is missing."""
        facts = self._base.execute("SELECT name, value, checksum FROM facts").fetchall()
        for name, value, checksum in facts:
            if checksum != _row_checksum({"name": name, "value": value}):
                raise ValueError(f"the fact {name!a} does not match its checksum")
        self._kept = {name: value for name, value, _ in facts}
        seal, added_up = json.loads(self._kept[SEAL]), self.snapshot.step
        last = self._steps = 0
        for row, ranges in self._rows():
            if row["checksum"] != _row_checksum(row, ranges):
                raise ValueError(f"step {row['step']} does not match its checksum")
            if row["step"] <= added_up:
                raise ValueError(f"step {row['step']} is in its snapshot too")
            self._steps, last = self._steps + 1, row["step"]
        self._writes = seal["writes"]
        if seal != self._sealed(self._writes, last):
            raise ValueError("what it holds is not what was last written")
        if self._writes < writes:
            raise ValueError(f"the last {writes - self._writes} of its {writes} writes are missing")
        if self.description is None and (self._steps or self.snapshot.step):
            raise ValueError("nothing says what it is a journal of")

    def _rows(self) -> Iterator[tuple[dict[str, Any], list[tuple[int, int, int]]]]:
        """Every step with its ranges, in order."""
        ranges = "SELECT first_row, end_row, worker FROM ranges WHERE step = ? ORDER BY rowid"
        with closing(self._base.cursor()) as cursor:
            cursor.row_factory = sqlite3.Row
            for row in cursor.execute("SELECT * FROM steps ORDER BY step"):
                yield dict(row), self._base.execute(ranges, (row["step"],)).fetchall()
        foreign = "SELECT step FROM ranges WHERE step NOT IN (SELECT step FROM steps)"
        if (found := self._base.execute(foreign).fetchone()) is not None:
            raise ValueError(f"there are ranges of step {found[0]}, and no such step")

    # Writing

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One write, and the seal with it: all of it is on the disk, or nothing."""
        before = dict(self._kept), self._steps
        try:
            with self._base:
                self._base.execute("BEGIN IMMEDIATE")
                yield
                self._seal()
        except Exception as error:
            self._kept, self._steps = before
            if isinstance(error, sqlite3.OperationalError):
                raise ConfigError(
                    f"Cannot write to the journal {self.path}: {error}. Free some space, then continue with --resume."
                ) from None
            raise
        self._writes += 1
        self._count_write()  # last: where it is ahead of the journal, the journal is taken for damaged

    def _sealed(self, writes: int, last: int) -> dict[str, Any]:
        return {"writes": writes, "steps": self._steps, "last": last, "facts": sorted(self._kept.keys() - {SEAL})}

    def _seal(self) -> None:
        last = self._base.execute("SELECT max(step) FROM steps").fetchone()[0] or 0
        self._put_fact(SEAL, json.dumps(self._sealed(self._writes + 1, last)))

    def _put_fact(self, name: str, value: str) -> None:
        row = {"name": name, "value": value}
        self._put("facts", row | {"checksum": _row_checksum(row)})
        self._kept[name] = value

    def _put(self, table: str, row: dict[str, Any]) -> None:
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        self._base.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))

    def _count_write(self) -> None:
        """Not synced: after a power cut it is behind, and says nothing then."""
        told = b"%020d" % self._writes
        with suppress(OSError):  # a full disk: what must be written says so, and this is then not believed
            os.pwrite(self._outside, b"%s %08x\n" % (told, zlib.crc32(told)), 0)

    def _count_outside(self) -> int:
        """0 where it cannot be read, or not believed."""
        with suppress(OSError, ValueError):
            told, check = os.pread(self._outside, 100, 0).split()
            if zlib.crc32(told) == int(check, 16):
                return int(told)
        return 0

    def record(self, record: StepRecord) -> None:
        """A step, once it is whole. A step that is computed again takes the place of the one before."""
        row: dict[str, Any] = {
            "step": record.step,
            "epoch": record.epoch,
            "first_row": record.row,
            "rows": record.rows,
            "rows_seen": record.rows_seen,
            "samples": float(record.samples),
            "loss": float(record.loss) if record.loss == record.loss else None,
            "workers": json.dumps(record.workers),
        }
        enter_phase("recording", record.step)
        with self._writing():
            there = self._base.execute("SELECT count(*) FROM steps WHERE step = ?", (record.step,)).fetchone()[0]
            self._base.execute("DELETE FROM ranges WHERE step = ?", (record.step,))
            self._base.execute("DELETE FROM digests WHERE step >= ?", (record.step,))  # of the one before
            self._put("steps", row | {"checksum": _row_checksum(row, record.ranges)})
            self._base.executemany(
                "INSERT INTO ranges VALUES (?, ?, ?, ?)", [(record.step, *found) for found in record.ranges]
            )
            self._steps += 1 - there
            if self._steps >= 2 * TAIL:
                self._shorten()
        enter_phase("recorded", record.step)

    def _shorten(self) -> None:
        """Adds all steps but the last ones up. Within the write of a step: both are on the disk, or neither."""
        described, snapshot = self.description, self.snapshot
        assert described is not None
        (last,) = self._base.execute("SELECT step FROM steps ORDER BY step DESC LIMIT 1 OFFSET ?", (TAIL,)).fetchone()
        stood = self._stood(last)
        assert stood is not None
        older = self._base.execute(
            "SELECT epoch, ranges.first_row, end_row FROM ranges JOIN steps USING (step)"
            " WHERE step <= ? ORDER BY epoch",
            (last,),
        )
        for epoch, group in groupby(older.fetchall(), key=lambda found: found[0]):
            snapshot.add(epoch, [(start, end) for _, start, end in group], described.rows)
        steps = self._base.execute("SELECT step, step + 1 FROM steps WHERE step <= ? ORDER BY step", (last,))
        snapshot.steps = Ledger([*snapshot.steps, *steps]).ranges
        snapshot.stand_at(stood)
        self._put_fact(SNAPSHOT, snapshot.to_json())
        for table in ("steps", "ranges"):
            self._base.execute(f"DELETE FROM {table} WHERE step <= ?", (last,))
        self._base.execute("DELETE FROM digests WHERE step < ?", (last,))
        self._steps = TAIL
        self._base.execute(f"PRAGMA user_version = {VERSION}")

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
        digests: dict[int, dict[str, str]] = {}
        # As bytes: a flip may leave what is no text, which SQLite would refuse to read.
        rows = self._base.execute(
            "SELECT step, CAST(kind AS BLOB), CAST(digest AS BLOB), checksum FROM digests WHERE step >= ?", (since,)
        )
        for step, *texts, checksum in rows:
            kind, digest = ((text or b"").decode(errors="replace") for text in texts)
            if checksum == _checksum(step, kind, digest):
                digests.setdefault(step, {})[kind] = digest
        return digests

    def rewind(self, step: int) -> None:
        """Removes every later step: the run has gone back to this one."""
        with self._writing():
            self._base.execute("DELETE FROM steps WHERE step > ?", (step,))
            self._base.execute("DELETE FROM ranges WHERE step > ?", (step,))
            (self._steps,) = self._base.execute("SELECT count(*) FROM steps").fetchone()
            self._base.execute("DELETE FROM digests WHERE step >= ?", (step,))
            if step < self.snapshot.step:  # nothing tells where the run stood then
                self._base.execute("DELETE FROM facts WHERE name = ?", (SNAPSHOT,))
                del self._kept[SNAPSHOT]

    def go_back(self, kept: Position | None) -> Position | None:
        """The run resumes from a checkpoint, or from its beginning: where it stands then."""
        if kept is not None and kept.version < self.snapshot.step:
            older = self.snapshot.back_to(kept)
            with self._writing():
                for table in ("steps", "ranges", "digests"):
                    self._base.execute(f"DELETE FROM {table}")
                self._steps = 0
                self._put_fact(SNAPSHOT, older.to_json())
            return kept
        mine = self.standing(kept.version) if kept is not None else None  # it knows who computed what
        if kept is None or mine is None or mine.rows_seen == kept.rows_seen:
            self.rewind(kept.version if kept is not None else 0)
            return mine or kept
        # The disk lost the step that was kept, and a window that took its number is over other rows.
        self.rewind(kept.version - 1)
        return kept

    def keep(self, name: str, value: str) -> None:
        if self._kept.get(name) != value:
            with self._writing():
                self._put_fact(name, value)

    # Reading

    def fact(self, name: str) -> str | None:
        return self._kept.get(name)

    @property
    def description(self) -> Description | None:
        text = self.fact("description")
        return Description.from_json(text) if text else None

    @property
    def snapshot(self) -> JournalSnapshot:
        return JournalSnapshot.from_json(self.fact(SNAPSHOT))

    def standing(self, step: int | None = None) -> Position | None:
        """Where the run stood after a step, or stands now; none if that step is not on record."""
        described = self.description
        last = self._base.execute("SELECT max(step) FROM steps").fetchone()[0]
        step = (last or self.snapshot.step) if step is None else step
        if not step or described is None:
            return Position() if step in (None, 0) else None
        if (stood := self._stood(step)) is None:
            return None
        stood = replace(stood, step=described.steps_of(stood))
        if stood.row >= described.rows:
            return stood.next_epoch()
        return replace(stood, ranges=tuple(self.ranges(stood.epoch, until=step)))

    def _stood(self, step: int) -> Position | None:
        """Where the run stood as a step ended, in the epoch that it was of."""
        snapshot = self.snapshot
        if step and step == snapshot.step:
            return snapshot.position
        row_of_step = self._base.execute(
            "SELECT epoch, first_row + rows, rows_seen FROM steps WHERE step = ?", (step,)
        ).fetchone()
        if row_of_step is None:
            return None
        before = "SELECT max(step) FROM steps WHERE step <= ? AND rows > 0"
        (counted,) = self._base.execute(before, (step,)).fetchone()
        since = "SELECT count(*) FROM steps WHERE step <= ? AND step > ?"
        (turns,) = self._base.execute(since, (step, counted or 0)).fetchone()
        epoch, row, rows_seen = row_of_step
        turn = turns if counted is not None else turns + snapshot.turn
        return Position(version=step, epoch=epoch, row=row, rows_seen=rows_seen, turn=turn)

    def resumed(self, standing: Position | None = None) -> Resumed:
        """All that the next coordinator of this run begins with. `standing`: of a checkpoint, where this holds none."""
        standing = standing or self.standing()
        step = standing.version if standing is not None else 0
        return Resumed(
            standing=standing,
            previous=self.standing(step - 1) if step else None,
            description=self.description,
            next_id=int(self.fact("next worker") or 0),
            expected=int(self.fact("workers") or 0),
            agreed=self.agreed(since=step - 1),
        )

    def ranges(self, epoch: int, *, until: int | None = None) -> list[Range]:
        """The ranges of an epoch that were trained."""
        rows = self._base.execute(
            "SELECT ranges.first_row, ranges.end_row FROM ranges JOIN steps USING (step)"
            " WHERE epoch = ? AND step <= ? ORDER BY ranges.first_row",
            (epoch, until if until is not None else 1 << 62),
        )
        before, described = self.snapshot, self.description
        is_after = described is not None and (until is None or until >= before.step)
        added_up = before.trained(epoch, described.rows) if described is not None and is_after else []
        return sorted([*added_up, *((start, end) for start, end in rows)])

    def steps(self) -> list[int]:
        added_up = [step for start, end in self.snapshot.steps for step in range(start, end)]
        return [*added_up, *(step for (step,) in self._base.execute("SELECT step FROM steps ORDER BY step"))]

    def close(self) -> None:
        if hasattr(self, "_base"):
            self._base.close()
        if self._outside >= 0:
            os.close(self._outside)
            self._outside = -1


def set_aside(path: Path) -> Path:
    """A damaged journal, for people who want to look into it: all of its files get another name."""
    aside = path.with_name(f"damaged-{path.name}")
    for ending in ("", "-wal", "-shm", "-writes"):
        with suppress(FileNotFoundError):  # not every journal has all of them
            path.with_name(path.name + ending).replace(aside.with_name(aside.name + ending))
    return aside


def _row_checksum(row: dict[str, Any], ranges: Any = ()) -> str:
    """Compute a row's checksum over all columns that have a value: one that is added later changes nothing for the rows
    before it."""
    told = sorted((name, value) for name, value in row.items() if value is not None and name != "checksum")
    return hashlib.sha256(repr((told, sorted(map(tuple, ranges)))).encode()).hexdigest()[:32]


def _checksum(step: int, kind: str, digest: str) -> int:
    return zlib.crc32(f"{step} {kind} {digest}".encode())
