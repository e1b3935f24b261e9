"""Place: where a store keeps its bytes, and how its url is read. Knows nothing of what the bytes mean.

folder.py and bucket.py are the two there are.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from potluck.errors import StoreError
from potluck.store.objects import ObjectWriter


class Missing(Exception):
    """There is nothing of that name."""


class Exists(Exception):
    """There is something of that name already."""


class Unreachable(Exception):
    """For now: worth another try. Its text says why."""


class Source(Protocol):
    """The bytes of one object, from its beginning."""

    size: int

    def fill(self, view: memoryview) -> int:
        """How many bytes were read: fewer than the view holds only where the object ends."""
        ...


class Place(Protocol):
    """Its methods raise Missing, Exists, Unreachable, or a StoreError that says what to do."""

    first_pause_s: float
    longest_pause_s: float
    """Between two looks at what is not there yet."""

    def check(self) -> None:
        """That the place exists and lets us in."""
        ...

    def write(self, name: str, writer: ObjectWriter, *, new: bool = False) -> None:
        """All of it appears at once, or nothing. `new`: Exists if there was something; not every server can tell."""
        ...

    def read(self, name: str) -> AbstractContextManager[Source]: ...

    def names(self, under: str) -> list[str]:
        """Everything below, unfinished writes included."""
        ...

    def rooms(self, under: str) -> list[str]:
        """What is directly below, and has something below it."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """What is gone already is fine."""
        ...

    def recycle(self, names: Sequence[str]) -> None:
        """Deletes them, but may keep a few to write the next ones over."""
        ...

    def tidy(self, run: str) -> None:
        """Removes what is empty."""
        ...


_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._ =+@-]*")


def folder_of(url: str) -> Path:
    """The folder that a file:// url names."""
    path = _decoded(url, "file")
    if not path.startswith("/"):
        host, _, rest = path.partition("/")
        if host != "localhost":
            raise StoreError(f"{url!r} names a machine, {host!r}. A folder has three slashes: file:///some/folder.")
        path = f"/{rest}"
    parts = [part for part in path.split("/") if part]
    if not parts or "." in parts or ".." in parts:
        raise StoreError(f"{url!r} must name one folder, without . and .. in it: file:///some/folder.")
    return Path("/", *parts)


def bucket_of(url: str) -> tuple[str, str]:
    """The bucket and the prefix that an s3:// url names."""
    bucket, _, prefix = _decoded(url, "s3").partition("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise StoreError(f"{url!r} must begin with a bucket's name: s3://bucket/prefix.")
    parts = [part for part in prefix.split("/") if part]
    for part in parts:
        if part in (".", "..") or not _PREFIX.fullmatch(part):
            raise StoreError(
                f"{url!r} has {part!r} in its prefix. Use letters, digits, spaces and any of . _ - = + @ there."
            )
    return bucket, "/".join(parts)


def _decoded(url: str, scheme: str) -> str:
    rest = url.removeprefix(f"{scheme}://")
    if "?" in rest or "#" in rest:
        raise StoreError(f"{url!r} has a ? or a # in it. If it belongs to a name, write %3F or %23.")
    if re.search("%(?![0-9A-Fa-f]{2})", rest):
        raise StoreError(f"{url!r} has a % that is no escape. If it belongs to a name, write %25.")
    try:
        text = unquote(rest, errors="strict")
    except UnicodeDecodeError:
        raise StoreError(f"{url!r} has escapes that are no UTF-8.") from None
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise StoreError(f"{url!r} has characters in it that cannot be printed.")
    return text
