"""Tensors in files, whole or in pieces: each number is found where it lies, and nothing else is read."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from potluck.errors import CheckpointError
from potluck.save.checkpoint import write_tensors
from potluck.sharding import ranges
from potluck.sharding.ranges import Ranges
from potluck.sharding.stored import TensorFiles, piece_key

WHOLE = torch.arange(35, dtype=torch.float32).reshape(5, 7)


def in_pieces(folder: Path, cuts: list[tuple[int, int]], name: str = "w") -> list[Path]:
    """One file in a folder of its own for each piece."""
    files = []
    for index, (start, end) in enumerate(cuts):
        key = piece_key(name, start, end)
        file = folder / str(index) / "part.safetensors"
        file.parent.mkdir(parents=True)
        notes = {"spans": {key: (name, (5, 7), start, end)}, "said": {str(index): index}, "tied": {"twin": name}}
        write_tensors(file, {key: WHOLE.reshape(-1)[start:end]}, notes)
        files.append(file)
    return files


@pytest.mark.parametrize(
    "cuts", [[(0, 35)], [(0, 1), (1, 35)], [(20, 35), (3, 20), (0, 3)], [(0, 20), (5, 10), (0, 20), (15, 35)]]
)
def test_any_range_is_read_from_files_wherever_they_are(tmp_path: Path, cuts: list[tuple[int, int]]) -> None:
    with Ranges(in_pieces(tmp_path, cuts)) as source:
        source.check_whole("it")
        assert source.specs == {"w": source.spec("twin"), "twin": source.spec("w")}
        assert torch.equal(source.tensor("twin"), WHOLE)
        for start in range(35):
            for end in range(start, 36):
                assert torch.equal(source.read("w", start, end), WHOLE.reshape(-1)[start:end])
        assert source.notes["said"] == {str(index): index for index in range(len(cuts))}


def test_what_no_file_holds_is_named(tmp_path: Path) -> None:
    with Ranges(in_pieces(tmp_path, [(0, 10), (12, 35)])) as source:
        with pytest.raises(CheckpointError, match="it is not whole: numbers 10 to 12 of w are in none of its files"):
            source.check_whole("it")
        assert torch.equal(source.read("w", 12, 14), torch.tensor([12.0, 13.0]))
        with pytest.raises(CheckpointError, match="Numbers 10 to 13 of w are in none of the files"):
            source.read("w", 8, 13)


def test_every_type_and_shape_is_what_safetensors_reads_and_writes(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "bf16": torch.randn(3, 5).bfloat16(),
        "f64": torch.randn(2, 2, 2, dtype=torch.float64),
        "f8": torch.randn(7).to(torch.float8_e4m3fn),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "long": torch.arange(9),
        "c64": torch.randn(2, dtype=torch.complex64),
        "\u00e4": torch.arange(3).to(torch.uint16),
        "u8": torch.arange(3, dtype=torch.uint8),
        "i16": torch.arange(3, dtype=torch.int16),
    }
    sums = write_tensors(tmp_path / "ours.safetensors", tensors)
    assert sums["bytes"] == (tmp_path / "ours.safetensors").stat().st_size
    save_file(tensors, tmp_path / "theirs.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    theirs = load_file(tmp_path / "ours.safetensors")
    assert set(theirs) == set(tensors)
    for file in ("ours.safetensors", "theirs.safetensors"):
        with Ranges([tmp_path / file]) as source:
            source.check_whole(file)
            for name, tensor in tensors.items():
                for found in (source.tensor(name), theirs[name]):
                    assert found.dtype == tensor.dtype and found.shape == tensor.shape
                    assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_it_goes_straight_into_memory_that_is_there_or_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 12)
    sizes: list[int] = []
    read_bytes = TensorFiles.read_bytes
    monkeypatch.setattr(
        TensorFiles, "read_bytes", lambda self, b, name, start: (sizes.append(len(b)), read_bytes(self, b, name, start))
    )
    with Ranges(in_pieces(tmp_path, [(0, 10), (10, 35)])) as source:
        there = torch.zeros(40)
        source.read_into(there[2:37], "w")
        assert torch.equal(there[2:37], WHOLE.reshape(-1)) and sizes == [140]
        scattered = torch.zeros(35, 2)[:, 0]
        sizes.clear()
        source.read_into(scattered, "w")
        assert torch.equal(scattered, WHOLE.reshape(-1)) and max(sizes) == 12
        transposed = torch.zeros(7, 5).T
        source.fill(transposed, "w")
        assert torch.equal(transposed, WHOLE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"{]}",
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                json.dumps({"a": told}).encode()
                for told in (
                    3,
                    {},
                    {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": "many", "data_offsets": [0, 4]},
                )
            )
        ),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "odd.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"Cannot read .*odd\.safetensors"):
        Ranges([tmp_path / "odd.safetensors"])


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    (file,) = in_pieces(tmp_path, [(0, 35)])
    file.write_bytes(file.read_bytes()[:-10])
    with Ranges([file]) as source, pytest.raises(CheckpointError, match="shorter than it says"):
        source.tensor("w")
