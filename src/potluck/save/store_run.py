"""StoreRun: a store as the meeting place of a run whose workers have no connection to each other.

StoreSaves: their checkpoints. They share no disk: the first keeps them, and the others' parts travel to it. On the disk
they are the same as any other: the whole model's, in files that each hold some pieces.
"""

import itertools
import json
import struct
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from potluck.errors import CheckpointError, StoreError, TheirProtocolError
from potluck.events import EventLog
from potluck.fleet.file_stream import FileStreamReceiver, stream_chunks, stream_header
from potluck.link.link import Alone, Link, ask_first
from potluck.link.store_link import StoreLink
from potluck.save import checkpoint_folder, parts, state
from potluck.save.checkpoint import Share, Snapshot, new_aside, tensor_chunks, write_share, write_together
from potluck.save.checkpoint_folder import MODEL, OPTIMIZER
from potluck.save.saves import KeptTensors, Saves, Standing, take_snapshot, together
from potluck.sharding.ranges import Ranges
from potluck.sharding.sharded import Sharded
from potluck.stages.datastore import StoreChannel
from potluck.stages.protocol import DataStore
from potluck.store.sessions import StoreSession, Tenant, move_in
from potluck.store.store import Store

if TYPE_CHECKING:
    from potluck.replica.frozen_base import FrozenBase
    from potluck.replica.replica import Replica

_LENGTH = struct.Struct("<Q")
"""Length of the list of files with which an object of files begins."""
NOTES = "notes.json"


@dataclass(frozen=True, slots=True)
class StoredProgress:
    """The progress that a worker had kept of itself."""

    notes: dict[str, Any]
    files: "_Files"

    def load_into(self, sharded: Sharded, base: "FrozenBase | None") -> None:
        with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
            self.files.unpack(Path(folder))
            with Ranges([Path(folder) / _file(MODEL)]) as model, Ranges([Path(folder) / _file(OPTIMIZER)]) as optimizer:
                without = parts.check_left_out(base, self.notes, model.tensors, "What this worker had kept of itself")
                parts.load_part(sharded, model, optimizer, optimizer.notes, without)
        sharded.share()


class StoreRun:
    def __init__(self, protocol: DataStore, rank: int, world: int, patience_s: float, *, keeps: bool = True) -> None:
        """`keeps`: a worker that is killed and started again resumes; otherwise objects go once they were read."""
        self._protocol, self._patience_s = protocol, patience_s
        self.every = protocol.keep_every if keeps else None
        """Steps between two times that a worker keeps itself."""
        self._room = f"worker-{rank}"
        """All that this worker puts there itself has a key below this."""
        self._key = f"{self._room}/state"
        self._states, self._hall = self._open("states"), self._open("link")
        self.kept: StoredProgress | None = None
        self._run = ""
        """The id of the run whose store this is, once that is ours."""
        self.link = StoreLink(rank, world, keeps=keeps)
        self.link.log.is_open = self.every is not None
        self._channel: StoreChannel | None = None

    def meet(self, tenant: Tenant) -> None:
        """Makes this worker's place its own, if the store is this run's or nobody's; else another run is there."""
        rank = self.link.rank
        self._run = move_in(self._hall, tenant, rank)
        session = StoreSession(self._hall, f"worker-{rank}", f"worker {rank}")
        self.kept = self._look()  # once the place is ours: the one before us may yet have kept itself
        self.link.open(session)
        if self.kept is not None:
            self.link.stand_at(self.kept.notes["position"])
            self.link.log.replay(self.kept.notes["told"])

    def _open(self, run: str) -> Store:
        protocol = self._protocol
        return Store(protocol.url, run=run, generation=protocol.generation, patience_s=self._patience_s)

    def open_channel(self, lane: int, stage: int, device: torch.device) -> StoreChannel:
        self._channel = StoreChannel(self._open(f"lane-{lane}"), stage, device=device)
        return self._channel

    def keep(self, sharded: Sharded, notes: dict[str, Any], passes: int, without: Container[str] = ()) -> None:
        """If it is killed, this worker resumes here, and what came before may go. `passes`: of micro-batches so far.
        `without`: entries of the model's state_dict that are left out."""
        self.link.log.is_open = False
        position = self.link.position
        told = notes | {"position": position, "told": self.link.log.told, "run": self._run}
        model, optimizer = parts.model_part(sharded, without=without), parts.optimizer_part(sharded)
        chunks = {
            _file(MODEL): list(tensor_chunks(model.tensors, model.notes)),
            NOTES: [memoryview(json.dumps(told).encode())],
            _file(OPTIMIZER): list(tensor_chunks(optimizer.tensors, optimizer.notes)),
        }
        sizes = [[name, sum(map(len, data))] for name, data in chunks.items()]
        # Before anything that came earlier may go: a worker that is killed in between resumes from its older state, and
        # reads that once more.
        self._give(self._key, json.dumps(sizes), itertools.chain.from_iterable(chunks.values()))
        if self._channel is not None:
            self._channel.consumed(passes)
        self.link.durable(position)

    def forget(self, passes: int) -> None:
        """Let go of what came in these passes, where nothing is kept."""
        if self._channel is not None:
            self._channel.consumed(passes)

    # Files that travel

    def give_files(self, key: str, folder: Path) -> None:
        """All files of a folder, as one object."""
        header = stream_header(folder)
        self._give(key, header, map(memoryview, stream_chunks(folder, header)))

    def _give(self, key: str, header: str, chunks: Iterable[memoryview]) -> None:
        data = [memoryview(header.encode()), *filter(len, chunks)]
        self._states.put(key, data, _LENGTH.pack(len(data[0])))

    def take_files(self, key: str, folder: Path, awaited: str) -> None:
        """Waits for them, and puts them into a folder."""
        arrived = _Files(f"The files {key} in {self._states.url}")
        self._states.wait_for(key, arrived.room, awaited)
        arrived.unpack(folder)

    def drop_files(self, keys: Sequence[str]) -> None:
        self._states.delete(keys)

    def end(self) -> None:
        """The run has ended: nothing of this worker stays behind."""
        if not self._run:
            self.close()
            return
        self.link.durable()  # first: until they hear of it, the others keep what they gave for a successor of ours
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
        if not self._run:
            self._hall.close()

    def _look(self) -> StoredProgress | None:
        arrived = _Files(f"What {self._room} kept of itself in {self._states.url}")
        if not self._states.get(self._key, arrived.room):
            return None
        with tempfile.TemporaryDirectory(prefix="potluck-") as folder:
            arrived.unpack(Path(folder))
            kept = StoredProgress(json.loads((Path(folder) / NOTES).read_text()), arrived)
        if kept.notes.get("run", self._run) != self._run:
            raise StoreError(
                f"{self._states.url} holds what {self._room} kept of another run than the one that is there now. Give"
                " this run a place of its own with stages.protocol.url, or empty that one."
            )
        return kept


def _file(stem: str) -> str:
    return f"{stem}.safetensors"


class _Files:
    """An object of files as it arrives: their names and sizes, then one after the other."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._data = bytearray()
        self._length = 0

    def room(self, about: bytes, size: int) -> memoryview:
        if len(about) != _LENGTH.size or (length := _LENGTH.unpack(about)[0]) > size:
            raise self._damaged()
        self._data, self._length = bytearray(size), length
        return memoryview(self._data)

    def unpack(self, folder: Path) -> None:
        header, data = self._data[: self._length], memoryview(self._data)[self._length :]
        try:
            unpacker = FileStreamReceiver(folder, header.decode(), len(data), limit_files=len(header))
            unpacker.feed(data)
        except (TheirProtocolError, UnicodeDecodeError):
            raise self._damaged() from None
        if not unpacker.is_complete:
            unpacker.close()
            raise self._damaged()

    def _damaged(self) -> StoreError:
        return StoreError(
            f"{self._what} cannot be used: damaged. Start the run anew, with another stages.protocol.generation."
        )


RESUME = "worker-0/resume"


def _part(rank: int, step: int) -> str:
    """A worker's own part of a checkpoint, among what is its own in the store."""
    return f"worker-{rank}/part-{step}"


class StoreSaves(Saves):
    def __init__(self, link: Link, events: EventLog, run: StoreRun) -> None:
        super().__init__(link, events)
        self._run = run

    def save(self, folder: Path, replica: "Replica", standing: Standing, keep_last: int, kept: KeptTensors) -> None:
        """Returns once it is on the first worker's disk. What one of them cannot do is raised on all."""
        randoms = self._link.gather_bytes(state.random_state())
        without, base_notes = parts.leave_out(replica, self._link)
        part = parts.saved_part(replica)
        take = partial(take_snapshot, part, standing | base_notes, randoms, kept, without)
        together(self._link, lambda: self._save(folder, part.writer.world, standing["step"], keep_last, take))

    def _save(self, folder: Path, world: int, step: int, keep_last: int, take: Callable[[Share], Snapshot]) -> None:
        rank, started = self._link.rank, time.perf_counter()
        if rank == 0:
            share = Share(0, world, new_aside(folder, step))
            snapshot = take(share)
            for other in range(1, world):
                self._run.take_files(_part(other, step), share.aside, f"worker {other}'s part of the checkpoint")
            place = write_together(folder, share, snapshot, lambda: True)
            checkpoint_folder.prune(folder, keep_last, place)
            self._saved(step, time.perf_counter() - started)(place)
            # Once the checkpoint stands: a first worker that is killed before takes the parts from there again.
            self._run.drop_files([_part(other, step) for other in range(1, world)])
        elif rank < world:  # another replica holds the same parts, and its ranks write them
            with tempfile.TemporaryDirectory(prefix="potluck-") as aside:
                share = Share(rank, world, Path(aside))
                write_share(share, take(share))
                self._run.give_files(_part(rank, step), share.aside)

    def load(self, folder: Path, replica: "Replica", check: Callable[[Path, Standing], None]) -> Standing | None:
        standing = super().load(folder, replica, check)
        if standing is not None and self._link.rank == 0:
            self._run.drop_files([RESUME])
        return standing

    def _find(self, folder: Path, part: Sharded) -> Standing | None:
        """The first worker's newest whole checkpoint; the others get its files."""

        def give() -> Standing | None:
            if (standing := self._find_with(Alone(), folder)) is not None:
                self._run.give_files(RESUME, Path(standing["path"]))
            return standing

        standing: Standing | None = ask_first(self._link, give, CheckpointError)
        return standing

    def _opener(self, stack: ExitStack, path: Path, standing: Standing, part: Sharded) -> Callable[[str], Ranges]:
        if self._link.rank:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-")))
            self._run.take_files(RESUME, path, "the checkpoint that worker 0 resumes from")
        return super()._opener(stack, path, standing, part)
