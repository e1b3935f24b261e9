"""A run folder: named plainly, for its owner alone, and held by one run at a time; what a host finds in it again."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import potluck
from potluck.agree.records import Position
from potluck.errors import ConfigError, JournalError
from potluck.events import read_events
from potluck.files import write_whole
from potluck.fleet.coordinator import INPUTS
from potluck.fleet.effects import Finish, Record
from potluck.fleet.invite import Invite
from potluck.fleet.journal import Journal
from potluck.launch.host import _Host
from potluck.launch.options import HostArgs, HostOptions, host_args
from potluck.save import checkpoint_folder
from potluck.save.checkpoint_receiver import CheckpointReceiver
from potluck.save.run_folder import hold, make_run_folder, name_fault
from tests.fleet.fleet import wait_until
from tests.unit.test_journal import DESCRIBED, record

pytestmark = pytest.mark.timeout(60)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def order(what: str = "demo", *settings: str, out: str | None = None, resume: bool = False) -> HostArgs:
    options = HostOptions(what=what, settings=list(settings), workers=0, out=out, resume=resume, patience_s=5.0)
    return host_args(options)


@contextmanager
def hosting(order: HostArgs) -> Iterator[_Host]:
    """A host that listens, and has not yet let anybody in."""
    with ExitStack() as stack:
        host = _Host(order, stack)
        host._show(host._invite("127.0.0.1"), to_terminal=True)
        host.server.start()
        yield host


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Names


BAD_NAMES = [
    "../x",
    "..",
    ".",
    "",
    "  ",
    "/tmp/x",
    "a/b",
    "a/",
    ".hidden",
    "a\0b",
    "a\nb",
    "a\x1b[2J",
    "a\u202eb",
    "x" * 300,
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_a_name_that_is_no_plain_word_makes_no_folder_anywhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name must (be|have)"):
        order("demo", f"name={json.dumps(name)}")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_a_number_is_refused_and_ordinary_names_are_not() -> None:
    with pytest.raises(ConfigError, match="plain word"):
        order("demo", "name=3")
    assert [name for name in ("tiny", "a b", "größe", "x" * 200, "run-2.1") if name_fault(name)] == []


# Who may look


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_run_folder_is_for_its_owner_alone(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with hosting(order()) as host:
            assert mode(host.folder) == 0o700 and mode(host.folder / "invite") == 0o600
            assert mode(host.folder.parent) & 0o700 == 0o700
    finally:
        os.umask(before)


def test_a_folder_that_was_there_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o750)
    make_run_folder(tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o750


def test_the_invite_is_private_even_where_there_was_a_file_or_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "invite").symlink_to(victim)
    (folder / "run.toml").symlink_to(victim)
    with hosting(order(out="run")):
        assert victim.read_text() == "mine"
        assert mode(folder / "invite") == 0o600 and not (folder / "invite").is_symlink()
    (folder / "invite").chmod(0o644)
    with hosting(order(out="run")):
        assert mode(folder / "invite") == 0o600


def test_what_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run" / "invite").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^Cannot write run/invite: Is a directory\."), hosting(order(out="run")):
        pass


def test_a_file_appears_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two" and [path.name for path in tmp_path.iterdir()] == ["a"]


# One at a time

HOLD = """
import sys, pathlib
from potluck.save.run_folder import hold
held = hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_host_is_refused_where_another_process_trains_and_not_once_that_was_killed(tmp_path: Path) -> None:
    """The lock is the one that Trainer takes."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, "run"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=r"^Another run is using run right now\."), hosting(order(out="run")):
            pass
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]  # nothing was touched
    finally:
        process.kill()
        process.communicate()
    with hosting(order(out="run")):
        pass


def test_whoever_trains_is_refused_where_a_host_is(tmp_path: Path) -> None:
    with hosting(order(out="run")):
        with pytest.raises(ConfigError, match=r"^Another run is using .*run right now\."):
            hold(tmp_path / "run")
        with pytest.raises(ConfigError, match=r"^Another run is using run"), hosting(order(out="run")):
            pass
    hold(tmp_path / "run").close()


def test_a_trainer_is_refused_where_a_host_is(tmp_path: Path) -> None:
    """With --resume, too: what `potluck train --resume` runs."""
    model = torch.nn.Linear(2, 1)
    data = torch.ones(8, 2), torch.ones(8, 1)
    with hosting(order(out="run")):
        trainer = potluck.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            batch_size=4,
            folder="run",
        )
        for resume in (False, True):
            with pytest.raises(ConfigError, match=r"^Another run is using run right now\."):
                trainer.fit(resume=resume)
        assert not (tmp_path / "run" / "checkpoints").exists()
    trainer.fit()
    before = (tmp_path / "run" / "run.toml").read_text()
    with pytest.raises(ConfigError, match="already holds a run"), hosting(order("demo", "fit.epochs=77", out="run")):
        pass
    assert (tmp_path / "run" / "run.toml").read_text() == before


def test_a_new_run_takes_no_folder_of_a_host_that_has_not_saved_yet(tmp_path: Path) -> None:
    from potluck.train.arguments import TrainArgs
    from potluck.train.recipe import RunConfig, _run_folder

    alone: Any = SimpleNamespace(rank=0, is_restored=False)

    with hosting(order()):
        pass
    chosen = _run_folder(RunConfig(name="demo"), TrainArgs(recipe="demo"), alone)
    assert chosen == Path("runs/demo-2") and order().folder == Path("runs/demo-2")


# What a host finds again


def put_checkpoint(folder: Path, step: int) -> None:
    place = folder / "checkpoints" / f"step-{step:08d}"
    place.mkdir(parents=True)
    body: dict[str, Any] = {"format": checkpoint_folder.FORMAT, "files": {}, "step": step, "epoch": 0, "row": 4 * step}
    body |= {"rows_seen": 4 * step, "rows_in_epoch": 1000}
    (place / "manifest.json").write_text(json.dumps({"sha256": checkpoint_folder.body_sha256(body), "body": body}))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.rindex(b"workers\x00") if b"workers\x00" in data else data.rindex(b'"name"')
    data[at + 1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The folder of a host that was killed, with a journal that has a wrong bit in it."""
    folder = tmp_path / "run"
    with hosting(order(out="run")) as host:
        host.journal.keep("description", DESCRIBED.to_json())
        for step in range(1, 4):
            host.journal.record(record(step))
    damage(folder / "journal.sqlite")
    with pytest.raises(JournalError):
        Journal(folder / "journal.sqlite")
    return folder


def test_a_damaged_journal_is_set_aside_and_the_newest_checkpoint_taken(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_checkpoint(damaged, 2)
    before = Invite.parse((damaged / "invite").read_text().strip())
    with hosting(order(out="run", resume=True)) as host:
        assert host.server.core.standing.version == 2
        assert host._invite("127.0.0.1") == before  # workers find it where it was
    said = capsys.readouterr().err
    assert "is damaged (" in said and "the run continues from step-00000002." in said and "Traceback" not in said
    assert (damaged / "damaged-journal.sqlite").exists()


def test_a_damaged_journal_without_a_checkpoint_is_refused_and_stays(damaged: Path) -> None:
    with pytest.raises(JournalError, match="is damaged"), hosting(order(out="run", resume=True)):
        pass
    assert (damaged / "journal.sqlite").exists() and not (damaged / "damaged-journal.sqlite").exists()


def test_a_full_disk_under_the_journal_leaves_a_sentence_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle of a run: the step is not committed, and the host ends in order."""
    with hosting(order(out="run")) as host:
        host.journal.keep("description", DESCRIBED.to_json())
        host.journal.record(record(1))
        (pages,) = host.journal._base.execute("PRAGMA page_count").fetchone()
        host.journal._base.execute(f"PRAGMA max_page_count = {pages}")
        big = record(2, workers=({"name": "x" * 100_000},))
        monkeypatch.setitem(INPUTS, "a step", lambda core: [Record(big)])
        host.server._act("a step")
        finish = host.server.wait(30)
        assert finish is not None and finish.failed
        host._end(finish)
        assert host._summarize(finish) == 1
    said = capsys.readouterr().err
    assert said.count("database or disk is full. Free some space, then continue with --resume.") == 1
    assert "Traceback" not in said
    assert list(read_events(tmp_path / "run" / "events.jsonl"))[-1]["event"] == "run_ended"


def test_a_last_checkpoint_that_was_never_written_is_said_and_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hosting(order(out="run")) as host:
        host.server._act("saved", 3, "", "The host cannot keep it: no space", 0, False)
        assert host._summarize(Finish("finished")) == 1
    told = capsys.readouterr()
    assert "The host cannot keep it: no space. What was trained after the newest checkpoint is lost." in told.err
    assert "Saved in" not in told.out
    kinds = [event["event"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert "checkpoint_failed" in kinds


# What the receiver does for the disk


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def log_sync(descriptor: int) -> None:
        done.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def log_rename(path: Path, target: Path) -> Path:
        done.append(("rename", target.name))
        return rename(path, target)

    put_checkpoint(tmp_path / "from", 3)
    source = tmp_path / "from" / "checkpoints" / "step-00000003"
    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(Path, "rename", log_rename)
    saved: list[tuple[int, str, str, int]] = []
    receiver = CheckpointReceiver(tmp_path / "run" / "checkpoints", lambda path, reason: None)
    receiver.begin(
        3,
        json.dumps([["manifest.json", (source / "manifest.json").stat().st_size]]),
        2,
        lambda *told: saved.append(told),
    )
    receiver.feed((source / "manifest.json").read_bytes(), lambda: None)
    wait_until(lambda: bool(saved))
    assert saved[0][2] == "", saved
    named = done.index(("rename", "step-00000003"))
    before, after = [what for _, what in done[:named]], [what for _, what in done[named + 1 :]]
    assert "manifest.json" in before and before[-1].startswith(checkpoint_folder.WRITING) and "checkpoints" in after


def test_a_run_that_is_there_is_told_at_its_step_and_not_at_its_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Position(version=158, step=576, rows_seen=9216)
    monkeypatch.setattr("potluck.fleet.journal.Journal.standing", lambda journal: standing)
    with pytest.raises(ConfigError, match="already holds a run, at step 576"), hosting(order(out="run")):
        pass


def test_the_bytes_of_a_run_do_not_fall_when_its_host_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"sent": 900, "received": 100, "saved": 0}
    with hosting(order(out="run")) as host:
        monkeypatch.setattr(host.server, "now", lambda: {"bytes": told, "phase": "x"})
        host._tell_now()
    with hosting(order(out="run", resume=True)) as host:
        assert host._now()["bytes"] == told
        monkeypatch.setattr(host.server, "now", lambda: {"bytes": told, "phase": "x"})
        assert host._now() == {"bytes": {"sent": 1800, "received": 200, "saved": 0}, "phase": "x"}
