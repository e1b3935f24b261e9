"""ReplayedLink: a link over a store whose first answers a worker that starts again hears from its own log.

Before the first step workers tell each other what they are and how the model is cut. One that was killed kept what it
was told, and hears the same again, while the others are long past it.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from potluck.link.link import Done, Here, Pending, Rows
from potluck.link.store_link import StoreLink


class Log:
    """What workers told each other before the first step. A worker that starts again hears it from here."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._at: int | None = None
        self.is_open = True

    def hear_again(self, told: list[Any]) -> None:
        self.told, self._at = told, 0

    def hear(self, ask: Callable[[], Any]) -> Any:
        """An answer that is JSON; afterwards nothing is logged."""
        if not self.is_open:
            return ask()
        if self._at is None:
            self.told.append(ask())
            return self.told[-1]
        self._at += 1
        return self.told[self._at - 1]

    def change(self, start: Callable[[], Pending]) -> Pending:
        """What changes tensors: those that were kept are as they were after it."""
        if self.is_open and self._at is not None:
            return Done()
        return start()

    def seal(self) -> None:
        self.is_open = False


class Door:
    """To a StoreLink that is made once the store is ours; its parts are made then, in the order they were asked for."""

    def __init__(self) -> None:
        self._links: list[StoreLink] = []
        """The whole, and then its parts."""
        self._asked: list[Sequence[Sequence[int]]] = []

    @property
    def is_open(self) -> bool:
        return bool(self._links)

    def open(self, link: StoreLink) -> None:
        self._links = [link, *(link.part(groups) for groups in self._asked)]

    def ask_for(self, groups: Sequence[Sequence[int]]) -> int:
        """The number of a part."""
        self._asked.append(groups)
        if self._links:
            self._links.append(self._links[0].part(groups))
        return len(self._asked)

    def link(self, number: int) -> StoreLink:
        assert self._links, "nobody speaks before the store is known to be this run's"
        return self._links[number]


class ReplayedLink:
    """A StoreLink whose operations before the first step are heard from a log, when a worker starts again."""

    group = None

    def __init__(self, rank: int, world: int, log: Log, door: Door, number: int = 0) -> None:
        self.rank, self.world, self.log, self.door, self._number = rank, world, log, door, number

    @property
    def inner(self) -> StoreLink:
        return self.door.link(self._number)

    def part(self, groups: Sequence[Sequence[int]]) -> "ReplayedLink":
        mine = next(list(ranks) for ranks in groups if self.rank in ranks)
        return ReplayedLink(mine.index(self.rank), len(mine), self.log, self.door, self.door.ask_for(groups))

    def start_sum(self, tensor: Tensor) -> Pending:
        return self.log.change(lambda: self.inner.start_sum(tensor))

    def gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        rows: list[list[float]] = self.log.hear(lambda: self.inner.gather_rows(row))
        return rows

    def start_gather(self, row: Sequence[float]) -> Rows:
        if self.log.is_open:
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
        if self.door.is_open:
            self.inner.close()
