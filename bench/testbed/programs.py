"""Programs of the system (ip, tc, nsenter, nvidia-cuda-mps-control): found, run, and their complaints as one sentence.

Whatever a testbed starts carries its mark in the environment, by which the reaper finds it.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

MARK = "TESTBED"
SBIN = "/usr/sbin:/sbin"
"""Where the system's programs are, though root's PATH may not say so."""
PROGRAM_S = 20.0
"""None of them takes longer than that."""


class TestbedError(Exception):
    """A testbed cannot be had here; the sentence says what is missing and what to do."""


def find(program: str, package: str) -> str:
    found = shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{SBIN}")
    if found is None:
        raise TestbedError(f"The program `{program}` is not installed here: install {package}.")
    return found


def run(command: list[str], mark: str, *, text: str = "", env: Mapping[str, str] | None = None) -> str:
    """What it printed. `text` is its standard input."""
    # Into a file: a daemon that it leaves behind would hold a pipe open, and we would wait for the pipe's end.
    with tempfile.TemporaryFile("w+") as printed:
        try:
            code = subprocess.run(
                command,
                input=text,
                env={**os.environ, **(env or {}), MARK: mark},
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PROGRAM_S,
            ).returncode
        except subprocess.TimeoutExpired:
            raise TestbedError(f"`{' '.join(command)}` did not end within {PROGRAM_S:g} s.") from None
        printed.seek(0)
        words = printed.read()
    if code:
        raise TestbedError(f"`{' '.join(command)}` failed: {' '.join(words.split()) or f'exit code {code}'}.")
    return words


def marked(mark: str) -> list[int]:
    """The processes that carry this mark; those that have ended and only wait to be heard have no environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # it has ended, or it is not ours
                continue
            if wanted in environment.split(b"\0"):
                found.append(int(folder.name))
    return found
