"""StoreLink: a Link over a store, for workers that have no process group and no connection to each other.

Every operation has a number, every rank puts its contribution under it, and reads the others'. Sums are added in order
of rank, so that all get the same bits. When contributions go: store_group.py.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode
from potluck.errors import TheirProtocolError
from potluck.link.link import Done, Here, Link, Pending, Rows
from potluck.link.store_group import EVERYBODY, Log, Position, StoreGroup, StoreGroups
from potluck.store.sessions import StoreSession
from potluck.store.tensors import about_of, start_to_host
from potluck.tensor_bytes import buffer, from_bytes, to_bytes


class StorePart(Link):
    """Some workers of a run, which count their operations by themselves."""

    def __init__(self, groups: StoreGroups, name: str, members: Sequence[int]) -> None:
        """`members`: by their ranks in the whole run."""
        self.rank, self.world = list(members).index(groups.rank), len(members)
        self._groups = groups
        self._group = StoreGroup(groups, name, members)

    @property
    def log(self) -> Log:
        return self._groups.log

    def part(self, groups: Sequence[Sequence[int]]) -> "StorePart":
        raise AssertionError("groups are of the whole world's ranks")

    def start_sum(self, tensor: Tensor) -> Pending:
        if self.log.is_replayed:
            return Done()
        number, about = self._group.next(), about_of(tensor)
        on_host = start_to_host(tensor)
        sending = self._group.give(number, lambda: buffer(on_host()), about)

        def work() -> Tensor:
            total = self._group.add_up(number, on_host, about)
            sending.result()  # else we would change what is being sent
            return tensor.detach().copy_(total) if tensor.device.type == "cpu" else total

        summed = self._groups.sums.start(work)

        def finish() -> None:
            total = self._group.wait(number, summed)
            if tensor.device.type != "cpu":
                tensor.detach().copy_(total)

        return _Operation(self._group, number, finish)

    def start_coded_sum(self, tensor: Tensor, coding: Coding) -> Pending:
        """Everybody adds up what all gave, so it is coded only once."""
        if self.log.is_replayed:
            return Done()
        number, gathered = self._start_gather(to_bytes(encode(coding, tensor).cpu()))

        def finish() -> None:
            encoded = self._group.wait(number, gathered)
            total, term = torch.zeros(tensor.numel()), torch.empty(tensor.numel())
            for rank, data in enumerate(encoded):
                if len(data) != coding.coded_bytes(tensor.numel()):
                    raise TheirProtocolError(
                        f"Worker {rank} gave {len(data):,} bytes of coded numbers, and {len(encoded[self.rank]):,} are"
                        " expected. All must train the same model."
                    )
                total += decode(coding, from_bytes(data), term)
            tensor.detach().copy_(total)

        return _Operation(self._group, number, finish)

    def start_gather(self, row: Sequence[float]) -> Rows:
        packed = struct.pack(f"<{len(row)}d", *row)
        if self.log.is_open:
            return Here(_unpack(self.gather_bytes(packed)))
        number, gathered = self._start_gather(packed)
        return _Gather(self._group, number, lambda: _unpack(self._group.wait(number, gathered)), gathered)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        if self.log.is_replayed:
            return self.log.read()
        number, gathered = self._start_gather(data)
        answers: list[bytes] = self._group.wait(number, gathered)
        self._group.finished(number)
        self.log.note(answers)
        return answers

    def broadcast(self, tensor: Tensor) -> None:
        if self.log.is_replayed:
            return
        number, about = self._group.next(), about_of(tensor)
        if self.rank == 0:
            on_host = start_to_host(tensor)
            self._group.give(number, lambda: buffer(on_host()), about)
        if self.rank != 0 or self._group.was_given(number):
            self._read_into(tensor, number, about)
        self._group.finished(number)

    def fetch(self, numbers: Tensor, of: int) -> None:
        number = self._group.next()
        if self.rank == of:
            self._group.give(number, lambda: buffer(numbers), b"")
        elif self.rank == 0:
            read = self._groups.session.start_get(lambda: self._group.read(number, of, numbers, b""))
            self._group.wait(number, read)
        self._group.finished(number)

    def close(self) -> None:
        """The whole closes its parts."""

    def _read_into(self, tensor: Tensor, number: int, about: bytes) -> None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._group.wait(number, self._groups.session.start_get(lambda: self._group.read(number, 0, host, about)))
        tensor.detach().copy_(host)

    def _start_gather(self, data: bytes) -> tuple[int, Future[list[bytes]]]:
        number = self._group.next()
        self._group.give(number, lambda: memoryview(data), b"")
        return number, self._groups.session.start_get(lambda: self._group.gather(number, data))


class StoreLink(StorePart):
    """All workers of a run. Ranks are given, not found.

    Before the first step workers tell each other what they are and how the model is cut. One that was killed kept what
    it was told in a log, and hears the same again, while the others are long past it.
    """

    def __init__(self, rank: int, world: int, *, keeps: bool = False) -> None:
        """`keeps`: nothing is deleted before all ranks have called durable() behind it."""
        assert 0 <= rank < world, (rank, world)
        super().__init__(StoreGroups(rank, range(world), keeps=keeps), EVERYBODY, range(world))
        self._parts = 0

    def open(self, session: StoreSession) -> None:
        """Begin to speak: the store is known to be this run's. Ranks and parts are known before."""
        self._groups.open(session)

    def part(self, groups: Sequence[Sequence[int]]) -> StorePart:
        own = next((index for index, ranks in enumerate(groups) if self.rank in ranks), None)
        assert own is not None, f"no group holds rank {self.rank}"
        self._parts += 1
        return StorePart(self._groups, f"part-{self._parts - 1}-{own}", groups[own])

    @property
    def position(self) -> Position:
        """Where this rank stands, parts included. Nothing may be under way."""
        return self._groups.position

    def stand_at(self, position: Mapping[str, int]) -> None:
        """Continues from a position that was saved. Before anything else, and before the parts are made again."""
        self._groups.stand_at(position)

    def durable(self, position: Mapping[str, int] | None = None) -> None:
        """A worker that starts again will never ask for anything before this position; none: before the present one."""
        self._groups.tell_durable(self.position if position is None else position)

    def close(self) -> None:
        """The last one to close clears everything away, if all are past the same operations."""
        self._groups.close()


class _Operation:
    def __init__(self, group: StoreGroup, number: int, finish: Callable[[], Any]) -> None:
        self._group, self._number, self._finish = group, number, finish

    def wait(self) -> Any:
        result = self._finish()
        self._group.finished(self._number)
        return result


class _Gather(_Operation):
    def __init__(self, group: StoreGroup, number: int, finish: Callable[[], Any], gathered: Future[Any]) -> None:
        super().__init__(group, number, finish)
        self._gathered = gathered

    def is_here(self) -> bool:
        return self._gathered.done()


def _unpack(rows: list[bytes]) -> list[list[float]]:
    return [list(struct.unpack(f"<{len(row) // 8}d", row)) for row in rows]
