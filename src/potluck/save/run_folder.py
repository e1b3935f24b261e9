"""The run folder: what it may be called, who may look into it, and that one run at a time is in it. Imports no torch.

It is made for its owner alone, since checkpoints, events and recipes tell what is trained, and on what. A folder that
was there before keeps the permissions that somebody gave it.
"""

import os
import shutil
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import IO

from potluck.account import know
from potluck.environment import PAGE_POINTER
from potluck.errors import ConfigError
from potluck.files import write_whole
from potluck.system import lock
from potluck.words import size

LONGEST_NAME_BYTES = 200
"""File systems take 255; a number may follow."""


def name_fault(name: object) -> str:
    """Why this is no name for a run, to follow `name`; empty if it is one."""
    if not isinstance(name, str) or not name.strip() or name.startswith(".") or "/" in name or "\\" in name:
        return f"must be a plain word for a folder, not {name!a}"
    if any(unicodedata.category(letter)[0] == "C" for letter in name):
        return f"must have no control characters, not {name!a}"
    if len(name.encode()) > LONGEST_NAME_BYTES:
        return f"must be no longer than {LONGEST_NAME_BYTES} bytes, not {len(name.encode()):,}"
    return ""


def holds_run(folder: Path) -> bool:
    return (folder / "journal.sqlite").exists() or (folder / "checkpoints").exists()


def make_private(folder: Path) -> None:
    """Make a folder for its owner alone, unless it is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_run_folder(folder: Path) -> None:
    """Seen to be writable before anything is computed."""
    try:
        make_private(folder)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"potluck")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"Cannot write to the run folder {folder}: {error.strerror}. Choose another with --out."
        ) from None


def point_page_to(folder: Path) -> None:
    """Tell a page the run folder, if it was started before anybody knew which it would be."""
    if (pointer := os.environ.get(PAGE_POINTER)) is not None:
        with suppress(OSError):  # the page is gone, and nobody looks
            write_whole(Path(pointer), str(folder.absolute()))


def check_room(folder: Path, needed_bytes: int) -> None:
    """Check, before anything is computed, that the disk has room for one checkpoint."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ConfigError(
            f"The run folder {folder} has {size(free)} left, and one checkpoint takes about {size(needed_bytes)}."
            " Free some space, or choose another with --out."
        )


def hold(folder: Path, name: str = ".lock") -> IO[bytes]:
    """Held while the run lives, whatever leads it; the system lets go of it however the run ends.

    Two runs in one folder would remove each other's checkpoints.
    """
    try:
        file = (folder / name).open("ab")
    except OSError as error:
        raise ConfigError(f"Cannot write to the run folder {folder}: {error.strerror}.") from None
    try:
        lock(file)
    except OSError:
        file.close()
        raise ConfigError(
            f"Another run is using {folder} right now. Wait for it, join it if it has a host, or name another folder"
            " with --out."
        ) from None
    know(run=str(folder.resolve()))
    return file
