"""Place: where a store keeps its objects, and how its url is read; folder.py and bucket.py are the two there are.

An object is a head of fixed size that says whose it is, and bytes, with one checksum of both. What the bytes mean is
not known here.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

import xxhash

from potluck.errors import StoreError

HEAD_BYTES = 512
"""Fixed, so that a reader knows with one small read how much memory to take, and where the payload begins."""
CHUNK_BYTES = 1 << 20
VERSION = 1
_MAGIC = b"potluck\x00"
_FIXED = struct.Struct("<8sHHIQQ16s")
_CHECKSUM_AT = _FIXED.size - 16
MOST_WORDS_BYTES = HEAD_BYTES - _FIXED.size
"""A name and what is said about the payload, together."""


class Damaged(Exception):
    """Cut short, altered, or none of ours. Its text says which."""


@dataclass(frozen=True, slots=True)
class Head:
    name: str
    """Where the object belongs: run and generation included, so that one in another's place is found out."""
    generation: int
    about: bytes
    """Bytes for the reader of the payload."""
    payload_bytes: int
    checksum: bytes
    raw: bytes

    @staticmethod
    def read(raw: bytes, object_bytes: int) -> "Head":
        """Read a head from bytes that came from outside; nothing that they say is believed before it is checked."""
        if len(raw) < HEAD_BYTES:
            raise Damaged(f"it has only {len(raw)} bytes")
        magic, version, name_bytes, about_bytes, generation, payload_bytes, checksum = _FIXED.unpack_from(raw)
        if magic != _MAGIC:
            raise Damaged("it was not written by Potluck")
        if version != VERSION:
            raise Damaged(f"it is of version {version}, and we know version {VERSION}")
        if name_bytes + about_bytes > MOST_WORDS_BYTES or payload_bytes > LIMIT_BYTES:
            raise Damaged("its head has sizes that no object has")
        if object_bytes != HEAD_BYTES + payload_bytes:
            raise Damaged(f"it has {object_bytes:,} bytes instead of {HEAD_BYTES + payload_bytes:,}")
        name = raw[_FIXED.size : _FIXED.size + name_bytes].decode("ascii", "replace")
        about = bytes(raw[_FIXED.size + name_bytes :][:about_bytes])
        return Head(name, generation, about, payload_bytes, checksum, bytes(raw))

    def digest(self) -> xxhash.xxh3_128:
        """Begin the digest, which the reader of the payload feeds with it and then compares."""
        return _digest(self.raw)

    def check(self, digest: xxhash.xxh3_128) -> None:
        if digest.digest() != self.checksum:
            raise Damaged("its checksum is wrong")


def _digest(head: bytes) -> xxhash.xxh3_128:
    """Begin the checksum of an object: it covers all but the checksum itself. XXH3 does not protect against malice:
    those who may write could also sign."""
    state = xxhash.xxh3_128(head[:_CHECKSUM_AT])
    state.update(head[_FIXED.size :])
    return state


class ObjectWriter:
    """An object that is being written. Its head is whole once the digest has seen all of the payload."""

    def __init__(self, name: str, generation: int, about: bytes, payload: Sequence[memoryview]) -> None:
        self._words = name.encode("ascii") + about
        assert len(self._words) <= MOST_WORDS_BYTES, name
        self.payload = [part for part in payload if len(part)]
        self.size = HEAD_BYTES + sum(len(part) for part in payload)
        self._fixed = (_MAGIC, VERSION, len(name), len(about), generation, self.size - HEAD_BYTES)

    def digest(self) -> xxhash.xxh3_128:
        return _digest(self.head(bytes(16)))

    def head(self, checksum: bytes) -> bytes:
        return (_FIXED.pack(*self._fixed, checksum) + self._words).ljust(HEAD_BYTES, b"\x00")

    def chunks(self) -> Iterator[memoryview]:
        """The payload, in parts that are still in the processor's cache when they are used a second time."""
        for part in self.payload:
            for start in range(0, len(part), CHUNK_BYTES):
                yield part[start : start + CHUNK_BYTES]


LIMIT_BYTES = 1 << 34
"""No tensor between stages is larger; a header that says so is wrong."""


class Missing(Exception):
    """There is nothing of that name."""


class Exists(Exception):
    """There is something of that name already."""


class Unreachable(Exception):
    """The place cannot be reached for now: worth another try. Its text says why."""


class Source(Protocol):
    """The bytes of one object, from its beginning."""

    size: int

    def fill(self, view: memoryview) -> int:
        """How many bytes were read: fewer than the view holds only where the object ends."""


class Place(Protocol):
    """Its methods raise Missing, Exists, Unreachable, or a StoreError that says what to do."""

    first_pause_s: float
    longest_pause_s: float
    """Seconds between two looks at what is not there yet: at first, and at most."""

    def check(self) -> None:
        """Check that the place exists and lets us in."""

    def write(self, name: str, writer: ObjectWriter, *, new: bool = False) -> None:
        """All of it appears at once, or nothing. `new`: Exists if there was something; not every server can tell."""

    def read(self, name: str) -> AbstractContextManager[Source]: ...

    def names(self, under: str) -> list[str]:
        """Everything below, unfinished writes included."""

    def rooms(self, under: str) -> list[str]:
        """List the folders directly below that are not empty."""

    def delete(self, names: Sequence[str], *, recycle: bool = False) -> None:
        """Delete these; one that is gone already is fine. `recycle`: a few may be kept to write the next ones over."""

    def tidy(self, run: str) -> None:
        """Removes what is empty."""


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
