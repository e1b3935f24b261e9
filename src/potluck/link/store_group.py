"""StoreGroup: workers that count their operations alike, over a store; and when their contributions may go.

A contribution stays until every rank has told that it is past it: with `keeps`, only once a rank's state is saved. So a
worker that is killed and started again from its last saved state finds the very values that it had then, its own
included. Knows nothing of what is summed or gathered, and why: store_link.py does.
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

from potluck.errors import PotluckError, StoreError, TheirProtocolError, WorkerLost
from potluck.store.sessions import ABOUT, IN_FLIGHT, Background, StoreSession
from potluck.tensor_bytes import buffer

Position = dict[str, int]
"""The next number of every group that a rank is in, by its name. JSON can hold it."""
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


class StoreGroup:
    """Workers with a numbering of their own. Members are named by their rank in the whole run."""

    def __init__(self, groups: "StoreGroups", name: str, members: Sequence[int]) -> None:
        self.name, self.members, self.number = name, list(members), 0
        self._groups, self._rank = groups, groups.rank
        self._lock = threading.Lock()
        """Two threads change what is given: one gives, one forgets."""
        self._under_way: set[int] = set()
        self._giving: dict[int, Future[None]] = {}
        self._awaited: dict[int, int] = {}
        """By operation: whom we wait for."""
        self.given = self._given_before = frozenset[int]()
        """The operations of which our contribution lies in the store; and those of which it lay there at the start."""
        self._told_before = 0
        groups.add(self)

    def open(self, session: StoreSession) -> None:
        self._store = session.store
        if session.claim.was_held:
            keys = [_KEY.fullmatch(key) for key in self._store.keys(f"link-{self.name}")]
            numbers = frozenset(int(key["number"]) for key in keys if key and int(key["rank"]) == self._rank)
            self.given = self._given_before = numbers
        self._told_before = self._groups.told_before.get(self.name, 0)

    @property
    def position(self) -> int:
        assert not self._under_way, f"operations {sorted(self._under_way)} are under way"
        return self.number

    @property
    def floor(self) -> int:
        """Everything before this is behind us."""
        return min(self._under_way, default=self.number)

    def next(self) -> int:
        """The number of a new operation."""
        self._groups.session.raise_failure()
        if self.number < self._told_before:
            raise StoreError(
                f"Worker {self._rank} starts at operation {self.number}, but has told the others that it needs nothing"
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
        self._groups.moved()

    def was_given(self, number: int) -> bool:
        """Tell whether we had given it before we were killed: others may have used it, so we use it too, whatever we
        would give now."""
        return number in self._given_before

    def give(self, number: int, payload: Callable[[], memoryview], about: bytes) -> "Future[None]":
        """Puts our contribution in the background."""
        if self.was_given(number) or len(self.members) == 1:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        with self._lock:
            self.given |= {number}
        key = self._key(number, self._rank)
        giving = self._groups.session.start_put(lambda: self._store.put(key, [payload()], about))
        self._giving[number] = giving
        return giving

    def add_up(self, number: int, own: Callable[[], Tensor], about: bytes) -> Tensor:
        """The sum, in order of rank, on every rank."""
        total: Tensor | None = None
        for place, rank in enumerate(self.members):
            if rank == self._rank and not self.was_given(number):
                term = own().clone() if total is None else own()
            else:
                term = torch.empty_like(own(), memory_format=torch.contiguous_format)
                self.read(number, place, term, about)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    def gather(self, number: int, own: bytes) -> list[bytes]:
        """Everybody's, in order of rank."""
        return [
            own if rank == self._rank and not self.was_given(number) else self._read_bytes(number, rank)
            for rank in self.members
        ]

    def read(self, number: int, place: int, into: Tensor, about: bytes) -> None:
        """One member's contribution, which must be what ours is."""
        rank = self.members[place]

        def room(said: bytes, size: int) -> memoryview:
            memory = buffer(into)
            if said != about or size != len(memory):
                raise TheirProtocolError(
                    f"Worker {rank} gave {size:,} bytes to {self._named(number)}, and worker {self._rank} has"
                    f" {len(memory):,}, or another shape or type. All must train the same model."
                )
            return memory

        self._wait_for(number, rank, room)

    def wait(self, number: int, done: "Future[Any]") -> Any:
        return self._groups.session.wait(done, lambda: self._lost(number), lambda: self._look(number))

    def forget(self, floor: int) -> None:
        """Deletes what we gave before that operation."""
        gone = sorted(number for number in self.given if number < floor)
        if gone:
            self._store.delete([self._key(number, self._rank) for number in gone])
            with self._lock:
                self.given -= set(gone)

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
        if rank is not None and self._groups.has_left(rank, self.name, number):
            raise WorkerLost(f"Worker {rank} left before {self._named(number)}.")

    def _named(self, number: int) -> str:
        return f"operation {number} of run {self._store.run}" + ("" if self.name == EVERYBODY else f" ({self.name})")

    def _key(self, number: int, rank: int) -> str:
        return f"link-{self.name}/n{number:012d}-from-{rank}"


class StoreGroups:
    """Keeps the marks of one worker's groups, and reads those of the others.

    Each worker's mark says, for every group, before which operation it needs nothing, and how far it has come.
    """

    def __init__(self, rank: int, ranks: Sequence[int], *, keeps: bool) -> None:
        self.rank, self._ranks, self._keeps = rank, ranks, keeps
        self.log = Log()
        self.sums = Background(IN_FLIGHT, "potluck-sum")
        self._session: StoreSession | None = None
        self.told_before: Position = {}
        self._groups: dict[str, StoreGroup] = {}
        self._planned: Position = {}
        """Where groups that are not made yet will begin."""
        self._durable: Position = {}
        self._changed, self._closing = threading.Event(), threading.Event()
        # A thread, so that no operation of training waits for a mark to be written, or for old objects to be deleted.
        self._teller = threading.Thread(target=self._tell_and_forget, name="potluck-tell", daemon=True)

    def open(self, session: StoreSession) -> None:
        self._session = session
        if session.claim.was_held:
            self.told_before = self._mark_of(self.rank)["floors"]
        for group in self._groups.values():
            group.open(session)
        self._teller.start()

    @property
    def session(self) -> StoreSession:
        assert self._session is not None, "nobody speaks before the store is known to be this run's"
        return self._session

    @property
    def position(self) -> Position:
        return self._planned | {name: group.position for name, group in self._groups.items()}

    def stand_at(self, position: Mapping[str, int]) -> None:
        self._planned = {str(name): int(number) for name, number in position.items()}
        self._durable = dict(self._planned)  # for that is where we come from
        for group in self._groups.values():
            self._place(group)

    def add(self, group: StoreGroup) -> None:
        self._place(group)
        if self._session is not None:
            group.open(self._session)
        self._groups = self._groups | {group.name: group}  # a new one, since another thread reads it

    def _place(self, group: StoreGroup) -> None:
        group.number = self._planned.pop(group.name, 0)

    def moved(self) -> None:
        """Some operation is behind us."""
        if not self._keeps:
            self._changed.set()

    def tell_durable(self, position: Mapping[str, int]) -> None:
        if self._keeps:
            self._durable = dict(position)
            self._changed.set()

    def has_left(self, rank: int, group: str, number: int) -> bool:
        """Tell whether a worker has ended without having begun that operation. With `keeps` it may come back, and is
        waited for."""
        if self._keeps:
            return False
        mark = self._mark_of(rank)
        return bool(mark["ended"]) and mark["next"].get(group, 0) <= number

    def close(self) -> None:
        if self._session is None:
            return
        self._closing.set()
        self._changed.set()
        self._teller.join()
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
                pause_s = self._tell_if_changed(pause_s)
                self._forget()
            except PotluckError as error:
                self.session.fail(error)
                return

    def _tell_if_changed(self, pause_s: float) -> float:
        """How long to wait until we look again."""
        if not self._changed.is_set():
            return min(2 * pause_s, _LONGEST_PAUSE_S)
        self._changed.clear()
        self._tell()
        return _PAUSE_S

    def _has_leftovers(self) -> bool:
        """Whether we are past something that others were not past when we looked."""
        groups, floors = self._groups, self._floors()  # in this order: there may be a new one between the two
        return any(min(group.given, default=floors[name]) < floors[name] for name, group in groups.items())

    def _floors(self) -> Position:
        """Return each group's oldest operation that we may still read; older objects can be deleted."""
        if self._keeps:
            return {name: self._durable.get(name, 0) for name in self._groups}
        return {name: group.floor for name, group in self._groups.items()}

    def _tell(self, *, ended: bool = False) -> None:
        standing = {name: group.number for name, group in self._groups.items()}
        mark = {"floors": self._floors(), "next": standing, "ended": ended}
        self.session.store.put_bytes(f"marks/worker-{self.rank}", json.dumps(mark).encode())

    def _forget(self) -> None:
        if not any(group.given for group in self._groups.values()):
            return
        told = {rank: self._mark_of(rank)["floors"] for rank in self._ranks if rank != self.rank}
        groups, told[self.rank] = self._groups, self._floors()
        for name, group in groups.items():
            group.forget(min(told[rank].get(name, 0) for rank in group.members))

    def _clear_if_last(self) -> None:
        """Clear the store once all have ended, and none can ever ask for anything again."""
        marks = [self._mark_of(rank) for rank in self._ranks]
        if not all(mark["ended"] and mark["floors"] == mark["next"] for mark in marks):
            return
        store = self.session.store
        for name in {name for mark in marks for name in mark["next"]}:
            store.sweep(f"link-{name}", lambda key: True)
        for kind in ("marks", "claims"):
            store.forget([f"{kind}/worker-{rank}" for rank in self._ranks])
        store.sweep(ABOUT, lambda key: True)
        store.tidy()

    def _mark_of(self, rank: int) -> dict[str, Any]:
        data = self.session.store.get_bytes(f"marks/worker-{rank}")
        return json.loads(data) if data else {"floors": {}, "next": {}, "ended": False}
