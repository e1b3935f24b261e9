"""The children of `potluck demo fleet`: commands as a person would type them, whose words go to files.

Starts, watches and kills them, and knows nothing of the story. Imports no torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from potluck.errors import PotluckError
from potluck.system import HAS_GROUPS
from potluck.waiting import wait_until

GRACE_S = 5.0
"""How long each has to end by itself, when all are asked to."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Keeps children off the GPU: so small a model is trained sooner without one than one is woken."""
LAST_LINES = 12
"""How many lines of a child that failed are shown."""


class ChildFailed(PotluckError):
    """A child failed: its last words are in the sentence."""


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    is_doomed: bool = False
    """We have killed it, so that its end is none of its own."""

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def check(self) -> None:
        """ChildFailed, if it has failed by itself."""
        if not self.is_doomed and self.process.poll():
            raise self.failure()

    def failure(self) -> ChildFailed:
        words = self.words()
        said = f" The last it said, in {self.log}:\n{words}" if words else f" It said nothing ({self.log})."
        return ChildFailed(f"{self.name} stopped with exit code {self.process.returncode}.{said}")

    def words(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(f"  {line}" for line in text.strip().splitlines()[-LAST_LINES:])

    def kill(self) -> float:
        """-9: what computes first, then what has started it, before either can say a word. Returns when."""
        self.is_doomed = True
        computing = _started_by(self.process)
        at = time.time()
        _kill(computing)
        self.process.kill()
        self.process.wait()
        return at


class Children:
    """Each in a session of its own: Ctrl-C reaches us, and we end them. Leaving the context ends all of them."""

    def __init__(self, logs: Path, temporary: Path) -> None:
        self.logs, self._temporary = logs, temporary
        self._all: list[Child] = []

    def start(self, name: str, *arguments: str) -> Child:
        log = self.logs / f"{name.replace(' ', '-')}.log"
        # What a killed process leaves in its temporary folder goes with ours.
        environment = os.environ | ON_CPU | {"TMPDIR": str(self._temporary), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "potluck.cli", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=HAS_GROUPS,
            )
        child = Child(name, process, log)
        self._all.append(child)
        return child

    def check(self) -> None:
        for child in self._all:
            child.check()

    def have_ended(self) -> bool:
        return all(child.has_ended for child in self._all)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *exception: object) -> None:
        """Politely first: a worker that leaves, or a host that saves, ends its own. Another Ctrl-C ends all now."""
        living = [child for child in self._all if not child.has_ended]
        computing = [process for child in living for process in _started_by(child.process)]
        try:
            for child in living:
                child.is_doomed = True
                child.process.send_signal(signal.SIGTERM)
            wait_until(self.have_ended, GRACE_S)
        finally:
            for child in living:
                child.process.kill()
                child.process.wait()
            _kill(computing)


def _started_by(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(process.pid).children())
    return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended; psutil knows if its number is another's by now
            process.kill()
