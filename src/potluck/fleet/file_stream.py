"""A folder of files as a stream of chunks, and back: how a checkpoint travels to a newcomer, or to the host's disk.

Knows nothing of what is in the files; the receiver checks a checkpoint's own checksums. The protocol calls such a
stream a parcel.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from potluck.errors import TheirProtocolError
from potluck.fleet.phases import enter_phase
from potluck.wire.messages import Message, StateChunk, StateMore

CHUNK_BYTES = 1 << 20
MAX_FILES = 64
STATE_TIMES, STATE_BYTES = 64, 1 << 24
"""A parcel has at most STATE_TIMES the bytes of the model, for the optimizer's state, and STATE_BYTES more."""
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def stream_header(folder: Path) -> str:
    """The header: every file's name and size, as JSON."""
    return json.dumps([[file.name, file.stat().st_size] for file in sorted(folder.iterdir()) if file.is_file()])


def stream_chunks(folder: Path, header: str) -> Iterator[bytes]:
    """The files that the header lists, end to end."""
    for name, _ in json.loads(header):
        with (folder / name).open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                enter_phase("chunk", 0)
                yield data


class FileStreamReceiver:
    """Writes a parcel's files into a folder. `limit_bytes` is the most that it may hold."""

    def __init__(self, folder: Path, header: str, limit_bytes: int, limit_files: int = MAX_FILES) -> None:
        self.folder = folder
        self.files = stream_files(header, limit_files)
        self.total = sum(size for _, size in self.files)
        self.received = 0
        if self.total > limit_bytes:
            raise TheirProtocolError(f"A parcel of {self.total:,} bytes is larger than {limit_bytes:,}, the most here.")
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = None
        self._left = 0
        self._rest = iter(self.files)
        self._open_next()

    @property
    def is_complete(self) -> bool:
        return self._file is None

    def feed(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            if self._file is None:
                raise TheirProtocolError(f"The parcel is followed by {len(rest):,} bytes too many.")
            piece = rest[: self._left]
            self._file.write(piece)
            rest = rest[len(piece) :]
            self._left -= len(piece)
            self.received += len(piece)
            if not self._left:
                self._open_next()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_next(self) -> None:
        """Opens the next file; empty files are made on the way."""
        self.close()
        for name, size in self._rest:
            self._file, self._left = (self.folder / name).open("wb"), size
            if size:
                return
            self.close()


def stream_files(header: str, limit: int = MAX_FILES) -> list[tuple[str, int]]:
    """Every file's name and size, checked."""
    try:
        files = [(str(name), int(size)) for name, size in json.loads(header)]
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise TheirProtocolError("StateBegin.header is not a list of files.") from None
    if not 0 < len(files) <= limit:
        raise TheirProtocolError(f"StateBegin.header lists {len(files)} files; between 1 and {limit} are taken.")
    for name, size in files:
        if not _PLAIN.fullmatch(name) or size < 0:
            raise TheirProtocolError(f"StateBegin.header names {name[:100]!a}, which is no plain file.")
    if len({name for name, _ in files}) < len(files):
        raise TheirProtocolError("StateBegin.header names a file twice.")
    return files


def most_bytes(model_bytes: int) -> int:
    """The most bytes of a parcel for a model whose weights and buffers take `model_bytes`."""
    return STATE_TIMES * model_bytes + STATE_BYTES


@dataclass
class _Outgoing:
    transfer: int
    upcoming: Message
    messages: Iterator[Message]
    done: Callable[[], None]
    credit: int = 1
    """Messages that may leave: the first need not be asked for."""
    cancelled: bool = False


class Parcels:
    """Parcels that leave over one connection, chunk by chunk, as the other end takes them."""

    def __init__(self) -> None:
        self._all: list[_Outgoing] = []

    def add(self, transfer: int, begin: Message, chunks: Iterator[bytes], done: Callable[[], None]) -> None:
        messages = (StateChunk(transfer, data) for data in chunks)
        self._all.append(_Outgoing(transfer, begin, messages, done))

    def on_more(self, more: StateMore) -> None:
        """The other end takes more chunks of the first parcel of that number, or wants no more of it."""
        for parcel in self._all:
            if parcel.transfer == more.transfer:
                parcel.credit += more.chunks
                parcel.cancelled |= not more.chunks  # for good: late credit is for one that has left before it
                break

    def next(self) -> Message | None:
        """Return the next chunk, of parcels with one number one after the other: else credit for one would be taken for
        another's."""
        waiting: set[int] = set()
        for parcel in list(self._all):
            if parcel.transfer in waiting:
                continue
            if parcel.cancelled:
                self._end(parcel)
            elif not parcel.credit:
                waiting.add(parcel.transfer)
            else:
                message, following = parcel.upcoming, next(parcel.messages, None)
                parcel.credit -= 1
                if following is not None:
                    parcel.upcoming = following
                else:  # at once: credit may never come for what a host could not write, and the next would wait for it
                    self._end(parcel)
                return message
        return None

    def _end(self, parcel: _Outgoing) -> None:
        self._all.remove(parcel)
        parcel.done()

    def drop(self) -> None:
        """The connection is gone."""
        for parcel in list(self._all):
            self._end(parcel)
