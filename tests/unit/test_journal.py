"""The coordinator's record: what a restart goes on from, held by one process at a time."""

import gzip
import math
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from potluck.agree.records import Position
from potluck.errors import ConfigError, JournalError
from potluck.fleet import journal as journal_module
from potluck.fleet.description import Description, Part
from potluck.fleet.effects import StepRecord
from potluck.fleet.journal import Journal, set_aside
from potluck.fleet.ledger import Ledger, prove
from tests.fleet.virtual.disk import stood

pytestmark = pytest.mark.timeout(30)

DESCRIBED = Description(
    parts=(Part(0, None, (4,)),),
    model="a hash",
    rows=10,
    batch=4,
    slices=2,
    seed=1,
    unit=1.0,
    samples_per_row=1.0,
    policy="sync",
    told={"name": "ünïcode"},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    found = Journal(path)
    found.keep("description", DESCRIBED.to_json())
    yield found
    found.close()


def record(step: int, **changes: Any) -> StepRecord:
    """Steps of 4, 4 and 2 rows, of two slices each; worker 1 computes the second."""
    epoch, index = divmod(step - 1, 3)
    row, rows = 4 * index, 2 if index == 2 else 4
    middle = row + rows // 2
    values: dict[str, Any] = {
        "step": step,
        "epoch": epoch,
        "row": row,
        "rows": rows,
        "rows_seen": 10 * epoch + row + rows,
        "samples": float(rows),
        "loss": 1.0 / step,
        "workers": ({"rank": 0, "name": "a"}, {"rank": 1, "name": "b"}),
        "ranges": ((row, middle, 0), (middle, row + rows, 1)),
    }
    return StepRecord(**(values | changes))


def test_a_fresh_journal_stands_at_the_beginning(path: Path) -> None:
    journal = Journal(path)
    assert journal.standing() == journal.standing(0) == Position()
    assert journal.description is None and journal.fact("port") is None and journal.steps() == []
    journal.close()


def test_facts_are_kept_and_replaced(journal: Journal, path: Path) -> None:
    journal.keep("port", "1")
    journal.keep("port", "2")
    journal.close()
    again = Journal(path)
    assert again.fact("port") == "2"
    assert again.description == DESCRIBED
    again.close()


def test_recorded_steps_are_there_after_a_restart(journal: Journal, path: Path) -> None:
    for step in range(1, 6):
        journal.record(record(step))
    journal.close()
    again = Journal(path)
    assert again.steps() == [1, 2, 3, 4, 5]
    assert again.standing() == stood(5, 1, 8, 18, [(0, 2), (2, 4), (4, 6), (6, 8)])
    assert again.standing(2) == stood(2, 0, 8, 8, [(0, 2), (2, 4), (4, 6), (6, 8)])
    assert again.standing(4) == stood(4, 1, 4, 14, [(0, 2), (2, 4)])
    assert again.standing(0) == Position()
    assert again.standing(6) is None
    assert prove(again.ranges(0), 10).holds
    again.close()


def test_after_an_epochs_last_step_the_next_one_begins(journal: Journal) -> None:
    for step in range(1, 4):
        journal.record(record(step))
    assert journal.standing() == stood(3, 1, 0, 10, [])


def test_a_step_that_is_computed_again_takes_the_place_of_the_one_before(journal: Journal) -> None:
    journal.record(record(1))
    journal.record(record(1, ranges=((0, 4, 7),), loss=0.5))
    assert journal.steps() == [1] and journal.ranges(0) == [(0, 4)]


def test_a_run_that_goes_back_forgets_what_came_after(journal: Journal) -> None:
    for step in range(1, 6):
        journal.record(record(step))
    journal.rewind(2)
    assert journal.steps() == [1, 2] and journal.standing() == stood(2, 0, 8, 8, [(0, 2), (2, 4), (4, 6), (6, 8)])
    assert journal.ranges(1) == []
    journal.record(record(3))
    assert prove(journal.ranges(0), 10).holds
    journal.rewind(0)
    assert journal.steps() == [] and journal.standing() == Position()


def test_a_run_goes_back_to_where_its_checkpoint_stood_also_where_a_lost_steps_number_was_used_again(
    journal: Journal,
) -> None:
    """Found by the simulation: weights of one window with the position of another, so that rows were never trained."""
    for step in range(1, 6):
        journal.record(record(step))
    same, other = stood(4, 1, 4, 14, [(0, 4)]), stood(4, 1, 6, 16, [(0, 6)])
    assert journal.go_back(same) == stood(4, 1, 4, 14, [(0, 2), (2, 4)]) and journal.steps() == [1, 2, 3, 4]
    assert journal.go_back(other) == other and journal.steps() == [1, 2, 3]
    assert journal.go_back(None) is None and journal.steps() == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_can_be_recorded(loss: float, journal: Journal) -> None:
    journal.record(record(1, loss=loss))
    assert journal.steps() == [1]


def test_a_record_is_whole_or_not_there(journal: Journal) -> None:
    with pytest.raises(sqlite3.Error):
        journal.record(record(1, ranges=((0, 2, 0), (2, None, 1))))
    assert journal.steps() == [] and journal.ranges(0) == []
    journal.record(record(1))
    assert journal.steps() == [1]


# One at a time


BUSY = r"^Another host is using .*journal.sqlite right now. Join that one, or name another folder with --out.$"


def test_a_second_journal_on_the_same_file_is_refused_with_a_sentence(journal: Journal, path: Path) -> None:
    with pytest.raises(ConfigError, match=BUSY):
        Journal(path)
    journal.record(record(1))  # the first is none the worse


def test_it_is_free_again_once_closed(journal: Journal, path: Path) -> None:
    journal.close()
    Journal(path).close()


HOLD = """
import sys, pathlib
from potluck.fleet.journal import Journal, set_aside
journal = Journal(pathlib.Path(sys.argv[1]))
journal.keep("port", "5")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that holds the journal, with a fact in it."""
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_journal_held_by_another_process_is_refused_and_its_kill_releases_it(
    holder: "subprocess.Popen[bytes]", path: Path
) -> None:
    with pytest.raises(ConfigError, match=BUSY):
        Journal(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    journal = Journal(path)
    assert journal.fact("port") == "5"
    journal.close()


# Files that are none


@pytest.mark.parametrize("data", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 4080, b"\0" * 5000])
def test_a_file_that_is_no_journal_is_refused_with_a_sentence(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        Journal(path)


@pytest.mark.parametrize(
    "how",
    ["cut", "scrambled"],
)
def test_a_damaged_journal_is_told_when_it_is_opened(how: str, journal: Journal, path: Path) -> None:
    """Not later, from the middle of a step."""
    many = tuple((row, row + 1, 0) for row in range(400))
    for step in range(1, 6):
        journal.record(record(step, ranges=many))
    journal.close()
    data = bytearray(path.read_bytes())
    assert len(data) > 5 * 4096
    if how == "cut":
        del data[3 * 4096 :]
    else:
        data[4096 : 4 * 4096] = b"\x55" * (3 * 4096)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is damaged"):
        Journal(path).close()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^Cannot open the journal .*: unable to open database file"):
        Journal(tmp_path / "nowhere" / "journal.sqlite")


def test_a_journal_that_cannot_be_opened_leaves_no_file_open(path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    path.write_bytes(b"not a database" * 1000)
    before = open_files()
    errors = []
    for _ in range(3):
        with pytest.raises(ConfigError) as error:
            Journal(path)
        errors.append(error)  # a traceback keeps what it saw
    assert open_files() == before


# Disks that return something else than was written


def what_it_tells(folder: Path) -> Any:
    """All that a host reads from its journal."""
    journal = Journal(folder / "journal.sqlite")
    try:
        step = journal.steps()[-1]
        facts = [journal.fact(name) for name in ("port", "workers", "next worker", "description")]
        journal.agreed()  # one that is damaged is left out, and nothing else happens
        return journal.standing(), journal.standing(step - 1), journal.steps(), journal.ranges(0), facts
    finally:
        journal.close()


def write_some(folder: Path) -> Journal:
    journal = Journal(folder / "journal.sqlite")
    journal.keep("description", DESCRIBED.to_json())
    journal.keep("port", "4100")
    journal.keep("next worker", "3")
    for step in range(1, 12):
        journal.record(record(step))
        journal.keep("workers", str(step % 3))
        journal.agree(step, "cpu", f"{step}a")
    return journal


def flip(folder: Path, draw: random.Random) -> str:
    """One bit, anywhere in the journal's files."""
    files = sorted(folder.iterdir())
    at = draw.randrange(sum(file.stat().st_size for file in files))
    for file in files:
        data = bytearray(file.read_bytes())
        if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
            file.write_bytes(data)
            return f"byte {at} of {file.name}"
        at -= len(data)
    raise AssertionError


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder that need not wait for a disk, where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("flips", [250, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("how", ["closed", "killed", "added up"])
def test_a_flipped_bit_changes_nothing_or_is_told(
    how: str, flips: int, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, the last writes are in a log of SQLite's, which it passes over in silence where it is damaged."""
    if how == "added up":
        monkeypatch.setattr(journal_module, "TAIL", 3)
    place, whole, copy = (in_memory / name for name in ("place", "whole", "copy"))
    place.mkdir()
    journal = write_some(place)
    if how != "killed":
        journal.close()
    shutil.copytree(place, whole)
    journal.close()
    expected = what_it_tells(place)
    draw, told = random.Random(5), 0
    for _ in range(flips):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        where = flip(copy, draw)
        try:
            assert what_it_tells(copy) == expected, where
        except JournalError as error:
            assert "is damaged" in str(error) and "continue from the newest checkpoint" in str(error), where
            told += 1
    assert told > flips // 12


def test_the_end_of_a_log_that_is_lost_is_told(tmp_path: Path) -> None:
    write_some(tmp_path)  # and never closed
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tmp_path.glob("journal*"):
        shutil.copy(file, copy)
    assert (copy / "journal.sqlite-wal").stat().st_size
    (copy / "journal.sqlite-wal").unlink()
    with pytest.raises(JournalError, match=r"the last \d+ of its \d+ writes are missing|no such"):
        Journal(copy / "journal.sqlite")


def test_a_journal_from_before_checksums_opens_and_has_them_from_then_on(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    expected = what_it_tells(tmp_path)
    (tmp_path / "journal.sqlite-writes").unlink()
    base = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    base.execute("DELETE FROM facts WHERE name = 'seal'")
    for table in ("facts", "steps"):
        base.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    base.execute("PRAGMA user_version = 0")
    base.close()
    assert what_it_tells(tmp_path) == expected
    base = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    base.execute("UPDATE ranges SET worker = 7 WHERE step = 3")
    base.close()
    with pytest.raises(JournalError, match="step 3 does not match its checksum"):
        Journal(tmp_path / "journal.sqlite")


def test_a_journal_without_its_counter_opens(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    expected = what_it_tells(tmp_path)
    (tmp_path / "journal.sqlite-writes").unlink()
    assert what_it_tells(tmp_path) == expected


def test_a_journal_that_was_removed_begins_anew_though_its_counter_is_there(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    (tmp_path / "journal.sqlite").unlink()
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.steps() == []
    journal.close()
    Journal(tmp_path / "journal.sqlite").close()


def test_a_damaged_journal_is_set_aside_whole(tmp_path: Path) -> None:
    write_some(tmp_path).close()
    aside = set_aside(tmp_path / "journal.sqlite")
    assert sorted(file.name for file in tmp_path.iterdir()) == [aside.name, f"{aside.name}-writes"]
    journal = Journal(aside)
    assert len(journal.steps()) == 11
    journal.close()


def test_a_full_disk_is_a_sentence_and_what_was_there_stays(journal: Journal, path: Path) -> None:
    journal.record(record(1))
    (pages,) = journal._base.execute("PRAGMA page_count").fetchone()
    journal._base.execute(f"PRAGMA max_page_count = {pages}")
    sentence = (
        r"^Cannot write to the journal .*: database or disk is full. Free some space, then continue with --resume.$"
    )
    with pytest.raises(ConfigError, match=sentence):
        journal.record(record(2, workers=({"name": "x" * 100_000},)))
    with pytest.raises(ConfigError, match=sentence):
        journal.keep("big", "x" * 100_000)
    assert journal.fact("big") is None and journal.steps() == [1]
    journal.close()
    again = Journal(path)
    assert again.steps() == [1]
    again.close()


def meddle(path: Path, command: str) -> None:
    base = sqlite3.connect(path)
    base.execute(command)
    base.commit()
    base.close()


def test_the_digest_of_each_step_is_kept_by_kind(journal: Journal, path: Path) -> None:
    for step in (1, 2, 3):
        journal.agree(step, "cpu", f"{step}a")
    journal.agree(3, "gpu", "3b")
    journal.agree(3, "cpu", "3c")  # most told another than the first
    journal.close()
    again = Journal(path)
    assert again.agreed(since=2) == {2: {"cpu": "2a"}, 3: {"cpu": "3c", "gpu": "3b"}}
    again.rewind(2)  # what is trained again from there may be something else
    assert again.agreed() == {1: {"cpu": "1a"}}
    again.close()


def test_a_damaged_digest_condemns_nobody(journal: Journal, path: Path) -> None:
    journal.agree(1, "cpu", "right")
    journal.agree(2, "cpu", "right")
    journal.close()
    meddle(path, "UPDATE digests SET digest = 'righs' WHERE step = 2")
    again = Journal(path)
    assert again.agreed() == {1: {"cpu": "right"}}
    again.close()


def test_a_digest_that_is_no_text_any_more_condemns_nobody(journal: Journal, path: Path) -> None:
    journal.agree(1, "cpu", "right")
    journal.agree(2, "cpu", "right")
    journal.close()
    meddle(path, "UPDATE digests SET digest = CAST(x'ff6967' AS TEXT) WHERE step = 2")
    again = Journal(path)
    assert again.agreed() == {1: {"cpu": "right"}}
    again.close()


def test_a_journal_from_before_digests_were_kept_opens(journal: Journal, path: Path) -> None:
    journal.record(record(1))
    journal.close()
    meddle(path, "DROP TABLE digests")
    again = Journal(path)
    assert again.steps() == [1] and again.agreed() == {}
    again.agree(1, "cpu", "a")
    assert again.agreed() == {1: {"cpu": "a"}}
    again.close()


# Steps that are added up


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return Ledger(sorted(ranges)).ranges


@pytest.mark.parametrize("seed", range(20))
def test_a_journal_that_adds_steps_up_tells_what_one_tells_that_keeps_them_all(
    seed: int, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps are done again, where turns have no rows, and after going back to any checkpoint."""
    draw = random.Random(seed)
    short, whole = Journal(in_memory / "short"), Journal(in_memory / "whole")
    checkpoints: list[Position] = []
    for each in (short, whole):
        each.keep("description", DESCRIBED.to_json())
    for _ in range(60):
        standing = whole.standing()
        assert standing is not None
        kind = draw.choice(["step"] * 8 + ["idle", "checkpoint", "back", "again"])
        if kind == "checkpoint" and standing.version:
            prefix = [(0, standing.row)] if standing.row else []
            checkpoints.append(
                stood(standing.version, standing.epoch, standing.row, standing.rows_seen, prefix, standing.turn)
            )
        elif kind == "back":
            kept = draw.choice([None, *checkpoints])
            checkpoints = checkpoints[: checkpoints.index(kept) + 1] if kept is not None else []
            for each in (short, whole):
                each.go_back(kept)
        elif kind == "again" and standing.version > max(1, short.snapshot.step):
            for each in (short, whole):
                each.rewind(standing.version - 1)
        elif kind in ("step", "idle"):
            rows = 0 if kind == "idle" else min(4, DESCRIBED.rows - standing.row)
            at, step = (standing.epoch, standing.row), standing.version + 1
            ranges = ((at[1], at[1] + rows, 0),) if rows else ()
            seen = standing.rows_seen + rows
            for each, tail in ((short, 3), (whole, 10_000)):
                monkeypatch.setattr(journal_module, "TAIL", tail)
                each.record(record(step, epoch=at[0], row=at[1], rows=rows, rows_seen=seen, ranges=ranges))
        if draw.random() < 0.2:
            monkeypatch.setattr(journal_module, "TAIL", 10_000)
            short.close()
            short = Journal(in_memory / "short")
        found, expected = short.standing(), whole.standing()
        assert found is not None and expected is not None
        assert merged(found.ranges) == merged(expected.ranges)
        assert replace(found, ranges=expected.ranges) == expected and short.steps() == whole.steps()
        for epoch in range(expected.epoch + 1):
            assert merged(short.ranges(epoch)) == merged(whole.ranges(epoch))
        (held,) = short._base.execute("SELECT count(*) FROM steps").fetchone()
        assert held < 6
    short.close()
    whole.close()


def test_a_journal_of_the_version_before_opens_and_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written by Potluck as of commit bbb7d3b: the steps of write_some()."""
    kept = Path(__file__).parents[1] / "vectors" / "journal-v1.sqlite.gz"
    (tmp_path / "journal.sqlite").write_bytes(gzip.decompress(kept.read_bytes()))
    expected = what_it_tells(tmp_path)
    assert expected[0] == stood(11, 3, 8, 38, [(0, 2), (2, 4), (4, 6), (6, 8)])
    monkeypatch.setattr(journal_module, "TAIL", 3)
    for _ in range(2):
        standing, previous, steps, ranges, facts = what_it_tells(tmp_path)
        assert (standing, previous, steps, facts) == (expected[0], expected[1], expected[2], expected[4])
        assert merged(ranges) == merged(expected[3]) == [(0, 10)]
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.snapshot.step == 8 and sorted(journal.agreed()) == [8, 9, 10, 11]
    journal.record(record(12))
    assert all(prove(journal.ranges(epoch), 10).holds for epoch in range(4))
    journal.close()
