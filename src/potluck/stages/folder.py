"""Folder: a place on a file system that all workers see.

An object is written beside its place and renamed into it. Nothing is synced to the disk: objects outlive a killed
process, not a power cut, after which their checksum says that they are not whole.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.errors import StoreError
from potluck.stages.place import Exists, Missing, Unreachable

UNFINISHED = re.compile(r"\.(?P<name>[^/]+)~[0-9a-f]{8}")
"""A file that is being written, or was when its writer died."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FOR_NOW = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN, errno.EBUSY}


class Folder:
    first_pause_s = 0.0005
    longest_pause_s = 0.05

    def __init__(self, root: Path) -> None:
        self._root = root

    def check(self) -> None:
        with self._troubles():
            try:
                self._root.mkdir(exist_ok=True)
            except FileNotFoundError:
                raise StoreError(
                    f"The folder {self._root.parent} does not exist. Make or mount it, so that all workers see the same"
                    " one."
                ) from None
            except FileExistsError:
                raise StoreError(f"{self._root} is a file. The url of a store names a folder.") from None

    def write(self, name: str, parts: Sequence[memoryview], *, new: bool = False) -> None:
        path = self._root / name
        unfinished = path.with_name(f".{path.name}~{secrets.token_hex(4)}")
        with self._troubles():
            try:
                self._fill(unfinished, parts)
                _link(unfinished, path) if new else unfinished.replace(path)
            except FileNotFoundError:
                # Somebody tidied up between our two steps.
                raise Unreachable(f"{path.parent} vanished") from None
            finally:
                unfinished.unlink(missing_ok=True)

    def _fill(self, path: Path, parts: Sequence[memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            # Never the root: a share that is not mounted must not become a folder of this machine's own.
            if not self._root.is_dir():
                raise Unreachable(f"{self._root} is gone") from None
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        try:
            _write_all(descriptor, parts)
        finally:
            os.close(descriptor)

    @contextmanager
    def read(self, name: str) -> Iterator["_File"]:
        with self._troubles():
            try:
                descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise Missing(name) from None
            try:
                yield _File(descriptor)
            finally:
                os.close(descriptor)

    def names(self, under: str) -> list[str]:
        with self._troubles():
            found = os.walk(self._root / under)
            start = len(str(self._root)) + 1
            return [f"{folder[start:]}/{file}" for folder, _, files in found for file in files]

    def rooms(self, under: str) -> list[str]:
        with self._troubles():
            try:
                return [entry.name for entry in os.scandir(self._root / under) if entry.is_dir()]
            except FileNotFoundError:
                return []

    def delete(self, names: Sequence[str]) -> None:
        with self._troubles():
            for name in names:
                (self._root / name).unlink(missing_ok=True)

    def tidy(self, under: str) -> None:
        for folder, _, _ in os.walk(self._root / under, topdown=False):
            with suppress(OSError):  # somebody may be writing there
                Path(folder).rmdir()

    @contextmanager
    def _troubles(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            if error.errno in _FULL:
                raise StoreError(
                    f"{self._root} is full ({reason}). Make room there, and start this worker again; nothing is lost."
                ) from None
            if error.errno in _FORBIDDEN:
                raise StoreError(
                    f"{self._root} cannot be read and written by this worker ({reason}). Give it the right to, or name"
                    " another folder."
                ) from None
            if error.errno in _FOR_NOW:
                raise Unreachable(reason) from None
            raise StoreError(f"{self._root} cannot be used: {reason}.") from None


class _File:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            count = os.readv(self._descriptor, [view[done:]])
            if not count:
                break
            done += count
        return done


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if len(part)]
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _link(unfinished: Path, path: Path) -> None:
    """Like a rename, but Exists where there is something already."""
    try:
        path.hardlink_to(unfinished)
    except FileExistsError:
        raise Exists from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):  # a file system without links
            raise
        unfinished.replace(path)
