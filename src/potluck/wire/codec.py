"""Two encodings of the same messages, each a small table of how its fields travel.

`bincode` is the published one: bincode 1.x in its default form. `entrenar` is what entrenar's own programs speak.
Decoding is strict: a count is checked against the bytes that remain before anything is allocated, nothing may be left
over, and every refusal names the field. Arrays are views of the payload, not copies.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.errors import OurProtocolError, TheirProtocolError
from potluck.wire.messages import LATER, MESSAGES, PUBLISHED, Hello, Kind, LookOn, Message, layout

_FIXED = {
    Kind.U8: struct.Struct("<B"),
    Kind.U32: struct.Struct("<I"),
    Kind.U64: struct.Struct("<Q"),
    Kind.F64: struct.Struct("<d"),
}
ARRAYS: dict[Kind, np.dtype[Any]] = {
    Kind.CODED: np.dtype("u1"),
    Kind.F32S: np.dtype("<f4"),
    Kind.U32S: np.dtype("<u4"),
    Kind.F64S: np.dtype("<f8"),
}
_U32, _U64 = _FIXED[Kind.U32], _FIXED[Kind.U64]
MAX_FRAME_BYTES = (1 << 32) - 1
"""The most bytes that a frame's length can say."""


@dataclass(frozen=True)
class Codec:
    name: str
    tag: struct.Struct
    first_tag: int
    """The number of the first message."""
    counts: dict[Kind, struct.Struct]
    """How the number of elements is written before a string or an array."""
    sizes_first: bool
    """Whether component_sizes travel before the gradients that they measure."""
    messages: tuple[type[Message], ...]
    """The messages that it knows, in order of their numbers."""

    def fields(self, message: type[Message]) -> tuple[tuple[str, Kind], ...]:
        found = layout(message)
        if self.sizes_first and "component_sizes" in dict(found):  # declared last, right after the gradients
            return (*found[:-2], found[-1], found[-2])
        return found


_COUNTED = (Kind.STRING, *ARRAYS, Kind.BYTES)
_BULK = (Kind.F32S, Kind.CODED)
"""Kinds of which a message may have more than is kept of it: they are read as they come."""
BINCODE = Codec("bincode", _U32, 0, dict.fromkeys(_COUNTED, _U64), sizes_first=False, messages=MESSAGES)
ENTRENAR = Codec(
    "entrenar",
    _FIXED[Kind.U8],
    1,
    {Kind.STRING: _U32, Kind.F32S: _U64, Kind.U32S: _U32},
    sizes_first=True,
    messages=PUBLISHED,
)
CODECS = {codec.name: codec for codec in (BINCODE, ENTRENAR)}
_NUMBERS = {message: number for number, message in enumerate(MESSAGES)}
_HELLO = _NUMBERS[Hello]
_LOOK_ON = _NUMBERS[LookOn]


def codec_of(payload: bytes | memoryview) -> str:
    """Find the encoding that a peer speaks, from the first byte of its first payload: JoinRequest in either, Hello,
    LookOn."""
    first = payload[0] if len(payload) else None
    if first in (0, _HELLO, _LOOK_ON):
        return BINCODE.name
    if first == 1:
        return ENTRENAR.name
    raise TheirProtocolError("The first payload is a JoinRequest in neither encoding, and no Hello.")


def encode(message: Message, codec: str = "bincode") -> bytes:
    """A whole frame: the payload behind its length."""
    parts = encode_parts(message, codec)
    return b"".join(parts)


def encode_parts(message: Message, codec: str = "bincode") -> list[bytes | memoryview]:
    """A frame in pieces, arrays as views: for sendmsg, which copies none of them."""
    chosen = CODECS[codec]
    number = _NUMBERS[type(message)]
    if number >= len(chosen.messages):
        raise OurProtocolError(f"{type(message).__name__} does not travel as {codec}.")
    parts: list[bytes | memoryview] = [chosen.tag.pack(number + chosen.first_tag)]
    sent, later = list(chosen.fields(type(message))), LATER[type(message)]
    while sent and later and getattr(message, sent[-1][0]) == later.get(sent[-1][0], ...):
        sent.pop()
    for name, kind in sent:
        parts += _encode_field(chosen, kind, getattr(message, name), f"{type(message).__name__}.{name}")
    _check_sizes(message.__class__, vars(message), len(vars(message).get("gradients", ())), OurProtocolError)
    length = sum(len(part) for part in parts)
    if length > MAX_FRAME_BYTES:
        raise OurProtocolError(
            f"A {type(message).__name__} of {length:,} bytes does not fit one frame. Send it as blocks."
        )
    return [struct.pack(">I", length), *parts]


def decode(payload: bytes | bytearray | memoryview, codec: str = "bincode") -> Message:
    """The message of one payload. Its arrays are views of it, so the payload must not be written again."""
    chosen = CODECS[codec]
    reader = _Reader(memoryview(payload).cast("B"))
    kind_of_message = _read_tag(chosen, reader)
    later = LATER[kind_of_message]
    values = {
        name: later[name]
        if name in later and not reader.left
        else _decode_field(chosen, kind, reader, f"{kind_of_message.__name__}.{name}")
        for name, kind in chosen.fields(kind_of_message)
    }
    reader.end(kind_of_message)
    _check_sizes(kind_of_message, values, len(values.get("gradients", ())), TheirProtocolError)
    return kind_of_message(**values)


@dataclass(frozen=True)
class Bulk:
    """The beginning of a message with gradients: all that comes before them, so that they need not be kept."""

    message: type[Message]
    fields: dict[str, Any]
    start: int
    """Where the gradients begin in the payload."""
    count: int
    """How many there are; of coded ones, bytes."""
    codec: str

    @property
    def field(self) -> tuple[str, np.dtype[Any]]:
        """Return the name of the bulk field in its message, and how each number travels."""
        name, kind = next((name, kind) for name, kind in layout(self.message) if kind in _BULK)
        return name, ARRAYS[kind]

    @property
    def nbytes(self) -> int:
        return self.count * self.field[1].itemsize

    def finish(self, tail: memoryview) -> dict[str, Any]:
        """The fields that come after the gradients, from the bytes after them."""
        chosen = CODECS[self.codec]
        reader, name = _Reader(tail), self.message.__name__
        rest = [(field, kind) for field, kind in chosen.fields(self.message) if field not in self.fields][1:]
        found = {field: _decode_field(chosen, kind, reader, f"{name}.{field}") for field, kind in rest}
        reader.end(self.message)
        _check_sizes(self.message, self.fields | found, self.count, TheirProtocolError)
        return found


def is_bulk(message: type[Message]) -> bool:
    return any(kind in _BULK for _, kind in layout(message))


def peek(payload: memoryview, codec: str) -> type[Message]:
    """Find the message that a payload is, from its beginning."""
    return _read_tag(CODECS[codec], _Reader(payload))


def open_bulk(begun: memoryview, length: int, codec: str) -> Bulk | None:
    """Read a payload's first bytes up to its bulk; None if they are too few. `length` is the whole payload's."""
    chosen = CODECS[codec]
    reader = _Reader(begun)
    message = _read_tag(chosen, reader)
    fields: dict[str, Any] = {}
    try:
        for name, kind in chosen.fields(message):
            if kind in _BULK:
                count = reader.fixed(chosen.counts[kind], name)
                bulk = Bulk(message, fields, len(begun) - reader.left, count, codec)
                if bulk.nbytes > length - bulk.start:
                    raise OverflowError(
                        f"{message.__name__}.{name} needs {bulk.nbytes:,} bytes, and {length - bulk.start:,} are left."
                    )
                return bulk
            fields[name] = _decode_field(chosen, kind, reader, name)
    except TheirProtocolError:
        if len(begun) < length:
            return None
        raise
    except OverflowError as error:
        raise TheirProtocolError(str(error)) from None
    raise TheirProtocolError(f"{message.__name__} has no gradients.")


def _read_tag(codec: Codec, reader: "_Reader") -> type[Message]:
    number: int = reader.fixed(codec.tag, "the message's number") - codec.first_tag
    if not 0 <= number < len(codec.messages):
        raise TheirProtocolError(f"There is no message with the number {number + codec.first_tag}.")
    return codec.messages[number]


class _Reader:
    """A payload, and how far it has been read."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def take(self, count: int, what: str) -> memoryview:
        if count > self.left:
            raise TheirProtocolError(f"{what} needs {count:,} bytes, and {self.left:,} are left.")
        self._at += count
        return self._payload[self._at - count : self._at]

    def end(self, message: type[Message]) -> None:
        if self.left:
            raise TheirProtocolError(f"{message.__name__} is followed by {self.left:,} bytes too many.")

    def fixed(self, format_: struct.Struct, what: str) -> Any:
        return format_.unpack(self.take(format_.size, what))[0]


def _encode_field(codec: Codec, kind: Kind, value: Any, what: str) -> list[bytes | memoryview]:
    try:
        match kind:
            case Kind.F32:
                return [np.asarray(value, "<f4").tobytes()]
            case Kind.STRING:
                text = value.encode()
                return [codec.counts[kind].pack(len(text)), text]
            case Kind.BYTES:
                data = memoryview(value).cast("B")
                return [codec.counts[kind].pack(len(data)), data]
            case Kind.F32S | Kind.U32S | Kind.F64S | Kind.CODED:
                array = np.ascontiguousarray(value, ARRAYS[kind])
                return [codec.counts[kind].pack(array.size), array.reshape(-1).view(np.uint8).data]
        return [_FIXED[kind].pack(value)]
    except (struct.error, AttributeError, ValueError, TypeError, OverflowError) as error:
        raise OurProtocolError(f"{what} cannot be sent: {error}.") from None


def _decode_field(codec: Codec, kind: Kind, reader: _Reader, what: str) -> Any:
    match kind:
        case Kind.F32:
            return np.frombuffer(reader.take(4, what), "<f4")[0]
        case Kind.STRING:
            text = reader.take(reader.fixed(codec.counts[kind], what), what)
            try:
                return str(text, "utf-8")
            except UnicodeDecodeError:
                raise TheirProtocolError(f"{what} is not UTF-8.") from None
        case Kind.BYTES:
            return reader.take(reader.fixed(codec.counts[kind], what), what)
        case Kind.F32S | Kind.U32S | Kind.F64S | Kind.CODED:
            count = reader.fixed(codec.counts[kind], what)
            return np.frombuffer(reader.take(ARRAYS[kind].itemsize * count, what), ARRAYS[kind])
    return reader.fixed(_FIXED[kind], what)


def _check_sizes(
    message: type[Message], values: dict[str, Any], count: int, error: type[OurProtocolError | TheirProtocolError]
) -> None:
    """`count`: of the gradients that component_sizes measure, in messages that have those."""
    sizes = values.get("component_sizes")
    if sizes is not None and (total := int(np.sum(sizes, dtype=np.uint64))) != count:
        raise error(f"{message.__name__}.component_sizes add up to {total:,}, and there are {count:,} gradients.")
