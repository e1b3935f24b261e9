"""When a worker on a person's own machine is away: hours, pauses, yielding; and how its owner finds it."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.errors import ConfigError, Interrupted
from potluck.launch import control
from potluck.launch import join as join_module
from potluck.launch.absence import (
    BUSY_S,
    FREE_S,
    Absence,
    Hours,
    ProcessorUse,
    Sample,
    Verdict,
    busy_of,
    decide_absence,
    decide_yield,
    family,
    seconds_of,
    share_of_cards,
)
from potluck.launch.control import (
    Wish,
    choose,
    control_folder,
    controlled,
    find_joiners,
    parse_length,
    pause,
    tell_length,
)
from potluck.launch.join import JoinSession, JoinTerms
from potluck.system import lock
from potluck.train.arguments import WorkersConfig
from potluck.waiting import wait_until

FRIDAY = datetime(2026, 1, 2)


@pytest.mark.parametrize(
    ("text", "clock", "is_open", "opens"),
    [
        ("22:00-07:00", "21:59", False, "Fri 22:00"),
        ("22:00-07:00", "22:00", True, ""),
        ("22:00-07:00", "06:59", True, ""),
        ("22:00-07:00", "07:00", False, "Fri 22:00"),
        ("09:00-12:00, 13:00-17:30", "12:30", False, "Fri 13:00"),
        ("09:00-12:00,13:00-17:30", "18:00", False, "Sat 09:00"),
        ("00:00-24:00", "12:00", True, ""),
        ("Sat,Sun", "12:00", False, "Sat 00:00"),
        ("Fri,22:00-23:00", "12:00", True, ""),
        ("Thu", "23:59", False, "Thu 00:00"),
    ],
)
def test_hours_open_and_close_in_local_time(text: str, clock: str, is_open: bool, opens: str) -> None:
    hours, (hour, minute) = Hours.parse(text), map(int, clock.split(":"))
    now = FRIDAY.replace(hour=hour, minute=minute, second=30)
    assert hours.is_open(now) is is_open
    assert hours.opens_at(now).strftime("%a %H:%M") == (opens or now.strftime("%a %H:%M"))


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "07:00-07:00", "24:00-00:00", "Sa", "22:00-07:00,"]
)
def test_what_are_no_hours_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="are no hours"):
        Hours.parse(text)


def test_lengths_are_read_and_said() -> None:
    assert [parse_length(text) for text in ("90s", "45min", "45m", "1.5h", "2d")] == [90, 2700, 2700, 5400, 172_800]
    assert [tell_length(s) for s in (90, 2700, 3600, 5400, 172_800)] == ["1.5 min", "45 min", "1 h", "1.5 h", "2 d"]
    for text in ("", "1", "-1h", "0h", "1e9d", "10000d", "nan h"):
        with pytest.raises(ConfigError, match="is no length of time"):
            parse_length(text)


def test_the_first_reason_to_be_away_is_told_to_both_sides() -> None:
    now = FRIDAY.replace(hour=12).timestamp()
    hours, use = Hours.parse("22:00-07:00"), Verdict(True, "the card is in use")
    nothing = Wish(False)
    assert decide_absence(nothing, None, None, now) is None
    assert decide_absence(nothing, Hours.parse("09:00-17:00"), Verdict(False, ""), now) is None
    paused = decide_absence(Wish(True, now + 3600, 3600.0), hours, use, now)
    assert paused is not None and paused.reason == "paused by its owner for 1 h"
    assert paused.sentence == "Paused for 1 h, until 13:00; potluck resume ends it sooner."
    for days, until in ((1, "Sat 12:00"), (6, "Thu 12:00"), (7, "Fri 2026-01-09 12:00")):
        paused = decide_absence(Wish(True, FRIDAY.replace(day=2 + days, hour=12).timestamp()), hours, use, now)
        assert paused is not None and f"until {until};" in paused.sentence
    forever = decide_absence(Wish(True), hours, use, now)
    assert forever is not None and forever.sentence == "Paused until potluck resume."
    closed = decide_absence(Wish(True, now - 1, 3600.0), hours, use, now)
    assert closed is not None and closed.sentence == "Outside of its hours (22:00-07:00), until 22:00."
    yields = decide_absence(nothing, None, use, now)
    assert yields is not None and yields.reason == "yields its machine, which others use"


def samples(*shares: float, every_s: float = 2.0) -> list[Sample]:
    return [Sample(number * every_s, share, "the card") for number, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "is_away", "yields"),
    [
        ([], False, False),
        ([], True, True),
        ([1.0], False, False),  # too short
        ([0.0, 0.9, 0.9, 0.9], False, True),
        ([0.9, 0.9, 0.2, 0.9], False, False),  # a short rest
        ([0.5] * 3 + [0.0], False, False),
        ([0.3] * 10, False, True),
        ([0.2] * 10, False, False),  # neither in use nor free: as it is
        ([0.2] * 60, True, True),
        ([0.0] * 10, True, True),  # not for long enough yet
        ([0.0] * 31, True, False),
        ([0.9] + [0.0] * 31, True, False),
        ([0.0] * 20 + [0.5] + [0.0] * 12, True, True),
    ],
)
def test_it_yields_after_seconds_of_use_and_comes_back_after_a_minute_without(
    shares: list[float], is_away: bool, yields: bool
) -> None:
    assert BUSY_S == 6 and FREE_S == 60
    assert decide_yield(samples(*shares), is_away=is_away).yields is yields


def test_why_it_yields_is_a_sentence() -> None:
    away = decide_yield(samples(0.4, 0.9, 0.8, 0.5), is_away=False)
    assert away.reason == "the card is in use by others, who have used 50% of it or more for 6 s"
    back = decide_yield(samples(*[0.05] * 31), is_away=True)
    assert back == Verdict(False, "the card is free: others have used 5% at most for 60 s")


def test_a_card_is_in_use_by_whoever_holds_much_of_it_or_computes_while_we_are_away() -> None:
    seen = "GPU-a, 97, 30000\nGPU-b, 3, 200\n"
    held = "GPU-a, 10, 30000\nGPU-b, 20, 200\n"
    assert share_of_cards(seen, held, ours={10}) == 0.0  # the load is our own
    assert share_of_cards(seen, held, ours={20}) == 1.0
    assert share_of_cards("GPU-b, 42, 200\n", "", ours=()) == 0.42  # a desktop that plays a film
    assert share_of_cards("GPU-b, 0, 4000\n", "", ours=()) == 1.0  # in a container no process is named
    assert share_of_cards("GPU-b, [N/A], [N/A]\nrubbish\n", "a,b\n", ours=()) == 0.0


def test_seconds_that_no_process_used_are_not_counted() -> None:
    seen = SimpleNamespace(user=10, nice=1, system=5, idle=1000, iowait=50, irq=2, softirq=3, steal=99, guest=0)
    assert busy_of(seen) == 21
    assert busy_of(SimpleNamespace(user=10, nice=1, system=5, idle=1000)) == 16  # as other systems have it


def test_a_busy_process_of_somebody_else_is_seen_and_one_of_ours_is_not() -> None:
    """On the real processor, which may have more to do besides."""
    burn = [sys.executable, "-c", "while True: pass"]
    busy = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({burn!r})"])
    try:
        assert wait_until(lambda: len(family([busy.pid])) > 1, 20)
        both = family([busy.pid])
        burner = max(both - {busy.pid})
        theirs, ours = ProcessorUse(cores=1000), ProcessorUse(cores=1000)  # no share is cut off at the whole
        assert theirs.look(began := time.monotonic(), ()) is None and ours.look(began, both) is None
        before = seconds_of(burner) or 0
        assert wait_until(lambda: (seconds_of(burner) or 0) - before >= 0.5, 60)
        with_it, without = theirs.look(now := time.monotonic(), ()), ours.look(now, both)
        assert with_it is not None and without is not None
        assert (with_it.share - without.share) * 1000 * (now - began) >= 0.45
    finally:
        for pid in family([busy.pid]):
            os.kill(pid, 9)
        busy.wait()


# How it is found


def test_a_joiner_is_found_by_its_user_alone_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="No worker of yours has joined a run from this machine"):
        choose(find_joiners(), None, "pause")
    with controlled("laptop-1", "host port 1") as one:
        one.tell("working", "It works.")
        assert (
            (control_folder() / "laptop-1").stat().st_mode & 0o777 == control_folder().stat().st_mode & 0o777 == 0o700
        )
        (found,) = choose(find_joiners(), None, "pause")
        assert found.name == "laptop-1" and found.state().sentence == "It works."
        assert one.wish() == Wish(False)
        found.ask(Wish(True, 10.0, 5.0))
        assert one.wish() == Wish(True, 10.0, 5.0)
        with controlled("laptop-2", "host port 2"):
            with pytest.raises(
                ConfigError, match=r"Say which: .*There are:\n  laptop-1  host port 1: It works\.\n  lap"
            ):
                choose(find_joiners(), None, "pause")
            assert len(choose(find_joiners(), "all", "pause")) == 2
            with pytest.raises(ConfigError, match="is called 'desktop'"):
                choose(find_joiners(), "desktop", "pause")
    assert find_joiners() == []


def test_a_joiner_begins_also_while_somebody_looks_for_joiners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    begun, place = threading.Event(), control_folder() / "laptop-1" / "lock"
    usual_open = Path.open

    def open_late(path: Path, *args: Any, **named: Any) -> Any:
        """Between a joiner's opening its lock and its taking it, somebody else has it."""
        file = usual_open(path, *args, **named)
        if path == place and not begun.is_set():
            begun.set()
            lock(other := usual_open(path))
            threading.Timer(0.05, other.close).start()
        return file

    monkeypatch.setattr(Path, "open", open_late)
    with controlled("laptop-1", "") as one:
        assert begun.is_set()
        assert [found.name for found in find_joiners()] == ["laptop-1"] == [one.name]


def test_all_are_told_to_pause_at_once_and_one_that_is_away_says_until_when_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with controlled("laptop-1", "") as one, controlled("laptop-2", "") as two:
        one.tell("working", "It works.")
        two.tell("paused", "Paused for 1 h.")

        def answer() -> None:
            assert wait_until(lambda: two.wish().pauses, 20.0)
            two.tell("paused", "Paused for 2 h.")
            one.tell("paused", "Away.")  # only once the other was told, too

        answering = threading.Thread(target=answer)
        answering.start()
        assert pause("all", "2h") == 0
        answering.join(20)
    said = capsys.readouterr().err
    assert "laptop-1: Away." in said and "laptop-2: Paused for 2 h." in said


def test_one_that_is_away_says_why_once_however_the_use_of_others_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    looks = iter([Absence("yields", f"Yields: {use} %.") for use in (30, 40, 50)])
    with controlled("laptop-1", "") as one:
        session = JoinSession(WorkersConfig(count=1), JoinTerms(), one, ["laptop-1"])
        monkeypatch.setattr(session, "_find_absence", lambda ours: next(looks, None))
        assert session._await_turn()
        assert find_joiners()[0].state().doing == "working"
    assert capsys.readouterr().err.splitlines() == ["potluck: Yields: 30 %.", "potluck: Back: joining again."]


def test_workers_know_whether_their_machine_was_away_and_how_patient_the_host_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a file: as one that never was in waits for its hours, and as one that was in is paused."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told: list[str | None] = []

    class Pool:
        pids: tuple[int, ...] = ()

        def __init__(self, command: list[str], config: WorkersConfig, environment: dict[str, str]) -> None:
            self.kept = Path(environment["POTLUCK_RETURNING"])

        def start(self, names: list[str]) -> None:
            told.append(self.kept.read_text() if self.kept.exists() else None)

        def interrupt(self) -> None:
            self.kept.write_text("12.0")  # its worker was in, and leaves

        def news(self) -> list[tuple[Any, str]]:
            return [(SimpleNamespace(code=Interrupted.exit_code if absent else 0), "")]

        def close(self) -> None:
            pass

    for script, expected in [
        ([None, "away", "away", None], [None, "12.0"]),
        (["away", None, "away", "away", None], ["30.0", "12.0"]),
    ]:
        told.clear()
        folder = tmp_path / str(len(script))
        folder.mkdir()
        absent = False

        def look(ours: Any, looks: Iterator[str | None] = iter(script)) -> Absence | None:
            nonlocal absent
            found = next(looks, None)
            absent = found is not None
            return Absence(found, f"{found}.") if found is not None else None

        with controlled("laptop-1", "") as one:
            session = JoinSession(WorkersConfig(count=1), JoinTerms(), one, ["laptop-1"])
            monkeypatch.setattr(session, "_find_absence", look)
            monkeypatch.setattr(join_module, "WorkerPool", Pool)
            assert session.run(["x"], {}, folder) == 0
        assert told == expected


def test_where_files_cannot_be_locked_a_worker_joins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(control, "lock", refuse)  # as NFS without a lock daemon
    with controlled("laptop-1", "") as one:
        assert find_joiners() == [] and one.wish() == Wish(False)
    assert "potluck pause will not find this worker" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pauses": 1, "until": "soon"}', "x" * 100_000])
def test_a_wish_that_cannot_be_read_is_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with controlled("laptop-1", "") as one:
        (one.folder / "wish.json").write_text(text)
        assert one.wish() == Wish(False)


def test_where_no_folder_can_be_written_a_worker_joins_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "potluck").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with controlled("laptop-1", "") as one:
        one.tell("working", "It works.")
        assert one.wish() == Wish(False)
    assert "potluck pause will not find this worker" in capsys.readouterr().err
