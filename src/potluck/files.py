"""Files and folders that appear whole or not at all: written aside, and renamed into their place. Imports no torch."""

import itertools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
                os.fsync(descriptor)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if durable:
        sync(path.absolute().parent)


def write_whole(path: Path, text: str, mode: int = 0o666, *, durable: bool = False) -> None:
    with written_aside(path, mode, durable=durable) as file:
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


def first_free(wanted: Path, is_taken: Callable[[Path], bool]) -> Path:
    """It, or the first of wanted-2, wanted-3 and so on that is not taken."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], numbered) if not is_taken(path))
