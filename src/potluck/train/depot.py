"""Depot: a store as the meeting place of a run whose workers have no connection to each other.

It gives each worker its link and its channel, and keeps what the worker needs to go on after it was killed: its own
part of the model, where it stands, and what it was told before the first step. Everything it has been sent since then
is still in the store, so it does the same steps again and finds itself where the others wait for it.
"""

import base64
import json
import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.errors import StoreError
from potluck.shard.ranges import Ranges
from potluck.shard.sharded import Sharded
from potluck.stages.datastore import StoreChannel
from potluck.stages.protocol import DataStore
from potluck.stages.store import Store
from potluck.train import parts
from potluck.train.checkpoint import MODEL, OPTIMIZER, write_tensors
from potluck.train.link import Done, Here, Pending, Rows
from potluck.train.store_link import StoreLink

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SIZES = struct.Struct("<3Q")
"""Of what a worker keeps: JSON, model, optimizer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a worker had kept of itself."""

    notes: dict[str, Any]
    files: dict[str, bytes]

    def load_into(self, sharded: Sharded) -> None:
        with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
            paths = {stem: Path(folder) / f"{stem}.safetensors" for stem in self.files}
            for stem, data in self.files.items():
                paths[stem].write_bytes(data)
            with Ranges([paths[MODEL]]) as model, Ranges([paths[OPTIMIZER]]) as optimizer:
                parts.load_model_part(sharded, model)
                parts.load_optimizer_part(sharded, optimizer, optimizer.notes)
        sharded.share()
        sharded.settle()


class Depot:
    def __init__(self, protocol: DataStore, rank: int, world: int, patience_s: float, *, keeps: bool = True) -> None:
        """`keeps`: a worker that is killed and started again goes on; else each object goes once it was read."""
        self._protocol, self._patience_s = protocol, patience_s
        self.every = protocol.keep_every if keeps else None
        """Steps between two times that a worker keeps itself."""
        self._room = f"worker-{rank}"
        """All that this worker puts there itself has a key below this."""
        self._key = f"{self._room}/state"
        self._states = self._open("states")
        self.kept = self._look()
        inner = StoreLink(self._open("link"), rank, world, keeps=keeps)
        told: list[Any] | None = None
        if self.kept is not None:
            inner.stand_at(self.kept.notes["position"])
            told = self.kept.notes["told"]
        self.link = Rehearsed(inner, _Log(told))
        self._channel: StoreChannel | None = None

    def _open(self, run: str) -> Store:
        protocol = self._protocol
        return Store(protocol.url, run=run, generation=protocol.generation, patience_s=self._patience_s)

    def open_channel(self, lane: int, stage: int, device: torch.device) -> StoreChannel:
        self._channel = StoreChannel(self._open(f"lane-{lane}"), stage, device=device)
        return self._channel

    def keep(self, sharded: Sharded, notes: dict[str, Any], passes: int) -> None:
        """Killed, this worker goes on from here, and what came before may go. `passes`: of micro-batches so far."""
        self.link.log.seal()
        position = self.link.inner.position
        told = notes | {"position": position, "told": self.link.log.told}
        self._put(sharded, json.dumps(told).encode())
        if self._channel is not None:
            self._channel.consumed(passes)
        self.link.inner.durable(position)

    def forget(self, passes: int) -> None:
        """What came in these passes may go, where nothing is kept."""
        if self._channel is not None:
            self._channel.consumed(passes)

    # Files that travel

    def give_files(self, key: str, folder: Path) -> None:
        """All files of a folder, as one object."""
        files = sorted(path for path in folder.iterdir() if path.is_file())
        data = [path.read_bytes() for path in files]
        names = json.dumps([[path.name, len(each)] for path, each in zip(files, data, strict=True)]).encode()
        self._states.put(key, [memoryview(each) for each in (names, *data)], struct.pack("<Q", len(names)))

    def take_files(self, key: str, folder: Path, awaited: str) -> None:
        """Waits for them, and puts them into a folder."""
        found = bytearray()
        cut: list[int] = []

        def room(about: bytes, size: int) -> memoryview:
            if len(about) != 8 or (length := struct.unpack("<Q", about)[0]) > size:
                raise StoreError(f"The files {key} in {self._states.url} are damaged. Start the run anew.")
            found[:], cut[:] = bytes(size), [length]
            return memoryview(found)

        self._states.wait_for(key, room, awaited)
        names, rest = found[: cut[0]], memoryview(found)[cut[0] :]
        for name, size in json.loads(names):
            if not _FILE.fullmatch(name) or not 0 <= size <= len(rest):
                raise StoreError(f"The files {key} in {self._states.url} are damaged. Start the run anew.")
            (folder / name).write_bytes(rest[:size])
            rest = rest[size:]

    def drop_files(self, keys: Sequence[str]) -> None:
        self._states.delete(keys)

    def end(self) -> None:
        """The run has ended: nothing of this worker stays behind."""
        self.link.inner.durable()
        if self._channel is not None:
            self._channel.end()
        # Also files that nobody took since they were given twice, and what was being written when we were killed.
        self._states.sweep(self._room, lambda key: True)
        self._states.tidy()
        self._states.close()

    def close(self) -> None:
        """Everything stays, for the next who is this worker."""
        if self._channel is not None:
            self._channel.close()
        self._states.close()

    def _put(self, sharded: Sharded, notes: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
            files: list[bytes] = []
            for part in (parts.model_part(sharded), parts.optimizer_part(sharded)):
                file = Path(folder) / f"{len(files)}.safetensors"
                write_tensors(file, part.tensors, part.notes)
                files.append(file.read_bytes())
        payload = [memoryview(data) for data in (notes, *files)]
        self._states.put(self._key, payload, SIZES.pack(*map(len, payload)))

    def _look(self) -> Kept | None:
        found = bytearray()
        cuts: list[int] = []

        def room(about: bytes, size: int) -> memoryview:
            if len(about) != SIZES.size or sum(sizes := SIZES.unpack(about)) != size:
                raise StoreError(
                    f"What {self._room} kept of itself in {self._states.url} is damaged. Start the run anew, with"
                    " another stages.protocol.generation."
                )
            found[:], cuts[:] = bytes(size), sizes
            return memoryview(found)

        if not self._states.get(self._key, room):
            return None
        notes, model, optimizer = (bytes(part) for part in _split(found, cuts))
        return Kept(json.loads(notes), {MODEL: model, OPTIMIZER: optimizer})


def _split(data: bytearray, sizes: Sequence[int]) -> list[memoryview]:
    view, found = memoryview(data), []
    for size in sizes:
        found.append(view[:size])
        view = view[size:]
    return found


class _Log:
    """What workers told each other before the first step. A worker that starts again hears it from here."""

    def __init__(self, told: list[Any] | None) -> None:
        self.told = told or []
        self._at = 0 if told is not None else None
        self._is_open = True

    def hear(self, ask: Callable[[], Any]) -> Any:
        """An answer that is JSON; afterwards nothing is logged."""
        if not self._is_open:
            return ask()
        if self._at is None:
            self.told.append(ask())
            return self.told[-1]
        self._at += 1
        return self.told[self._at - 1]

    def change(self, start: Callable[[], Pending]) -> Pending:
        """What changes tensors: those that were kept are as they were after it."""
        if self._is_open and self._at is not None:
            return Done()
        return start()

    def seal(self) -> None:
        self._is_open = False


class Rehearsed:
    """A StoreLink whose operations before the first step are heard from a log, when a worker starts again."""

    def __init__(self, inner: StoreLink, log: _Log) -> None:
        self.inner, self.log = inner, log
        self.rank, self.world = inner.rank, inner.world

    def part(self, groups: Sequence[Sequence[int]]) -> "Rehearsed":
        return Rehearsed(self.inner.part(groups), self.log)

    def start_sum(self, tensor: Tensor) -> Pending:
        return self.log.change(lambda: self.inner.start_sum(tensor))

    def gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        rows: list[list[float]] = self.log.hear(lambda: self.inner.gather_rows(row))
        return rows

    def start_gather(self, row: Sequence[float]) -> Rows:
        if self.log._is_open:
            return Here(self.gather_rows(row))
        return self.inner.start_gather(row)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        told = self.log.hear(lambda: [base64.b64encode(each).decode() for each in self.inner.gather_bytes(data)])
        return [base64.b64decode(each) for each in told]

    def broadcast(self, tensor: Tensor) -> None:
        def start() -> Pending:
            self.inner.broadcast(tensor)
            return Done()

        self.log.change(start).wait()

    def start_pass(self, out: Tensor, heard: Tensor) -> Pending:
        return self.log.change(lambda: self.inner.start_pass(out, heard))

    def close(self) -> None:
        self.inner.close()
