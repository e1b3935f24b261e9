"""Files and folders that appear whole or not at all: written aside, and renamed into their place. Imports no torch."""

import itertools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from potluck.errors import ConfigError
from potluck.system import FOR_US_ALONE, sync


@contextmanager
def written_aside(path: Path, mode: int = 0o666, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """A file that has its name once it is written, with this mode less the umask. A link is not followed.

    What was there is replaced. `durable`: it outlives a power cut from then on.
    """
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FOR_US_ALONE, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)  # first: after a power cut its name could else stand for half of it
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if durable:
        sync(path.absolute().parent)


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    with written_aside(path, mode) as file:
        file.write(text.encode())


def publish(aside: Path, place: Path) -> None:
    """Gives a folder that was written aside its name, once all of it is on the disk.

    Otherwise the name could outlive a power cut, and what it names could not.
    """
    for path in (*aside.iterdir(), aside):
        sync(path)
    aside.rename(place)
    sync(place.parent)


def make_own(folder: Path) -> None:
    """A folder that nobody else can write to: what lies there is believed, and acted on."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to somebody else. Point XDG_RUNTIME_DIR to a folder of yours.")
        folder.chmod(0o700)


def make_own_anew(root: Path, name: str) -> Path:
    """Make the folder of this process in one of its user's, without what a process of that name left there before."""
    make_own(root)
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def kept_by(root: Path, is_alive: Callable[[Path], bool]) -> list[Path]:
    """List the folders in `root` whose processes live, and clear away what killed ones have left behind."""
    folders = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if is_alive(folder):
            folders.append(folder)
            continue
        with suppress(FileNotFoundError):  # its process has just ended, and cleared it away itself
            if time.time() - folder.stat().st_mtime > 60:  # else it may be about to take its lock, or to say who it is
                shutil.rmtree(folder, ignore_errors=True)
    return folders


def table_in(data: bytes | str) -> dict[str, Any]:
    """Read a JSON object; empty where this is none: a kill may have cut it short, or it may be anybody's."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_table(path: Path, most_bytes: int) -> dict[str, Any]:
    """Read a file that holds a JSON object; empty where there is none, or it is longer."""
    try:
        with path.open("rb") as file:
            return table_in(file.read(most_bytes))
    except OSError:
        return {}


def first_free(wanted: Path, is_taken: Callable[[Path], bool]) -> Path:
    """It, or the first of wanted-2, wanted-3 and so on that is not taken."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], numbered) if not is_taken(path))
