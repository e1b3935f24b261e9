"""Folder: a place on a file system that all workers see.

An object is written beside its place and renamed into it. Nothing is synced to the disk: objects outlive a killed
process, not a power cut, after which their checksum says that they are not whole. A few files of consumed objects are
kept as spares, and new objects of their size written over them: that saves the system from freeing and finding the
same memory over and over, which takes longer than to fill it.

Others may have a right to write there. So no link is followed, and nothing is written over but a plain file of our own
that has no other name: else somebody could have us overwrite any file of ours.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.errors import StoreError
from potluck.store.place import HEAD_BYTES, Exists, Missing, ObjectWriter, Unreachable
from potluck.system import FOR_US_ALONE

UNFINISHED = re.compile(r"\.(?P<name>[^/]+)~[0-9a-f]{8}")
"""A file that is being written, or was when its writer died; or one that waits to be written over."""
_SPARE = ".spare-"
SPARES, SPARES_BYTES = 32, 1 << 28
"""Files that are kept to be written over, in each folder: at most this many, and this many bytes together."""
SPARE_BYTES = 1 << 20
"""Smaller ones are not worth it."""
_MODE = 0o664
"""Mode of a file, less the umask: never for everybody to write."""
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | FOR_US_ALONE
"""A link is refused, and a named pipe does not make us wait for its other end."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FOR_NOW = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN, errno.EBUSY}


class Folder:
    first_pause_s = 0.0005
    longest_pause_s = 0.05

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def check(self) -> None:
        with self._troubles():
            try:
                Path(self._root).mkdir(mode=0o770, exist_ok=True)
            except FileNotFoundError:
                raise StoreError(
                    f"The folder {Path(self._root).parent} does not exist. Make or mount it, so that all workers see"
                    " the same one."
                ) from None
            except FileExistsError:
                raise StoreError(f"{self._root} is a file. The url of a store names a folder.") from None

    def write(self, name: str, writer: ObjectWriter, *, new: bool = False) -> None:
        folder, _, last = name.rpartition("/")
        path, unfinished = f"{self._root}/{name}", f"{self._root}/{folder}/.{last}~{secrets.token_hex(4)}"
        with self._troubles():
            try:
                self._fill(unfinished, writer)
                _link(unfinished, path) if new else os.replace(unfinished, path)
            except BaseException as error:
                with suppress(OSError):  # it may not exist yet; and the error that brought us here is the one to tell
                    os.unlink(unfinished)
                if isinstance(error, FileNotFoundError):  # somebody tidied up between our two steps
                    raise Unreachable(f"{folder} vanished") from None
                raise

    def _fill(self, path: str, writer: ObjectWriter) -> None:
        descriptor = self._open_spare(path, writer.size)
        if descriptor is None:
            descriptor = self._open_new(path)
        try:
            _write_all(descriptor, writer)
        finally:
            os.close(descriptor)

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FOR_US_ALONE
        with suppress(FileNotFoundError):  # the folder is missing, and is made below
            return os.open(path, flags, _MODE)
        # Never the root: a share that is not mounted must not become a folder of this machine's own.
        if not Path(self._root).is_dir():
            raise Unreachable(f"{self._root} is gone")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, _MODE)

    def _open_spare(self, path: str, size: int) -> int | None:
        """A file of exactly that size, which now has that name; none if there is none that we may write."""
        if size < SPARE_BYTES:
            return None
        folder = path.rpartition("/")[0]
        with suppress(OSError):  # a spare only saves time: without one a new file is written
            for spare in _spares(folder, size):
                with suppress(FileNotFoundError):  # another thread or worker was faster
                    # Renamed before it is opened: two that take the same spare would write into one file.
                    os.rename(f"{folder}/{spare}", path)
                    descriptor = os.open(path, os.O_WRONLY | _AS_IT_IS)
                    found = os.fstat(descriptor)
                    if _is_ours(found) and found.st_size == size:
                        return descriptor
                    os.close(descriptor)
                    os.unlink(path)
        with suppress(OSError):  # mostly it was never there
            os.unlink(path)
        return None

    @contextmanager
    def read(self, name: str) -> Iterator["_File"]:
        with self._troubles():
            try:
                descriptor = os.open(f"{self._root}/{name}", os.O_RDONLY | _AS_IT_IS)
            except (FileNotFoundError, NotADirectoryError):
                raise Missing(name) from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise self._strange(name) from None
                raise
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise self._strange(name)
                yield _File(descriptor)
            finally:
                os.close(descriptor)

    def names(self, under: str) -> list[str]:
        with self._troubles():
            found = os.walk(f"{self._root}/{under}")
            start = len(self._root) + 1
            return [f"{folder[start:]}/{file}" for folder, _, files in found for file in files]

    def rooms(self, under: str) -> list[str]:
        with self._troubles():
            try:
                return [
                    entry.name for entry in os.scandir(f"{self._root}/{under}") if entry.is_dir(follow_symlinks=False)
                ]
            except FileNotFoundError:  # nothing was put there yet
                return []

    def delete(self, names: Sequence[str], *, recycle: bool = False) -> None:
        with self._troubles():
            for name in names:
                path = f"{self._root}/{name}"
                with suppress(FileNotFoundError):  # another worker was faster: gone is what we wanted
                    if recycle and (spare := _place_of_spare(path)) is not None:
                        os.rename(path, spare)
                    else:
                        os.unlink(path)

    def tidy(self, run: str) -> None:
        for folder, _, _ in os.walk(f"{self._root}/{run}", topdown=False):
            with suppress(OSError):  # somebody may be writing there
                Path(folder).rmdir()

    def _strange(self, name: str) -> StoreError:
        return StoreError(
            f"{self._root}/{name} is no plain file: no worker has put it there. See who may write to that folder, and"
            " remove it."
        )

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


def _is_ours(found: os.stat_result) -> bool:
    """A plain file that we own and that has no other name."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _place_of_spare(path: str) -> str | None:
    """Return the name under which a file is kept to be written over; None if it is not worth it, or not ours."""
    folder, found = path.rpartition("/")[0], os.lstat(path)
    size = found.st_size
    if size < SPARE_BYTES or not _is_ours(found) or len(_spares(folder)) >= min(SPARES, SPARES_BYTES // size):
        return None
    return f"{folder}/{_SPARE}{size}~{secrets.token_hex(4)}"


def _spares(folder: str, size: int | None = None) -> list[str]:
    """List the spare files. They look like unfinished ones, so they are cleared together with a folder."""
    start = _SPARE if size is None else f"{_SPARE}{size}~"
    return [name for name in os.listdir(folder) if name.startswith(start)]


def _write_all(descriptor: int, writer: ObjectWriter) -> None:
    """The first chunk last, together with the head, which holds the checksum of everything."""
    digest, chunks = writer.digest(), writer.chunks()
    first, at = next(chunks, memoryview(b"")), HEAD_BYTES
    digest.update(first)
    at += len(first)
    for chunk in chunks:
        digest.update(chunk)
        _write_at(descriptor, [chunk], at)
        at += len(chunk)
    _write_at(descriptor, [memoryview(writer.head(digest.digest())), first], 0)


def _write_at(descriptor: int, parts: list[memoryview], at: int) -> None:
    while parts:
        count = os.pwritev(descriptor, parts, at)
        at += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = parts[0][count:]


def _link(unfinished: str, path: str) -> None:
    """Like a rename, but Exists where there is something already."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise Exists from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):  # a file system without links
            raise
        os.replace(unfinished, path)
    else:
        os.unlink(unfinished)
