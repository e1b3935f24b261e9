"""StoreLink: a Link over a store, for workers that have no process group and no connection to each other.

Every operation has a number, every rank puts its contribution under it, and reads the others'. Sums are added in order
of rank, so that all get the same bits. A contribution stays until every rank has told that it is past it: with `keeps`,
only once a rank's state is saved. So a worker that is killed and started again from its last saved state finds the very
values that it had then, its own included.
"""

import base64
import json
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode
from potluck.errors import PotluckError, StoreError, TheirProtocolError, WorkerLost
from potluck.link.link import Done, Link, Pending, Rows
from potluck.store.sessions import ABOUT, IN_FLIGHT, Background, StoreSession
from potluck.store.tensors import about_of, start_to_host
from potluck.tensor_bytes import buffer, from_bytes, to_bytes

Position = dict[str, int]
"""The next number of every part that a rank is in, by its name. JSON can hold it."""
EVERYBODY = "all"
_KEY = re.compile(r"link-[a-z0-9-]+/n(?P<number>\d{12})-from-(?P<rank>\d+)")
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
"""Seconds between two looks at whether the others are past what we have put: at first, and at most."""


class Log:
    """Records what this worker heard from the others before the first step. If it starts again, it hears the same from
    here; what changed tensors is left out then, since kept tensors are as they were after it."""

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        """The answers of each operation, as JSON can hold them."""
        self.is_open = False
        self._at: int | None = None

    @property
    def is_replayed(self) -> bool:
        return self.is_open and self._at is not None

    def replay(self, told: list[list[str]]) -> None:
        self.told, self._at = told, 0

    def read(self) -> list[bytes]:
        assert self._at is not None
        self._at += 1
        told = self.told[self._at - 1]
        # Earlier versions kept rows of numbers as they are.
        return [struct.pack(f"<{len(e)}d", *e) if isinstance(e, list) else base64.b64decode(e) for e in told]

    def note(self, answers: list[bytes]) -> None:
        if self.is_open:
            self.told.append([base64.b64encode(each).decode() for each in answers])


class StorePart(Link):
    """Some workers of a run, which count their operations by themselves."""

    log: Log

    def __init__(self, whole: "StoreLink", own: int, name: str, members: Sequence[int]) -> None:
        """`own`, `members`: by their ranks in the whole run."""
        self.name, self.members, self.number = name, list(members), 0
        self.rank, self.world = self.members.index(own), len(members)
        self._whole, self._own, self.log = whole, own, whole.log
        # Two threads change what is given, one that gives and one that forgets: without a lock a number that is given
        # meanwhile could be lost, and its object would stay for ever.
        self._lock = threading.Lock()
        self._under_way: set[int] = set()
        self._giving: dict[int, Future[None]] = {}
        self._awaited: dict[int, int] = {}
        """By operation: whom we wait for."""
        self.given = self._given_before = frozenset[int]()
        """The operations of which our contribution lies in the store; and those of which it lay there at the start."""
        self._told_before = 0
        whole.add(self)

    def take_over(self, session: StoreSession, told_before: int) -> None:
        """Begin to speak. `told_before`: this worker has told that it needs nothing before that operation."""
        self._store, self._told_before = session.store, told_before
        if session.claim.was_held:
            keys = [_KEY.fullmatch(key) for key in self._store.keys(f"link-{self.name}")]
            numbers = frozenset(int(key["number"]) for key in keys if key and int(key["rank"]) == self._own)
            self.given = self._given_before = numbers

    def part(self, groups: Sequence[Sequence[int]]) -> "StorePart":
        raise AssertionError("groups are of the whole world's ranks")

    def start_sum(self, tensor: Tensor) -> Pending:
        if self.log.is_replayed:
            return Done()
        number, about, is_here = self._next(), about_of(tensor), tensor.device.type == "cpu"
        on_host = start_to_host(tensor)
        sending = self._give(number, lambda: buffer(on_host()), about)

        def work() -> Tensor:
            total = self._add_up(number, on_host, about)
            sending.result()  # else we would change what is being sent
            return tensor.detach().copy_(total) if is_here else total

        summed = self._whole.sums.start(work)
        return _Operation(self, number, summed, lambda total: total if is_here else tensor.detach().copy_(total))

    def start_coded_sum(self, tensor: Tensor, coding: Coding) -> Pending:
        """Everybody adds up what all gave, so it is coded only once."""
        if self.log.is_replayed:
            return Done()

        def finish(encoded: list[bytes]) -> None:
            total, term = torch.zeros(tensor.numel()), torch.empty(tensor.numel())
            for rank, data in enumerate(encoded):
                if len(data) != coding.coded_bytes(tensor.numel()):
                    raise TheirProtocolError(
                        f"Worker {rank} gave {len(data):,} bytes of coded numbers, and {len(encoded[self.rank]):,} are"
                        " expected. All must train the same model."
                    )
                total += decode(coding, from_bytes(data), term)
            tensor.detach().copy_(total)

        return self._start_gather(to_bytes(encode(coding, tensor).cpu()), finish)

    def start_gather(self, row: Sequence[float]) -> Rows:
        packed = struct.pack(f"<{len(row)}d", *row)
        return Done(_unpack(self.gather_bytes(packed))) if self.log.is_open else self._start_gather(packed, _unpack)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        if self.log.is_replayed:
            return self.log.read()
        answers: list[bytes] = self._start_gather(data, list).wait()
        self.log.note(answers)
        return answers

    def broadcast(self, tensor: Tensor) -> None:
        if self.log.is_replayed:
            return
        number, about = self._next(), about_of(tensor)
        if self.rank == 0:
            on_host = start_to_host(tensor)
            self._give(number, lambda: buffer(on_host()), about)
        if self.rank != 0 or number in self._given_before:
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._receive(number, 0, host, about)
            tensor.detach().copy_(host)
        self.finished(number)

    def fetch(self, numbers: Tensor, of: int) -> None:
        number = self._next()
        if self.rank == of:
            self._give(number, lambda: buffer(numbers), b"")
        elif self.rank == 0:
            self._receive(number, of, numbers, b"")
        self.finished(number)

    # Operations, by their numbers

    @property
    def settled(self) -> int:
        """The next number, while nothing is under way."""
        assert not self._under_way, f"operations {sorted(self._under_way)} are under way"
        return self.number

    @property
    def floor(self) -> int:
        """Everything before this is behind us."""
        return min(self._under_way, default=self.number)

    def _next(self) -> int:
        """The number of a new operation."""
        self._whole.session.raise_failure()
        if self.number < self._told_before:
            raise StoreError(
                f"Worker {self._own} starts at operation {self.number}, but has told the others that it needs nothing"
                f" before {self._told_before}. Start it from its newest saved state, or the whole run anew."
            )
        number, self.number = self.number, self.number + 1
        self._under_way.add(number)
        return number

    def finished(self, number: int) -> None:
        # Not before ours is out of our hands: a state that is saved behind an operation is never asked for it again.
        if number in self._giving:
            self.wait(number, self._giving.pop(number))
        self._under_way.discard(number)
        self._whole.moved()

    def wait(self, number: int, done: "Future[Any]") -> Any:
        return self._whole.session.wait(done, lambda: self._lost(number), lambda: self._look(number))

    def forget(self, floor: int) -> None:
        """Deletes what we gave before that operation."""
        gone = sorted(number for number in self.given if number < floor)
        if gone:  # deleted before they are dropped here: what could not be deleted is tried again
            self._store.delete([self._key(number, self._own) for number in gone])
            with self._lock:
                self.given -= set(gone)

    def _give(self, number: int, payload: Callable[[], memoryview], about: bytes) -> "Future[None]":
        """Puts our contribution in the background. What we had given before we were killed, others may have used: so
        that stays, and we use it too, whatever we would give now."""
        if number in self._given_before or self.world == 1:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        with self._lock:
            self.given |= {number}
        key = self._key(number, self._own)
        giving = self._whole.session.puts.start(lambda: self._store.put(key, [payload()], about))
        self._giving[number] = giving
        return giving

    def _is_here(self, number: int, rank: int) -> bool:
        """Whether a contribution is ours, and as we give it now."""
        return rank == self._own and number not in self._given_before

    def _add_up(self, number: int, own: Callable[[], Tensor], about: bytes) -> Tensor:
        """The sum, in order of rank, on every rank."""
        total: Tensor | None = None
        for rank in self.members:
            if self._is_here(number, rank):
                term = own().clone() if total is None else own()
            else:
                term = torch.empty_like(own(), memory_format=torch.contiguous_format)
                self._read(number, rank, term, about)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def _start_gather(self, data: bytes, finish: Callable[[list[bytes]], Any]) -> "_Operation":
        """Everybody's bytes, in order of rank."""
        number = self._next()
        self._give(number, lambda: memoryview(data), b"")

        def gather() -> list[bytes]:
            return [data if self._is_here(number, rank) else self._read_bytes(number, rank) for rank in self.members]

        return _Operation(self, number, self._whole.session.gets.start(gather), finish)

    def _receive(self, number: int, of: int, into: Tensor, about: bytes) -> None:
        """Waits for the contribution of one of our ranks."""
        rank = self.members[of]
        self.wait(number, self._whole.session.gets.start(lambda: self._read(number, rank, into, about)))

    def _read(self, number: int, rank: int, into: Tensor, about: bytes) -> None:
        """One member's contribution, which must be what ours is."""

        def room(said: bytes, size: int) -> memoryview:
            memory = buffer(into)
            if said != about or size != len(memory):
                raise TheirProtocolError(
                    f"Worker {rank} gave {size:,} bytes to {self._named(number)}, and worker {self._own} has"
                    f" {len(memory):,}, or another shape or type. All must train the same model."
                )
            return memory

        self._wait_for(number, rank, room)

    def _read_bytes(self, number: int, rank: int) -> bytes:
        data = bytearray()

        def room(said: bytes, size: int) -> memoryview:
            data[:] = bytes(size)
            return memoryview(data)

        self._wait_for(number, rank, room)
        return bytes(data)

    def _wait_for(self, number: int, rank: int, room: Callable[[bytes, int], memoryview]) -> None:
        self._awaited[number] = rank
        # Without end: wait() has the deadline.
        self._store.wait_for(self._key(number, rank), room, "", patience_s=float("inf"))
        self._awaited.pop(number, None)

    def _lost(self, number: int) -> str:
        whom = f"worker {self._awaited[number]}" if number in self._awaited else "the store"
        waited = f"Waited {self._store.patience_s:g} s in vain for {whom}"
        return f"{waited}, for {self._named(number)}, in {self._store.url}."

    def _look(self, number: int) -> None:
        rank = self._awaited.get(number)
        if rank is not None and self._whole.has_left(rank, self.name, number):
            raise WorkerLost(f"Worker {rank} left before {self._named(number)}.")

    def _named(self, number: int) -> str:
        return f"operation {number} of run {self._store.run}" + ("" if self.name == EVERYBODY else f" ({self.name})")

    def _key(self, number: int, rank: int) -> str:
        return f"link-{self.name}/n{number:012d}-from-{rank}"


class StoreLink(StorePart):
    """All workers of a run. Ranks are given, not found.

    Before the first step workers tell each other what they are and how the model is cut. One that was killed kept what
    it was told in a log, and hears the same again, while the others are long past it.

    Each worker's mark says, for every part that it is in, before which operation it needs nothing, and how far it has
    come.
    """

    def __init__(self, rank: int, world: int, *, keeps: bool = False) -> None:
        """`keeps`: nothing is deleted before all ranks have called durable() behind it."""
        assert 0 <= rank < world, (rank, world)
        self._keeps, self.log = keeps, Log()
        self.sums = Background(IN_FLIGHT, "potluck-sum")
        self._session: StoreSession | None = None
        self._parts: dict[str, StorePart] = {}
        self._durable: Position = {}
        self._changed, self._closing = threading.Event(), threading.Event()
        # A thread, so that no operation of training waits for a mark to be written, or for old objects to be deleted.
        self._teller = threading.Thread(target=self._tell_and_forget, name="potluck-tell", daemon=True)
        super().__init__(self, rank, EVERYBODY, range(world))

    def open(self, session: StoreSession) -> None:
        """Begin to speak: the store is known to be this run's. Ranks and parts are known before."""
        self._session = session
        floors_before = self._mark_of(self.rank)["floors"] if session.claim.was_held else {}
        for part in self._parts.values():
            part.take_over(session, floors_before.get(part.name, 0))
        self._teller.start()

    @property
    def session(self) -> StoreSession:
        assert self._session is not None, "nobody speaks before the store is known to be this run's"
        return self._session

    def part(self, groups: Sequence[Sequence[int]]) -> StorePart:
        own = next((index for index, ranks in enumerate(groups) if self.rank in ranks), None)
        assert own is not None, f"no group holds rank {self.rank}"
        return StorePart(self, self.rank, f"part-{len(self._parts) - 1}-{own}", groups[own])

    def add(self, part: StorePart) -> None:
        assert self._session is None, "another thread goes through the parts once the link is open"
        self._parts[part.name] = part

    @property
    def position(self) -> Position:
        """Where this rank stands, parts included. Nothing may be under way."""
        return {name: part.settled for name, part in self._parts.items()}

    def stand_at(self, position: Mapping[str, int]) -> None:
        """Continues from a position that was saved. Before anything else."""
        self._durable = {str(name): int(number) for name, number in position.items()}  # for that is where we come from
        for name, part in self._parts.items():
            part.number = self._durable.get(name, 0)

    def durable(self, position: Mapping[str, int] | None = None) -> None:
        """A worker that starts again will never ask for anything before this position; none: before the present one."""
        position = self.position if position is None else position
        if self._keeps:
            self._durable = dict(position)
            self._changed.set()

    def moved(self) -> None:
        """Some operation is behind us."""
        if not self._keeps:
            self._changed.set()

    def has_left(self, rank: int, part: str, number: int) -> bool:
        """Tell whether a worker has ended without having begun that operation. With `keeps` it may come back, and is
        waited for."""
        if self._keeps:
            return False
        mark = self._mark_of(rank)
        return bool(mark["ended"]) and mark["next"].get(part, 0) <= number

    def close(self) -> None:
        """The last one to close clears everything away, if all are past the same operations."""
        if self._session is None:
            return
        self._closing.set()
        self._changed.set()  # it may wait for this without end
        self._teller.join()  # it must not write an older mark over our last one
        # Before we tell that we have ended: the last to end clears everything away, and nothing may be put after that.
        self.session.close()
        self.sums.close()
        with suppress(PotluckError):  # the store may be why we close
            self._tell(ended=True)
            self._forget()
            self._clear_if_last()

    def _tell_and_forget(self) -> None:
        """A few times a second at most, however fast operations are."""
        pause_s = _PAUSE_S
        while not self._closing.is_set():  # close() may have set both while we were telling, and we cleared the other
            self._changed.wait(pause_s if self._has_leftovers() else None)
            if self._closing.wait(_PAUSE_S):
                return
            try:
                # Told first: a successor that needs what is deleted then reads in our mark that it is gone, instead of
                # waiting for it in vain.
                pause_s = self._tell_if_changed(pause_s)
                self._forget()
            except PotluckError as error:
                self.session.fail(error)
                return

    def _tell_if_changed(self, pause_s: float) -> float:
        """How long to wait until we look again."""
        if not self._changed.is_set():
            return min(2 * pause_s, _LONGEST_PAUSE_S)
        self._changed.clear()  # before it is told: what changes meanwhile is told again
        self._tell()
        return _PAUSE_S

    def _has_leftovers(self) -> bool:
        """Whether we are past something that others were not past when we looked."""
        floors = self._floors()
        return any(min(part.given, default=floors[name]) < floors[name] for name, part in self._parts.items())

    def _floors(self) -> Position:
        """Return each part's oldest operation that we may still read; older objects can be deleted."""
        if self._keeps:
            return {name: self._durable.get(name, 0) for name in self._parts}
        return {name: part.floor for name, part in self._parts.items()}

    def _tell(self, *, ended: bool = False) -> None:
        standing = {name: part.number for name, part in self._parts.items()}
        mark = {"floors": self._floors(), "next": standing, "ended": ended}
        self.session.store.put_bytes(f"marks/worker-{self.rank}", json.dumps(mark).encode())

    def _forget(self) -> None:
        if not any(part.given for part in self._parts.values()):
            return
        told = {rank: self._mark_of(rank)["floors"] for rank in self.members if rank != self.rank}
        told[self.rank] = self._floors()
        for name, part in self._parts.items():
            part.forget(min(told[rank].get(name, 0) for rank in part.members))

    def _clear_if_last(self) -> None:
        """Clear the store once all have ended, and none can ever ask for anything again."""
        marks = [self._mark_of(rank) for rank in self.members]
        if not all(mark["ended"] and mark["floors"] == mark["next"] for mark in marks):
            return
        store = self.session.store
        for name in {name for mark in marks for name in mark["next"]}:
            store.sweep(f"link-{name}", lambda key: True)
        for kind in ("marks", "claims"):
            store.forget([f"{kind}/worker-{rank}" for rank in self.members])
        store.sweep(ABOUT, lambda key: True)
        store.tidy()

    def _mark_of(self, rank: int) -> dict[str, Any]:
        data = self.session.store.get_bytes(f"marks/worker-{rank}")
        return json.loads(data) if data else {"floors": {}, "next": {}, "ended": False}


class _Operation:
    """An operation that is under way."""

    def __init__(self, part: StorePart, number: int, result: "Future[Any]", finish: Callable[[Any], Any]) -> None:
        """`finish`: makes what wait() returns from the result."""
        self._part, self._number, self._result, self._finish = part, number, result, finish

    def is_here(self) -> bool:
        return self._result.done()

    def wait(self) -> Any:
        found = self._finish(self._part.wait(self._number, self._result))
        self._part.finished(self._number)
        return found


def _unpack(rows: list[bytes]) -> list[list[float]]:
    return [list(struct.unpack(f"<{len(row) // 8}d", row)) for row in rows]
