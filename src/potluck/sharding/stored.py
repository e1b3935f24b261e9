"""Tensors in safetensors files, whole or in pieces: where each of their numbers lies. Imports no torch.

A tensor lies whole under its name, or in pieces that may be in many files. A piece is a flat tensor of its own, called
`name[start:end]`; the file's notes say of which tensor, and which numbers of it, laid flat. Files say all that is
needed to read them, so any files that hold all the pieces between them will do, wherever they are.

Numbers of complex128, for which safetensors has no name, lie as pairs of F64, in one more dimension; the notes say so.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from potluck.errors import CheckpointError

SIZES = {
    "C128": 16, "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2,
    "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one number, by the name of its type in a file; in the order in which safetensors itself writes them."""
NOTES = "potluck"
"""Under it a file's metadata has our notes, as JSON: `spans`, `tied`, `pairs`, and what else its writer had to say."""
MOST_HEADER_BYTES = 1 << 30

Spans = dict[str, tuple[str, tuple[int, ...], int, int]]
"""Name and shape of a piece's tensor, and start and end of its numbers, by the piece's key."""


def piece_key(name: str, start: int, end: int) -> str:
    return f"{name}[{start}:{end}]"


@dataclass(frozen=True, slots=True)
class Piece:
    start: int
    end: int
    file: int
    """Index of its file."""
    offset: int
    """Offset of its first byte in the file."""


@dataclass(slots=True)
class Stored:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: str
    """The dtype's name in the file, such as F32."""
    pieces: list[Piece] = field(default_factory=list)
    """The tensor's pieces, by their start; some may hold the same numbers."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def first_gap(self) -> tuple[int, int] | None:
        """Numbers that no file has."""
        reached = 0
        for piece in self.pieces:
            if piece.start > reached:
                return reached, piece.start
            reached = max(reached, piece.end)
        return (reached, self.size) if reached < self.size else None


class TensorFiles:
    """Files as one source of tensors."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = [Path(file) for file in files]
        self.tensors: dict[str, Stored] = {}
        """By name; tied ones under each of theirs."""
        self.notes: dict[str, Any] = {}
        """What the files' writers had to say; where they said parts of the same, they are joined."""
        self._open: dict[int, IO[bytes]] = {}
        tied: dict[str, str] = {}
        for number, file in enumerate(self.files):
            notes = self._take_in(number, file)
            tied |= notes.pop("tied", {})
            _join(self.notes, notes)
        for stored in self.tensors.values():
            stored.pieces.sort(key=lambda piece: (piece.start, -piece.end))
        for name, first in tied.items():
            if first in self.tensors:
                self.tensors[name] = self.tensors[first]

    def check_whole(self, source: str) -> None:
        for name, stored in self.tensors.items():
            if (gap := stored.first_gap()) is not None:
                raise CheckpointError(
                    f"{source} is not whole: numbers {gap[0]:,} to {gap[1]:,} of {name} are in none of its files."
                )

    def read_bytes(self, buffer: memoryview, name: str, start: int) -> None:
        """Fills the buffer with a tensor's numbers from `start` on."""
        stored = self.tensors[name]
        width = SIZES[stored.dtype]
        end = start + len(buffer) // width
        at = start
        for piece in stored.pieces:
            if piece.start <= at < piece.end and at < end:
                upto = min(end, piece.end)
                where = piece.offset + (at - piece.start) * width
                self._read(buffer[(at - start) * width : (upto - start) * width], piece.file, where)
                at = upto
        if at < end:
            raise CheckpointError(f"Numbers {at:,} to {end:,} of {name} are in none of the files.")

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_in(self, number: int, file: Path) -> dict[str, Any]:
        """Notes where its tensors are, and returns its other notes."""
        try:
            header, begin = _read_header(file)
            notes = json.loads(header.pop("__metadata__", {}).get(NOTES, "{}"))
            spans, pairs = notes.pop("spans", {}), notes.pop("pairs", [])
            for key in pairs:
                if (header[key]["dtype"], header[key]["shape"][-1:]) != ("F64", [2]):
                    raise ValueError(f"{key} is not of pairs")
                header[key] |= {"dtype": "C128", "shape": header[key]["shape"][:-1]}
            for key, entry in header.items():
                name, shape, start, end = spans.get(key) or (key, entry["shape"], 0, math.prod(entry["shape"]))
                stored = self.tensors.setdefault(name, Stored(tuple(shape), entry["dtype"]))
                low, high = entry["data_offsets"]
                if (stored.shape, stored.dtype) != (tuple(shape), entry["dtype"]):
                    raise ValueError(f"{name} is not of one shape and type in all files")
                if high - low != (end - start) * SIZES[stored.dtype] or not 0 <= start <= end <= stored.size:
                    raise ValueError(f"{key} is not of the size that it says")
                stored.pieces.append(Piece(start, end, number, begin + low))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise CheckpointError(f"Cannot read {file}: {reason}.") from None
        return dict(notes)

    def _read(self, buffer: memoryview, number: int, offset: int) -> None:
        path = self.files[number]
        try:
            if number not in self._open:
                self._open[number] = path.open("rb", buffering=0)
            file = self._open[number]
            file.seek(offset)
            while buffer:
                count = file.readinto(buffer)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{path} is shorter than it says.")
                buffer = buffer[count:]
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from None


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The beginning of a safetensors file, and the order in which its tensors must follow."""

    data: bytes
    order: list[str]
    total_bytes: int
    """Size of the file."""


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], notes: Mapping[str, Any] | None = None
) -> SafetensorsHeader:
    """`tensors`: type and shape of each. Wide numbers come first, so that none lies across its own width.

    Without notes, these are the very bytes that safetensors' own save_file writes, unless something is complex128.
    """
    place = {dtype: number for number, dtype in enumerate(SIZES)}
    order = sorted(tensors, key=lambda name: (place[tensors[name][0]], name))
    pairs = [name for name in order if tensors[name][0] == "C128"]
    notes = {**(notes or {}), "pairs": pairs} if pairs else notes
    header: dict[str, Any] = {"__metadata__": {NOTES: json.dumps(notes)}} if notes else {}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        size = math.prod(shape) * SIZES[dtype]
        dtype, shape = ("F64", (*shape, 2)) if dtype == "C128" else (dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return SafetensorsHeader(struct.pack("<Q", len(text)) + text, order, 8 + len(text) + at)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """The system writes 2 GB at a time at most."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read a file's header: what it says of its tensors, and where their bytes begin."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        if size > MOST_HEADER_BYTES:
            raise ValueError("its header is no header")
        return json.loads(opened.read(size)), 8 + size


def _join(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(whole.get(key), dict):
            whole[key].update(value)
        else:
            whole[key] = value
