"""What an object in a store is: a head of fixed size that says whose it is, and bytes. One checksum of both. Pure."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from potluck.stages.channel import LIMIT_BYTES

HEAD_BYTES = 512
"""Fixed, so that a reader knows with one small read how much memory to take, and where the payload begins."""
VERSION = 1
_MAGIC = b"potluck\x00"
_FIXED = struct.Struct("<8sHHIQQ16s")
_DIGEST_AT = _FIXED.size - 16
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
    """For whoever reads the payload."""
    payload_bytes: int
    digest: bytes
    raw: bytes

    @staticmethod
    def read(raw: bytes, object_bytes: int) -> "Head":
        """From bytes that came from outside; nothing that they say is believed before it is checked."""
        if len(raw) < HEAD_BYTES:
            raise Damaged(f"it has only {len(raw)} bytes")
        magic, version, name_bytes, about_bytes, generation, payload_bytes, digest = _FIXED.unpack_from(raw)
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
        return Head(name, generation, about, payload_bytes, digest, bytes(raw))

    def check(self, payload: memoryview) -> None:
        if _digest(self.raw, [payload]) != self.digest:
            raise Damaged("its checksum is wrong")


def seal(name: str, generation: int, about: bytes, payload: Sequence[memoryview]) -> bytes:
    """The head of an object with that payload."""
    words = name.encode("ascii") + about
    assert len(words) <= MOST_WORDS_BYTES, name
    size = sum(len(part) for part in payload)
    fixed = (_MAGIC, VERSION, len(name), len(about), generation, size)
    unsigned = (_FIXED.pack(*fixed, bytes(16)) + words).ljust(HEAD_BYTES, b"\x00")
    return (_FIXED.pack(*fixed, _digest(unsigned, payload)) + words).ljust(HEAD_BYTES, b"\x00")


def _digest(head: bytes, payload: Sequence[memoryview]) -> bytes:
    """Of everything but the digest itself. XXH3 is not against malice: whoever may write may also sign."""
    digest = xxhash.xxh3_128(head[:_DIGEST_AT])
    digest.update(head[_FIXED.size :])
    for part in payload:
        digest.update(part)
    return digest.digest()
