"""A folder as a stream of chunks: however it is cut, it comes out whole, and whatever is no parcel is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.errors import TheirProtocolError
from potluck.fleet import file_stream
from potluck.fleet.file_stream import MAX_FILES, FileStreamReceiver, Parcels, stream_chunks, stream_header
from potluck.wire.messages import StateBegin, StateChunk, StateMore

contents = st.dictionaries(
    st.text("abcxyz019-_.", min_size=1, max_size=12).filter(lambda name: not name.startswith(".")),
    st.binary(max_size=300),
    min_size=1,
    max_size=5,
)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(files=contents, cut=st.integers(1, 97))
def test_a_parcel_comes_out_whole_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], cut: int
) -> None:
    place = tmp_path_factory.mktemp("parcel")
    sent = write(place / "sent", files)
    header = stream_header(sent)
    stream = b"".join(stream_chunks(sent, header))
    unpacker = FileStreamReceiver(place / "received", header, limit_bytes=1 << 20)
    assert unpacker.total == len(stream) == sum(map(len, files.values()))
    for at in range(0, len(stream), cut):
        assert not unpacker.is_complete
        unpacker.feed(memoryview(stream)[at : at + cut])
        assert unpacker.received == min(at + cut, len(stream))
    assert unpacker.is_complete
    assert read(place / "received") == files
    unpacker.close()


def test_chunks_are_no_longer_than_a_message_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stream, "CHUNK_BYTES", 10)
    sent = write(tmp_path / "sent", {"a": b"x" * 25, "b": b"", "c": b"y" * 10})
    assert [len(chunk) for chunk in stream_chunks(sent, stream_header(sent))] == [10, 10, 5, 10]


def test_folders_within_are_left_out(tmp_path: Path) -> None:
    sent = write(tmp_path / "sent", {"a": b"1"})
    (sent / "folder").mkdir()
    assert json.loads(stream_header(sent)) == [["a", 1]]


def test_files_of_no_bytes_are_made_at_once(tmp_path: Path) -> None:
    unpacker = FileStreamReceiver(tmp_path / "to", '[["a", 0], ["b", 0]]', 10)
    assert unpacker.is_complete
    assert read(tmp_path / "to") == {"a": b"", "b": b""}


def test_more_bytes_than_were_announced_are_refused(tmp_path: Path) -> None:
    unpacker = FileStreamReceiver(tmp_path / "to", '[["a", 3]]', 10)
    with pytest.raises(TheirProtocolError, match="followed by 2 bytes too many"):
        unpacker.feed(b"12345")
    assert read(tmp_path / "to") == {"a": b"123"}
    unpacker.feed(b"")
    with pytest.raises(TheirProtocolError, match="followed by 1 bytes too many"):
        unpacker.feed(b"6")


def test_a_parcel_that_ends_early_is_not_complete(tmp_path: Path) -> None:
    unpacker = FileStreamReceiver(tmp_path / "to", '[["a", 3], ["b", 1]]', 10)
    unpacker.feed(b"123")
    assert not unpacker.is_complete
    unpacker.close()


def test_a_parcel_larger_than_allowed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TheirProtocolError, match="11 bytes is larger than 10, the most here"):
        FileStreamReceiver(tmp_path / "to", '[["a", 6], ["b", 5]]', 10)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "1",
        "null",
        '"ab"',
        "{}",
        "[]",
        "[1]",
        "[[]]",
        '[["a"]]',
        '[["a", 1, 2]]',
        '[["a", "b"]]',
        '[["a", null]]',
        '[["a", [1]]]',
        '[["a", -1]]',
        '[["a", NaN]]',
        json.dumps([[f"f{n}", 1] for n in range(MAX_FILES + 1)]),
    ],
)
def test_a_header_that_is_no_list_of_files_is_refused(header: str, tmp_path: Path) -> None:
    with pytest.raises(TheirProtocolError, match=r"^StateBegin\.header"):
        FileStreamReceiver(tmp_path / "to", header, 1000)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/a", "a/b", "a/", "./a", ".hidden", "a/../../b"])
def test_a_name_that_is_no_plain_files_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TheirProtocolError, match="which is no plain file"):
        FileStreamReceiver(tmp_path / "to", json.dumps([["good", 1], [name, 1]]), 1000)
    assert not (tmp_path / "to").exists() and [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "header",
    [
        '[["a", Infinity]]',
        '[["a\\u0000b", 1]]',
        '[["\\ud800", 1]]',
        json.dumps([["a" * 300, 1]]),
        json.dumps([["a", 1], ["a", 2]]),
    ],
    ids=["infinite size", "zero byte", "half a character", "name too long", "name twice"],
)
def test_a_header_that_no_disk_could_hold_is_refused(header: str, tmp_path: Path) -> None:
    with pytest.raises(TheirProtocolError, match=r"^StateBegin\.header"):
        FileStreamReceiver(tmp_path / "to", header, 1000)


def test_a_bottomless_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TheirProtocolError, match=r"^StateBegin\.header"):
        FileStreamReceiver(tmp_path / "to", "[" * 100_000, 1000)


@given(st.text(max_size=40) | st.lists(st.lists(st.text(max_size=5) | st.floats() | st.none())).map(json.dumps))
def test_any_header_is_a_list_of_files_or_a_refusal(header: str) -> None:
    try:
        files = file_stream.stream_files(header)
    except TheirProtocolError:
        return
    assert all(size >= 0 and name and "/" not in name for name, size in files)


def test_a_parcel_of_which_all_has_left_is_not_in_the_way_of_the_next() -> None:
    """A host that could not write it pays for none of its chunks, and needs no more of them."""
    ended: list[int] = []
    parcels = Parcels()
    for number in range(2):
        begin = StateBegin(0, number, "[]")
        parcels.add(0, begin, iter([b"a", b"b", b"c", b"d"]), lambda number=number: ended.append(number))
    assert isinstance(parcels.next(), StateBegin)
    assert parcels.next() is None  # before there is credit
    parcels.on_more(StateMore(0, 4))
    assert [parcels.next() for _ in range(4)] == [StateChunk(0, data) for data in (b"a", b"b", b"c", b"d")]
    assert ended == [0]
    assert parcels.next() == StateBegin(0, 1, "[]")


def test_late_credit_for_the_last_parcel_does_not_revive_one_that_the_host_refused() -> None:
    """It would wait for more of it, and all that follow would wait behind it."""
    ended: list[int] = []
    parcels = Parcels()
    for number in range(3):
        parcels.add(0, StateBegin(0, number, "[]"), iter([b"a", b"b"]), lambda number=number: ended.append(number))
    parcels.on_more(StateMore(0, 4))
    assert [type(parcels.next()) for _ in range(4)] == [StateBegin, StateChunk, StateChunk, StateBegin]
    parcels.on_more(StateMore(0, 0))
    parcels.on_more(StateMore(0, 1))  # a chunk of the first is written only now
    assert parcels.next() == StateBegin(0, 2, "[]") and ended == [0, 1]
