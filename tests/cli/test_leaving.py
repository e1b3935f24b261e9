"""Machines that are wanted back, by their owner or their cloud: SIGTERM, a notice, potluck pause. Nothing is lost."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from potluck.launch.control import find_joiners
from potluck.launch.notices import ADDRESS
from tests.cli import test_cli
from tests.cli.test_cli import POTLUCK, RECIPE, children, steps, wait_until
from tests.cli.test_host import NODES, TEXT, assert_same, events, invite_of, weights
from tests.unit.test_notices import service

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
LONG = ("--set", "fit.max_steps=300", "--set", "fit.epochs=20", "--set", "workers.threads=1")


def make(folder: Path) -> Path:
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "text").write_text("".join(f"word{i % 97} and{i % 13}\n" for i in range(900))[:10_000])
    return folder


STARTED: list[subprocess.Popen[str]] = []


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    STARTED.append(test_cli.start(place, *arguments))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    for process in STARTED:
        process.kill()  # its workers end with it
    STARTED.clear()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return make(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = make(tmp_path_factory.mktemp("alone"))
    done = subprocess.run([*POTLUCK, "host", "tiny.toml", *LONG], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "Finished 300 steps" in done.stdout, done.stderr
    return weights(folder / "runs" / "tiny")


def join(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return start(place, "join", "--threads", "1", *TEXT, *arguments)


def told(run: Path, kind: str, name: str = "") -> list[dict[str, object]]:
    return [r for r in events(run) if r["event"] == kind and name in str(r["name"])]


def order(place: Path, *arguments: str) -> str:
    done = subprocess.run([*POTLUCK, *arguments], cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_pause_and_a_machine_taken_back_change_no_bit(place: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """One joiner pauses and comes back; then the whole machine of another gets SIGTERM, its worker too."""
    host = start(place, "host", "tiny.toml", "-n", "0", "--at-least", "2", *LONG)
    run = place / "runs" / "tiny"
    owner, spot = join(place, invite_of(run)), join(place, invite_of(run))
    wait_until(lambda: len(steps(run)) >= 5)
    said = order(place, "pause", f"{os.uname().nodename}-{owner.pid}", "--for", "1h")
    assert "Paused for 1 h, until" in said
    assert not children(owner.pid)  # whatever they held of a card is free
    wait_until(lambda: bool(told(run, "worker_went", str(owner.pid))))
    (went,) = told(run, "worker_went", str(owner.pid))
    assert went["polite"] and went["reason"] == "paused by its owner for 1 h"
    assert "It works." in order(place, "resume", f"{os.uname().nodename}-{owner.pid}")
    wait_until(lambda: len(told(run, "worker_came", str(owner.pid))) == 2)
    for pid in (spot.pid, *children(spot.pid)):
        os.kill(pid, signal.SIGTERM)
    _, error = spot.communicate(timeout=60)
    assert spot.returncode == 130 and "This machine is taken back in about 25 s (SIGTERM): leaving" in error, error
    assert "it continues without this worker" in error
    (went,) = told(run, "worker_went", str(spot.pid))
    assert went["polite"] and went["reason"] == "its machine is taken back (SIGTERM)"
    out, error = host.communicate(timeout=120)
    _, other = owner.communicate(timeout=30)
    assert host.returncode == 0 and owner.returncode == 0, (out, error, other)
    assert "Back: joining again." in other and "Traceback" not in error + other
    assert_same(weights(run), undisturbed)
    assert all(r["polite"] for r in told(run, "worker_went"))
    assert len(steps(run)) == len(set(steps(run))) == 300  # none was taken again
    assert not list((place / "runtime" / "potluck" / "workers").iterdir())


def test_the_only_worker_pauses_and_the_run_waits_for_it(place: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    host = start(place, "host", "tiny.toml", "-n", "0", *LONG)
    run = place / "runs" / "tiny"
    owner = join(place, "-n", "2", invite_of(run))
    wait_until(lambda: len(steps(run)) >= 5 and len(told(run, "worker_came")) == 2)
    assert "Paused until potluck resume." in order(place, "pause")
    assert not children(owner.pid)
    wait_until(lambda: len(told(run, "worker_went")) == 2)
    before = len(steps(run))
    assert before < 300
    order(place, "resume")
    out, error = host.communicate(timeout=120)
    assert host.returncode == 0 and owner.wait(30) == 0, (out, error)
    assert_same(weights(run), undisturbed)
    assert len(steps(run)) == len(set(steps(run))) == 300


def test_a_clouds_notice_makes_a_worker_of_several_ranks_leave_in_time(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Cadence, with replicas split over two ranks: each sample is still used exactly once."""
    (place / "nodes.toml").write_text(NODES)
    run, is_taken = place / "run", False

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        return 200, "TRUE" if is_taken else "FALSE"

    host = start(place, "host", "nodes.toml", "--set", "fit.epochs=1000", "--threads", "1", "--out", "run")
    with service(answer, monkeypatch):
        assert os.environ[ADDRESS].startswith("127.0.0.1:")
        spot = join(place, "--watch", "gcp", invite_of(run))
        wait_until(lambda: bool(told(run, "worker_came", str(spot.pid))))
        before = len(steps(run))
        wait_until(lambda: len(steps(run)) > before + 4)
        assert len(children(spot.pid)) == 2
        is_taken = True
        _, error = spot.communicate(timeout=60)
    assert spot.returncode == 130 and "taken back in about 30 s (Google Cloud): leaving" in error, error
    (went,) = told(run, "worker_went", str(spot.pid))
    assert went["polite"] and went["reason"] == "its machine is taken back (Google Cloud)"
    ended = len([r for r in events(run) if r["event"] == "epoch_done"])
    wait_until(lambda: len([r for r in events(run) if r["event"] == "epoch_done"]) >= ended + 1)
    host.send_signal(signal.SIGINT)
    host.communicate(timeout=60)
    assert all(r["used"] == r["total"] for r in events(run) if r["event"] == "epoch_done")


def test_a_host_and_its_workers_that_all_get_sigterm_save_and_a_requeue_goes_on(
    place: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    host = start(place, "host", "tiny.toml", "-n", "2", *LONG)
    run = place / "runs" / "tiny"
    wait_until(lambda: len(steps(run)) >= 5)
    for pid in (host.pid, *children(host.pid)):
        os.kill(pid, signal.SIGTERM)
    _, error = host.communicate(timeout=60)
    done = len(steps(run))
    assert host.returncode == 130 and f"Stopped after step {done}. Saved in" in error, error
    again = subprocess.run(
        [*POTLUCK, "host", str(run / "run.toml"), "--out", str(run), "--resume"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 0, again.stderr
    assert_same(weights(run), undisturbed)
    assert len(steps(run)) == len(set(steps(run))) == 300


def test_sigterm_to_all_in_the_middle_of_a_window_saves_what_was_agreed_on(place: Path) -> None:
    """Both workers stop within their windows, and neither can do the other's rest."""
    recipe = RECIPE.replace('kind = "sync"\nbalance = false', 'kind = "cadence"\nanchor = 20\nmax_anchor = 20')
    (place / "long.toml").write_text(recipe.replace("every = 5", "every = 100000"))
    host = start(place, "host", "long.toml", "-n", "2", "--at-least", "2", "--threads", "1", "--set", "fit.epochs=50")
    run = place / "runs" / "tiny"
    wait_until(lambda: len(steps(run)) >= 3)
    for pid in (host.pid, *children(host.pid)):
        os.kill(pid, signal.SIGTERM)
    _, error = host.communicate(timeout=60)
    done = max(steps(run))
    assert host.returncode == 130 and f"Stopped after step {done}. Saved in" in error, error
    assert "Traceback" not in error and len(steps(run)) == len(set(steps(run)))


def test_outside_of_its_hours_a_worker_waits_and_ctrl_c_ends_it(place: Path) -> None:
    """The hour that is open is the one that is twelve hours away."""
    host = start(place, "host", "tiny.toml", "-n", "0", *LONG)
    run = place / "runs" / "tiny"
    line = invite_of(run)
    hour = (int(subprocess.check_output(["date", "+%H"])) + 12) % 24
    owner = join(place, "--hours", f"{hour:02d}:00-{hour:02d}:30", line)
    found = place / "runtime" / "potluck" / "workers"
    wait_until(lambda: found.is_dir() and any(found.iterdir()))
    assert "Outside of its hours" in order(place, "pause") + order(place, "resume")
    owner.send_signal(signal.SIGINT)
    _, error = owner.communicate(timeout=30)
    assert owner.returncode == 130 and "Ended while it was away." in error, error
    assert not told(run, "worker_came")
    host.send_signal(signal.SIGINT)
    host.communicate(timeout=30)


def test_a_worker_that_yields_goes_while_others_use_the_processor(place: Path) -> None:
    """Whatever else runs here counts too, so it may go before it has come."""
    host = start(place, "host", "tiny.toml", "-n", "0", "--set", "fit.epochs=1000", "--threads", "1")
    burn = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(burn) for _ in range(os.cpu_count() or 1)]
    try:
        owner = join(place, "--yield", invite_of(place / "runs" / "tiny"))

        def is_away() -> bool:
            return any(joiner.state().doing == "paused" for joiner in find_joiners())

        wait_until(is_away, 90)
        (found,) = find_joiners()
        assert re.match(r"Yields: the processor of this machine is in use by others, who", found.state().sentence)
        assert not children(owner.pid)
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert all(r["polite"] for r in told(place / "runs" / "tiny", "worker_went"))
    owner.send_signal(signal.SIGINT)
    assert owner.wait(30) == 130
    host.send_signal(signal.SIGINT)
    host.communicate(timeout=30)
