"""Frames: `[u32 big-endian length][payload]`. A reader that can be cut anywhere and copies a payload once.

Knows nothing of sockets: bytes come in by feed(), or by writing into space() and telling how many by filled().
"""

from collections.abc import Iterator

from potluck.errors import TheirProtocolError

PREFIX_BYTES = 4
FIRST_BYTES = 1 << 16
"""A payload's buffer starts no larger than this and doubles with what arrives: a length that only claims to be large
costs its sender as much as us."""


class FrameReader:
    """Bytes in, payloads out, each in a buffer of its own."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """The longest payload that is taken. Raise it once the peer is known."""
        self._buffer = bytearray(PREFIX_BYTES)
        self._have = 0
        self._length: int | None = None
        """Of the payload that is arriving; none while its prefix is."""

    @property
    def is_between_frames(self) -> bool:
        """Whether the peer could end here without having cut a frame."""
        return self._length is None and self._have == 0

    def feed(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """Every payload that is complete with these bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            space = self.space()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            rest = rest[count:]
            payload = self.filled(count)
            if payload is not None:
                yield payload

    def space(self) -> memoryview:
        """Return the memory where the next bytes belong, for recv_into. Never empty, and never beyond the frame that is
        arriving."""
        return memoryview(self._buffer)[self._have :]

    def filled(self, count: int) -> memoryview | None:
        """`count` bytes were written into space(). The payload, if it is complete now."""
        self._have += count
        if self._have < len(self._buffer):
            return None
        if self._length is None:
            self._begin(int.from_bytes(self._buffer, "big"))
        elif len(self._buffer) < self._length:
            self._grow()
        if self._length == self._have:
            return self._finish()
        return None

    def _begin(self, length: int) -> None:
        if length > self.limit_bytes:
            raise TheirProtocolError(f"A frame of {length:,} bytes is longer than {self.limit_bytes:,}, the most here.")
        self._length, self._have = length, 0
        self._buffer = bytearray(min(length, FIRST_BYTES))

    def _grow(self) -> None:
        assert self._length is not None
        larger = bytearray(min(self._length, 2 * len(self._buffer)))
        larger[: self._have] = self._buffer
        self._buffer = larger

    def _finish(self) -> memoryview:
        payload = memoryview(self._buffer).toreadonly()
        self._buffer, self._have, self._length = bytearray(PREFIX_BYTES), 0, None
        return payload
