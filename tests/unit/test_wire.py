"""Both encodings against the published bytes, against themselves, and against malformed ones."""

import json
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import OurProtocolError, TheirProtocolError, WireError
from potluck.wire.codec import CODECS, codec_of, decode, encode, is_bulk, open_bulk
from potluck.wire.frames import FrameReader
from potluck.wire.messages import (
    MESSAGES,
    PUBLISHED,
    BlockGradientPayload,
    GradientPayload,
    Heartbeat,
    JoinRequest,
    Kind,
    Message,
    SliceReport,
    layout,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "wire.json").read_text())
BY_NAME = {message.__name__: message for message in MESSAGES}
FRAMES = {"bincode": "bincode1_frame_hex", "entrenar": "entrenar_frame_hex"}


def from_bits(bits: str) -> np.float32:
    return np.frombuffer(struct.pack("<I", int(bits, 16)), "<f4")[0]


def message_of(vector: dict[str, Any]) -> Message:
    """The message that a vector's fields describe; floats are given as bit patterns."""
    kinds = dict(layout(BY_NAME[vector["variant"]]))
    values: dict[str, Any] = {}
    for name, value in vector["fields"].items():
        match kinds[name]:
            case Kind.F32:
                values[name] = from_bits(value)
            case Kind.F32S:
                values[name] = np.array([int(bits, 16) for bits in value], "<u4").view("<f4")
            case Kind.U32S:
                values[name] = np.array(value, "<u4")
            case _:
                values[name] = value
    return BY_NAME[vector["variant"]](**values)


@pytest.mark.parametrize("codec", FRAMES)
@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["name"])
def test_bytes_are_those_of_the_published_vectors(vector: dict[str, Any], codec: str) -> None:
    frame = bytes.fromhex(vector[FRAMES[codec]])
    message = message_of(vector)
    assert encode(message, codec) == frame
    assert decode(frame[4:], codec) == message
    if vector["variant"] == "JoinRequest":
        assert codec_of(frame[4:]) == codec


def test_every_message_has_a_vector() -> None:
    assert {vector["variant"] for vector in VECTORS["vectors"]} == {message.__name__ for message in PUBLISHED}


@pytest.mark.parametrize("case", VECTORS["malformed"], ids=lambda case: case.get("name", ""))
def test_malformed_payloads_are_refused_also_where_entrenar_takes_them(case: dict[str, Any]) -> None:
    key = next(name for name in case if name.endswith("hex"))
    with pytest.raises(TheirProtocolError):
        decode(bytes.fromhex(case[key]), "entrenar")


# Any message


def array(dtype: str, bits: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.lists(bits, max_size=20).map(lambda values: np.array(values, "<u4").view(dtype))


BITS = st.integers(0, 2**32 - 1)
FIELDS = {
    Kind.U8: st.integers(0, 255),
    Kind.U32: BITS,
    Kind.U64: st.integers(0, 2**64 - 1),
    Kind.F32: BITS.map(lambda bits: np.array([bits], "<u4").view("<f4")[0]),
    Kind.STRING: st.text(max_size=20),
    Kind.F32S: array("<f4", BITS),
    Kind.U32S: array("<u4", BITS),
    Kind.F64: st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    Kind.F64S: st.lists(st.floats(), max_size=20).map(lambda values: np.array(values, "<f8")),
    Kind.BYTES: st.binary(max_size=20),
    Kind.CODED: st.binary(max_size=20).map(lambda data: np.frombuffer(data, "u1")),
}


@st.composite
def messages(draw: st.DrawFn, codec: str = "bincode") -> Message:
    kind = draw(st.sampled_from(CODECS[codec].messages))
    values = {name: draw(FIELDS[how]) for name, how in layout(kind) if name != "component_sizes"}
    if "component_sizes" in dict(layout(kind)):
        cuts = sorted(draw(st.lists(st.integers(0, len(values["gradients"])), max_size=8)))
        ends = np.array([0, *cuts, len(values["gradients"])])
        values["component_sizes"] = np.diff(ends).astype("<u4")
    return kind(**values)


coded_messages = st.sampled_from(list(FRAMES)).flatmap(lambda codec: st.tuples(messages(codec), st.just(codec)))


@given(coded_messages)
def test_any_message_survives_the_round_trip(drawn: tuple[Message, str]) -> None:
    message, codec = drawn
    assert decode(encode(message, codec)[4:], codec) == message


@given(st.lists(messages(), min_size=1, max_size=3), st.data())
def test_a_stream_cut_anywhere_gives_the_same_messages(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = FrameReader(limit_bytes=1 << 20)
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = [decode(payload) for piece in pieces for payload in reader.feed(piece)]
    assert found == sent
    assert reader.is_between_frames


def test_a_stream_cut_at_every_byte_gives_the_same_messages() -> None:
    sent = [message_of(vector) for vector in VECTORS["vectors"]]
    stream = b"".join(encode(message) for message in sent)
    reader = FrameReader(limit_bytes=1 << 20)
    found = [decode(p) for at in range(len(stream)) for p in reader.feed(stream[at : at + 1])]
    assert found == sent


@given(st.binary(max_size=200), st.sampled_from(list(FRAMES)))
def test_any_bytes_are_a_message_or_a_wire_error(payload: bytes, codec: str) -> None:
    try:
        message = decode(payload, codec)
    except WireError:
        return
    assert encode(message, codec)[4:] == payload


@given(coded_messages, st.data())
def test_a_message_cut_short_or_lengthened_is_refused(drawn: tuple[Message, str], data: st.DataObject) -> None:
    message, codec = drawn
    payload = encode(message, codec)[4:]
    with pytest.raises(TheirProtocolError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))], codec)
    with pytest.raises(TheirProtocolError):
        decode(payload + b"\0", codec)


# Refusals name the field


def payload_of(**changes: Any) -> bytes:
    values: dict[str, Any] = {"step": 1, "worker_id": 2, "gradients": np.ones(3, "<f4"), "loss": np.float32(0.5)}
    return encode(GradientPayload(**(values | {"correct": 0, "total": 1} | changes)))[4:]


def test_a_count_larger_than_what_remains_is_refused_before_anything_is_allocated() -> None:
    payload = bytearray(payload_of())
    payload[16:24] = struct.pack("<Q", 2**61)
    tracemalloc.start()
    with pytest.raises(TheirProtocolError, match=r"GradientPayload\.gradients needs [\d,]+ bytes, and 32 are left"):
        decode(payload)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_strings_that_are_not_text_and_numbers_that_are_no_message_are_refused() -> None:
    bad = encode(Heartbeat("ab", 1))[4:].replace(b"ab", b"\xff\xfe")
    with pytest.raises(TheirProtocolError, match=r"Heartbeat\.node_id is not UTF-8"):
        decode(bad)
    with pytest.raises(TheirProtocolError, match="no message with the number 99"):
        decode(struct.pack("<I", 99))
    with pytest.raises(TheirProtocolError, match="in neither encoding"):
        codec_of(b"\x07")


def test_we_never_send_what_we_would_refuse() -> None:
    with pytest.raises(OurProtocolError, match="add up to 2, and there are 3 gradients"):
        encode(BlockGradientPayload(1, 1, 1, 1, np.ones(3, "<f4"), np.array([2], "<u4")))
    with pytest.raises(OurProtocolError, match=r"JoinRequest\.gpu_count cannot be sent"):
        encode(JoinRequest("a", -1, "b"))


# Copies and memory


def test_gradients_are_views_of_the_received_buffer() -> None:
    frame = encode(GradientPayload(1, 2, np.arange(1000, dtype="<f4"), np.float32(0), 0, 0))
    (payload,) = FrameReader(1 << 20).feed(frame)
    message = decode(payload)
    assert isinstance(message, GradientPayload)
    assert np.shares_memory(message.gradients, np.frombuffer(payload, np.uint8))
    assert not message.gradients.flags.writeable


def test_a_frame_over_the_limit_is_refused_by_its_prefix_alone() -> None:
    with pytest.raises(TheirProtocolError, match="A frame of 1,001 bytes is longer than 1,000"):
        list(FrameReader(limit_bytes=1000).feed(struct.pack(">I", 1001)))


@given(st.integers(0, 300_000))
def test_a_reader_holds_no_more_than_a_small_multiple_of_what_arrived(received: int) -> None:
    reader = FrameReader(limit_bytes=1 << 32)
    list(reader.feed(struct.pack(">I", 1 << 31) + bytes(received)))
    assert len(reader._buffer) <= max(1 << 16, 2 * received + 2)


def test_an_empty_frame_is_a_payload_of_no_bytes() -> None:
    assert [bytes(p) for p in FrameReader(10).feed(b"\0\0\0\0\0\0\0\1x")] == [b"", b"x"]


# Gradients that are not kept


bulk_messages = coded_messages.filter(lambda drawn: is_bulk(type(drawn[0])))


@given(bulk_messages, st.data())
def test_a_payload_opened_from_its_first_bytes_tells_what_the_whole_one_does(
    drawn: tuple[Message, str], data: st.DataObject
) -> None:
    message, codec = drawn
    payload = memoryview(encode(message, codec)[4:])
    begun = payload[: data.draw(st.integers(4, len(payload)))]
    bulk = open_bulk(begun, len(payload), codec)
    if bulk is None:  # too short to tell
        assert len(begun) < len(payload)
        bulk = open_bulk(payload, len(payload), codec)
    assert bulk is not None and bulk.message is type(message)
    end, (name, dtype) = bulk.start + bulk.nbytes, bulk.field
    values = bulk.fields | bulk.finish(payload[end:]) | {name: np.frombuffer(payload[bulk.start : end], dtype)}
    assert type(message)(**values) == message


def test_an_opened_payload_that_promises_too_much_is_refused() -> None:
    payload = bytearray(payload_of())
    payload[16:24] = struct.pack("<Q", 2**61)
    with pytest.raises(TheirProtocolError, match=r"GradientPayload\.gradients needs [\d,]+ bytes, and 32 are left"):
        open_bulk(memoryview(payload)[:24], len(payload), "bincode")


def test_a_last_field_of_a_later_version_is_sent_only_where_it_says_something() -> None:
    """So a worker of this version sends a host of the version before what it knows, and understands its workers."""
    nothing = np.zeros(0)
    plain = SliceReport(7, nothing.astype("<u4"), nothing, nothing, 0.5, b"")
    before = encode(plain)
    assert before.endswith(struct.pack("<BQ", 0, 0)), "it ends with overflowed and stopped"
    assert decode(before[4:]) == plain and decode(before[4:]).figures == ""  # type: ignore[attr-defined]
    told = replace(plain, figures='{"loss_moved": 0.25}')
    assert decode(encode(told)[4:]) == told and len(encode(told)) > len(before)
    with pytest.raises(TheirProtocolError, match="figures"):
        decode(encode(told)[4:-1])
