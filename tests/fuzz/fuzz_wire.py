"""Coverage-guided fuzzing of the wire: whatever a peer sends is a message or its fault, and costs it as much as us.

    make fuzz                                                        for a minute, or for FUZZ_SECONDS
    .venv/bin/python tests/fuzz/fuzz_wire.py build/fuzz/crash-...    an input that failed, once more

Each input is taken as a payload in every encoding, and as a stream of frames in several cuts. Knows no message and no
kind of field: what is added to wire/messages.py is fuzzed without a change here.
"""

import dataclasses
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import atheris
import numpy as np

from potluck.errors import TheirProtocolError

with atheris.instrument_imports(include=["potluck.wire"]):
    from potluck.wire import frames
    from potluck.wire.codec import CODECS, codec_of, decode, encode, is_bulk, open_bulk
    from potluck.wire.frames import FrameReader
    from potluck.wire.messages import MESSAGES

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "build" / "fuzz"
"""Where inputs that failed are kept. Git ignores it."""
MAX_BYTES = 1024
"""Of an input. The longest published vector has 332."""
HEADROOM_BYTES = 1 << 29
"""What the process may still allocate once it fuzzes: a count that is believed before it is checked breaks this."""


def fuzz(data: bytes) -> None:
    for codec in CODECS:
        check_payload(data, codec)
    refused(lambda: codec_of(data))
    check_stream(data)


# Payloads


def check_payload(payload: bytes | memoryview, codec: str) -> None:
    """It is refused as their fault, or it is a message that is written with the same bytes and is no larger."""
    found = refused(lambda: decode(payload, codec))
    if not isinstance(found, str):
        assert encode(found, codec) == struct.pack(">I", len(payload)) + payload, f"{codec}: written otherwise: {found}"
        assert weight(found) <= len(payload), f"{codec}: {weight(found)} bytes out of {len(payload)}: {found}"
    check_bulk(payload, codec, found)


def check_bulk(payload: bytes | memoryview, codec: str, expected: Any) -> None:
    """Opened from any beginning, a payload with gradients tells what decode() tells of the whole."""
    view = memoryview(payload)
    least = min(CODECS[codec].tag.size, len(view))
    begun = view[: random.Random(zlib.crc32(view)).randint(least, len(view))]
    opened = refused(lambda: open_bulk(begun, len(view), codec) or open_bulk(view, len(view), codec))
    if isinstance(opened, str):
        is_whole = not isinstance(expected, str) and is_bulk(type(expected))
        assert not is_whole, f"{codec}: {opened} But it is {expected}"
        return
    assert opened is not None, f"{codec}: all {len(view)} bytes are too few to tell"
    end = opened.start + opened.nbytes
    assert end <= len(view), f"{codec}: the gradients go on to {end:,} of {len(view):,} bytes"
    rest = refused(lambda: opened.finish(view[end:]))
    if isinstance(rest, str) or isinstance(expected, str):
        assert isinstance(rest, str) and isinstance(expected, str), f"{codec}: {rest} against {expected}"
        return
    name, dtype = opened.field
    values = opened.fields | rest | {name: np.frombuffer(view[opened.start : end], dtype)}
    assert opened.message(**values) == expected, f"{codec}: {values} against {expected}"


def refused(action: Callable[[], Any]) -> Any:
    """What it gives, or the sentence of its refusal. Any other exception is a finding."""
    try:
        return action()
    except TheirProtocolError as refusal:
        assert str(refusal).endswith("."), f"no sentence: {refusal}"
        return str(refusal)


def weight(value: Any) -> int:
    """The bytes that a decoded value keeps alive, at least; an element of a list, however small, is one."""
    match value:
        case np.ndarray() | memoryview():
            return value.nbytes
        case bytes() | bytearray():
            return len(value)
        case str():
            return len(value.encode())
        case list() | tuple() | set() | frozenset():
            return sum(1 + weight(item) for item in value)
        case dict():
            return sum(1 + weight(item) for item in value.items())
    if dataclasses.is_dataclass(value):
        return sum(weight(getattr(value, field.name)) for field in dataclasses.fields(value))
    return 0


# Streams


def check_stream(data: bytes) -> None:
    """However a stream is cut, the payloads are those of its plain reading, and the buffer keeps to its bound."""
    rng = random.Random(zlib.crc32(data))
    limit = rng.choice([64, 1 << 20, 1 << 32])
    # A buffer grows from 64 kB on. Inputs are shorter, so half of them start it smaller.
    frames.FIRST_BYTES = rng.choice([64, 1 << 16])
    expected = read_plainly(data, limit)
    for feed in (feed_whole, feed_cut, feed_in_place):
        found = read_by(feed, FrameReader(limit), data, rng)
        assert found == expected, f"{feed.__name__}: {found} against {expected}"
    for payload in expected[0]:
        for codec in CODECS:
            check_payload(payload, codec)


Outcome = tuple[list[bytes], str]
"""The payloads of a stream, and what comes after them."""
Feed = Callable[[FrameReader, bytes, random.Random], Iterator[bytes]]


def read_plainly(data: bytes, limit: int) -> Outcome:
    """The judge: one pass over all the bytes."""
    payloads: list[bytes] = []
    while len(data) >= 4:
        length = int.from_bytes(data[:4], "big")
        if length > limit:
            return payloads, "a refusal"
        if len(data) < 4 + length:
            break
        payloads.append(data[4 : 4 + length])
        data = data[4 + length :]
    return payloads, "a part of a frame" if data else "nothing"


def read_by(feed: Feed, reader: FrameReader, data: bytes, rng: random.Random) -> Outcome:
    payloads: list[bytes] = []
    try:
        for payload in feed(reader, data, rng):
            payloads.append(payload)  # one by one: those before a refusal count
    except TheirProtocolError:
        return payloads, "a refusal"
    return payloads, "nothing" if reader.is_between_frames else "a part of a frame"


def feed_whole(reader: FrameReader, data: bytes, rng: random.Random) -> Iterator[bytes]:
    yield from map(bytes, reader.feed(data))


def feed_cut(reader: FrameReader, data: bytes, rng: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        piece = data[at : at + rng.choice([1, 2, 3, 7, 100])]
        at += len(piece)
        yield from map(bytes, reader.feed(piece))
        check_buffer(reader, at)


def feed_in_place(reader: FrameReader, data: bytes, rng: random.Random) -> Iterator[bytes]:
    """As a socket does: into space(), as much as happens to be there."""
    at = 0
    while at < len(data):
        space = reader.space()
        assert len(space), "space() is empty"
        count = min(len(space), len(data) - at, rng.choice([1, 5, 64, 1000]))
        space[:count] = data[at : at + count]
        at += count
        payload = reader.filled(count)
        check_buffer(reader, at)
        if payload is not None:
            yield bytes(payload)


def check_buffer(reader: FrameReader, fed: int) -> None:
    kept = len(reader._buffer)
    assert kept <= frames.FIRST_BYTES + 2 * fed, f"a buffer of {kept:,} bytes for {fed:,} received"


# Seeds


def seeds() -> Iterator[bytes]:
    """The published vectors as payloads and as frames, the malformed ones, and the plainest form of every message."""
    vectors = json.loads((ROOT / "tests" / "vectors" / "wire.json").read_text())
    published = [
        bytes.fromhex(text) for vector in vectors["vectors"] for key, text in vector.items() if key.endswith("_hex")
    ]
    yield from published
    yield from (frame[4:] for frame in published)
    yield from (b"".join(published[at : at + 6]) for at in range(0, len(published), 6))
    yield from (bytes.fromhex(case["payload_hex"]) for case in vectors["malformed"])
    for codec in CODECS.values():
        for number in range(codec.first_tag, codec.first_tag + len(MESSAGES)):
            yield from plainest(codec.tag.pack(number), codec.name)


def plainest(tag: bytes, codec: str) -> list[bytes]:
    """The message of nothing but zeros: whatever its fields are, some number of them is right."""
    candidates = [tag + bytes(count) for count in range(256)]
    return [payload for payload in candidates if not isinstance(refused(lambda: decode(payload, codec)), str)]  # noqa: B023


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Without inputs of its own to start from or to replay, one process makes them and another fuzzes.

    libFuzzer ends its process without a word to Python, which could then not tidy up.
    """
    if any(not argument.startswith("-") for argument in sys.argv[1:]):
        atheris.Setup(sys.argv, fuzz)
        limit_memory()
        atheris.Fuzz()
    FINDINGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="potluck-fuzz-") as folder:
        for number, seed in enumerate(seeds()):
            (Path(folder) / f"{number:04d}").write_bytes(seed)
        settings = [f"-max_len={MAX_BYTES}", f"-artifact_prefix={FINDINGS}/", "-timeout=10", "-print_final_stats=1"]
        sys.exit(subprocess.run([sys.executable, __file__, *settings, *sys.argv[1:], folder]).returncode)


if __name__ == "__main__":
    main()
