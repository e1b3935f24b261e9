"""StoreLink: a Link over a store, for workers that have no process group and no connection to each other.

Every operation has a number, every rank puts its contribution under it, and reads the others'. Sums are added in order
of rank, so that all get the same bits. When contributions go: circles.py.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from potluck.link.circles import EVERYBODY, Circle, Circles, Position
from potluck.link.link import Pending, Rows
from potluck.store.station import Station
from potluck.store.store import Store
from potluck.store.tensors import about_of, bytes_of, start_to_host


class StoreLink:
    """All workers of a run, or a part of them. Ranks are given, not found."""

    group = None

    def __init__(self, store: Store, rank: int, world: int, *, keeps: bool = False) -> None:
        """`keeps`: nothing is deleted before all ranks have called durable() behind it."""
        assert 0 <= rank < world, (rank, world)
        self.rank, self.world = rank, world
        self._circles = Circles(Station(store, f"worker-{rank}", f"worker {rank}"), rank, range(world), keeps=keeps)
        self._circle = Circle(self._circles, EVERYBODY, range(world))
        self._parts = 0

    def part(self, groups: Sequence[Sequence[int]]) -> "StoreLink":
        """A link of that group of our ranks in which we are. Every rank calls this with the same groups."""
        assert self._circle.name == EVERYBODY, "groups are of the whole world's ranks"
        mine = next((index for index, ranks in enumerate(groups) if self.rank in ranks), None)
        assert mine is not None, f"no group holds rank {self.rank}"
        link = object.__new__(StoreLink)
        link.rank, link.world = list(groups[mine]).index(self.rank), len(groups[mine])
        link._circles = self._circles
        link._circle = Circle(self._circles, f"part-{self._parts}-{mine}", groups[mine])
        self._parts += 1
        return link

    @property
    def position(self) -> Position:
        """Where this rank stands, parts included. Nothing may be under way."""
        return self._circles.position

    def stand_at(self, position: Mapping[str, int]) -> None:
        """Goes on from a position that was saved. Before anything else, and before the parts are made again."""
        self._circles.stand_at(position)

    def durable(self, position: Mapping[str, int] | None = None) -> None:
        """A worker that starts again will never ask for anything before this position; none: before the present one."""
        self._circles.tell_durable(self.position if position is None else position)

    def start_sum(self, tensor: Tensor) -> Pending:
        number, about = self._circle.next(), about_of(tensor)
        on_host = start_to_host(tensor)
        given = self._circle.give(number, lambda: bytes_of(on_host()), about)

        def work() -> Tensor:
            total = self._circle.add_up(number, on_host, about)
            given.result()  # else we would change what is being sent
            return tensor.detach().copy_(total) if tensor.device.type == "cpu" else total

        summed = self._circles.sums.start(work)

        def finish() -> None:
            total = self._circle.wait(number, summed)
            if tensor.device.type != "cpu":
                tensor.detach().copy_(total)

        return _Operation(self._circle, number, finish)

    def gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        return self.start_gather(row).wait()

    def start_gather(self, row: Sequence[float]) -> Rows:
        number, gathered = self._start_gather(struct.pack(f"<{len(row)}d", *row))

        def finish() -> list[list[float]]:
            found = self._circle.wait(number, gathered)
            return [list(struct.unpack(f"<{len(data) // 8}d", data)) for data in found]

        return _Gather(self._circle, number, finish, gathered)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        number, gathered = self._start_gather(data)
        found: list[bytes] = self._circle.wait(number, gathered)
        self._circle.finished(number)
        return found

    def broadcast(self, tensor: Tensor) -> None:
        number, about = self._circle.next(), about_of(tensor)
        if self.rank == 0:
            on_host = start_to_host(tensor)
            self._circle.give(number, lambda: bytes_of(on_host()), about)
        if self.rank != 0 or self._circle.was_given(number):
            self._read_into(tensor, number, about)
        self._circle.finished(number)

    def start_pass(self, out: Tensor, heard: Tensor) -> Pending:
        assert heard.is_contiguous(), "bytes are read straight into it"
        number, coming = self._circle.next(), None
        if out.numel():
            self._circle.give(number, lambda: bytes_of(out), b"")
        if self.world == 1:
            heard.copy_(out)
        elif heard.numel():
            before = (self.rank - 1) % self.world
            coming = self._circles.station.start_get(lambda: self._circle.read(number, before, heard, b""))

        def finish() -> None:
            if coming is not None:
                self._circle.wait(number, coming)

        return _Operation(self._circle, number, finish)

    def close(self) -> None:
        """The last one to close clears everything away, if all are past the same operations."""
        if self._circle.name == EVERYBODY:
            self._circles.close()

    def _read_into(self, tensor: Tensor, number: int, about: bytes) -> None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._circle.wait(number, self._circles.station.start_get(lambda: self._circle.read(number, 0, host, about)))
        tensor.detach().copy_(host)

    def _start_gather(self, data: bytes) -> tuple[int, Future[list[bytes]]]:
        number = self._circle.next()
        self._circle.give(number, lambda: memoryview(data), b"")
        return number, self._circles.station.start_get(lambda: self._circle.gather(number, data))


class _Operation:
    def __init__(self, circle: Circle, number: int, finish: Callable[[], Any]) -> None:
        self._circle, self._number, self._finish = circle, number, finish

    def wait(self) -> Any:
        result = self._finish()
        self._circle.finished(self._number)
        return result


class _Gather(_Operation):
    def __init__(self, circle: Circle, number: int, finish: Callable[[], Any], gathered: Future[Any]) -> None:
        super().__init__(circle, number, finish)
        self._gathered = gathered

    def is_here(self) -> bool:
        return self._gathered.done()
