"""What an object in a store is: a head of fixed size that says whose it is, and bytes. One checksum of both. Pure."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

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
    """For the reader of the payload."""
    payload_bytes: int
    checksum: bytes
    raw: bytes

    @staticmethod
    def read(raw: bytes, object_bytes: int) -> "Head":
        """From bytes that came from outside; nothing that they say is believed before it is checked."""
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

    def digest(self) -> "Digest":
        """For the reader of the payload, to be fed with it and then compared."""
        return Digest(self.raw)

    def check(self, digest: "Digest") -> None:
        if digest.value() != self.checksum:
            raise Damaged("its checksum is wrong")


class Digest:
    """Of all of an object but the checksum itself. XXH3 is not against malice: those who may write could also sign."""

    def __init__(self, head: bytes) -> None:
        self._state = xxhash.xxh3_128(head[:_CHECKSUM_AT])
        self._state.update(head[_FIXED.size :])

    def update(self, payload: memoryview) -> None:
        self._state.update(payload)

    def value(self) -> bytes:
        return self._state.digest()


class ObjectWriter:
    """An object that is being written. Its head is whole once the digest has seen all of the payload."""

    def __init__(self, name: str, generation: int, about: bytes, payload: Sequence[memoryview]) -> None:
        self._words = name.encode("ascii") + about
        assert len(self._words) <= MOST_WORDS_BYTES, name
        self.payload = [part for part in payload if len(part)]
        self.size = HEAD_BYTES + sum(len(part) for part in payload)
        self._fixed = (_MAGIC, VERSION, len(name), len(about), generation, self.size - HEAD_BYTES)

    def digest(self) -> Digest:
        return Digest(self.head(bytes(16)))

    def head(self, checksum: bytes) -> bytes:
        return (_FIXED.pack(*self._fixed, checksum) + self._words).ljust(HEAD_BYTES, b"\x00")

    def chunks(self) -> Iterator[memoryview]:
        """The payload, in parts that are still in the processor's cache when they are used a second time."""
        for part in self.payload:
            for start in range(0, len(part), CHUNK_BYTES):
                yield part[start : start + CHUNK_BYTES]


def seal(name: str, generation: int, about: bytes, payload: Sequence[memoryview]) -> bytes:
    """The head of an object with that payload."""
    writer = ObjectWriter(name, generation, about, payload)
    digest = writer.digest()
    for chunk in writer.chunks():
        digest.update(chunk)
    return writer.head(digest.value())


LIMIT_BYTES = 1 << 34
"""No tensor between stages is larger; a header that says so is wrong."""
