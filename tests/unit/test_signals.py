"""Signals that a machine's processes get, several times and early: one request is one, and the next is another."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck import signals
from potluck.environment import IGNORED
from potluck.signals import on_interrupt


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
