"""Signals that a machine's processes get, several times and early: one request is one, and the next is another."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck import signals
from potluck.environment import IGNORED
from potluck.errors import Interrupted
from potluck.fleet.invite import INVITE, Identity
from potluck.launch.processes import StartedWorkers
from potluck.signals import on_interrupt
from potluck.system import signal_apart


@pytest.fixture
def usual() -> Iterator[list[int]]:
    """The usual effect of both is that they are noted here."""
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield noted
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._asked.clear()


def test_a_scheduler_and_its_launcher_ask_once_together(usual: list[int]) -> None:
    asked: list[bool] = []
    with on_interrupt(lambda: asked.append(True)):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert asked and not usual and signals.is_taken_back()
    signal.raise_signal(signal.SIGTERM)
    assert usual == [signal.SIGTERM]


def test_what_is_sent_again_has_its_usual_effect(usual: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    with on_interrupt(lambda: asked.append(True)):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert asked == [True] and usual == [signal.SIGINT]
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(signals, "ECHO_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        assert usual == [signal.SIGINT, signal.SIGTERM]


def test_a_worker_passes_over_what_its_parent_answers_and_can_end_what_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        """if True:
        import signal, subprocess, sys
        for name in ("SIGTERM", "SIGUSR1"):
            signal.raise_signal(signal.Signals[name])
        child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
        child.stdout.readline()
        child.terminate()
        try:
            print(child.wait(10))
        finally:
            child.kill()
        """
    )
    command = [sys.executable, "-m", "potluck.launch.worker", str(script)]
    environment = os.environ | {IGNORED: " SIGTERM SIGUSR1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_is_told_to_go_while_it_starts_goes_without_a_stack_of_frames(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(INVITE, "potluck://127.0.0.1:1/none")
    (tmp_path / "own.py").write_text("import time; time.sleep(60)")
    workers = StartedWorkers([str(tmp_path / "own.py")], dict(os.environ))
    worker = workers.start_rank(0, {})
    signal_apart(worker.process, number)  # Python has not begun to import anything of ours
    assert worker.process.wait(60) == Interrupted.exit_code
    workers.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_joiner_that_is_ended_before_it_has_reached_a_host_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        invite = Identity.load_or_make(tmp_path / "identity").invite(*silent.getsockname(), encrypted=True)
        (tmp_path / "invite").write_text(invite.line())
        command = [sys.executable, "-m", "potluck.cli", "join", "--fetch-base", str(tmp_path / "invite")]
        joiner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        reached, _ = silent.accept()
        joiner.send_signal(signal.SIGTERM)
        _, said = joiner.communicate(timeout=60)
        reached.close()
    assert joiner.returncode == Interrupted.exit_code and said == "potluck: Stopped by SIGTERM.\n"


def test_what_is_sent_while_a_program_starts_comes_once_it_can_answer() -> None:
    answer = "import signal; signal.signal(15, lambda *_: print('heard')); from potluck import signals"
    with signals.held_back():
        child = subprocess.Popen([sys.executable, "-c", f"{answer}; signals.let_through()"], stdout=-1, text=True)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=60) == ("heard\n", None) and child.returncode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_tests_that_a_shell_has_started_in_the_background_have_the_usual_signals() -> None:
    """A shell without job control has them ignore Ctrl-C, and what they start would inherit that: `make test &`."""
    ask = (
        "import signal, subprocess, sys; import tests.conftest;"
        " told = 'import signal; print(signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGQUIT))';"
        " subprocess.run([sys.executable, '-c', told])"
    )
    command = f"trap '' INT QUIT; exec {shlex.quote(sys.executable)} -c {shlex.quote(ask)}"
    root = Path(__file__).parents[2]
    done = subprocess.run(["/bin/sh", "-c", command], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"default_int_handler {signal.SIG_DFL}\n", done.stderr
