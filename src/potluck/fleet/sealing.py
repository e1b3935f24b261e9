"""Bytes of one direction of a connection, sealed in long records: AES-256-GCM under a key that was told inside TLS.

A record is `[u32 big-endian length][that many bytes, encrypted][16 bytes of tag]`. TLS has records of 16 KiB, and
Python takes each of them by a call of its own; here one call takes 512 KiB, outside the interpreter's lock, and the two
directions of a connection have nothing in common. docs/decisions/0061 has the figures and what is promised.

Knows nothing of sockets and of messages.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from potluck.errors import TheirProtocolError

if TYPE_CHECKING:  # else loaded where a connection is encrypted, and not in every process that may have one
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PROTOCOL = "potluck-sealed/1"
"""Name by which both ends agree, in TLS's own way (ALPN), on what is spoken inside, if they can do this."""
KEY_BYTES = 32
HEAD_BYTES, TAG_BYTES = 4, 16
RECORD_BYTES = 512 << 10
"""The most of one record. Less costs more turns of the interpreter; more leaves the processor's caches, and keeps the
other end waiting before it can open the first."""
_SHORT_BYTES = 4 << 10
"""Parts up to this length share a record; longer ones begin one, so that they are opened into their place."""
_RECORDS_PER_KEY = 1 << 17
"""64 GiB under one key: what is told of it stays far below what RFC 8446 (5.5) allows. Then comes the next."""


def can_seal() -> bool:
    """Not with an older `cryptography`, which would copy each record once more: then all stays inside TLS."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return False
    return hasattr(AESGCM, "encrypt_into")


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


class _RecordKeys:
    """Chooses the key and the nonce of the next record: a nonce is its number, and a key is never another
    direction's."""

    def __init__(self, key: bytes | memoryview) -> None:
        if len(key) != KEY_BYTES:
            raise TheirProtocolError(f"A key has {KEY_BYTES} bytes, and this one has {len(key)}.")
        self._key = bytes(key)
        self._cipher = _cipher_of(self._key)
        self._records = 0

    def _next(self) -> "tuple[AESGCM, bytes]":
        if self._records and self._records % _RECORDS_PER_KEY == 0:
            self._key = hmac.digest(self._key, b"potluck: the next key", hashlib.sha256)
            self._cipher = _cipher_of(self._key)
        nonce = self._records.to_bytes(12, "big")
        self._records += 1
        return self._cipher, nonce


class Sealer(_RecordKeys):
    """For what is sent."""

    def __init__(self, key: bytes | memoryview) -> None:
        super().__init__(key)
        self._space = _space_for(_SHORT_BYTES + RECORD_BYTES + 2 * (HEAD_BYTES + TAG_BYTES))

    def seal(self, parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
        """The parts, end to end, as records. What it yields is to be sent before the next is asked for."""
        used, short = 0, b""
        for part in parts:
            rest = memoryview(part).cast("B")
            if len(short) + len(rest) <= _SHORT_BYTES:
                short += rest
                continue
            if short:
                used, short = self._put(used, memoryview(short)), b""
            while rest:
                used = self._put(used, rest[:RECORD_BYTES])
                yield self._space[:used]
                used, rest = 0, rest[RECORD_BYTES:]
        if short:
            yield self._space[: self._put(used, memoryview(short))]

    def _put(self, start: int, data: memoryview) -> int:
        """One record into the space, from there on: a short one before a long one, which leave together."""
        cipher, nonce = self._next()
        end = start + HEAD_BYTES + len(data) + TAG_BYTES
        head = len(data).to_bytes(HEAD_BYTES, "big")
        self._space[start : start + HEAD_BYTES] = head
        cipher.encrypt_into(nonce, data, head, self._space[start + HEAD_BYTES : end])
        return end


class Opener(_RecordKeys):
    """For what is received: fill head(), then body(), then take it by open()."""

    def __init__(self, key: bytes | memoryview) -> None:
        super().__init__(key)
        self.head = memoryview(bytearray(HEAD_BYTES))
        self._sealed = _space_for(RECORD_BYTES + TAG_BYTES)
        self._opened = _space_for(RECORD_BYTES)
        self._rest = self._opened[:0]
        """What was opened and has not been taken yet."""

    @property
    def has_rest(self) -> bool:
        return len(self._rest) > 0

    def take_rest(self, space: memoryview) -> int:
        count = min(len(space), len(self._rest))
        space[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def body(self) -> memoryview:
        """Where the rest of the record goes whose head has come."""
        length = int.from_bytes(self.head, "big")
        if not 0 < length <= RECORD_BYTES:
            raise TheirProtocolError(f"A sealed record has {length:,} bytes, and none has more than {RECORD_BYTES:,}.")
        return self._sealed[: length + TAG_BYTES]

    def open(self, body: memoryview, space: memoryview) -> int:
        """How many of the record's bytes are in `space` now. The rest of them, if that was too short, is kept."""
        from cryptography.exceptions import InvalidTag

        cipher, nonce = self._next()
        length = len(body) - TAG_BYTES
        is_short = length > len(space)
        try:
            cipher.decrypt_into(nonce, body, self.head, self._opened[:length] if is_short else space[:length])
        except InvalidTag:
            raise TheirProtocolError("A sealed record is not the one that was sent.") from None
        if not is_short:
            return length
        self._rest = self._opened[:length]
        return self.take_rest(space)


def _cipher_of(key: bytes) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _space_for(size: int) -> memoryview:
    """Memory that is not zeroed: pages that no record has reached take none."""
    import numpy as np  # here, so that a command that seals nothing does not wait for it

    return np.empty(size, np.uint8).data
