"""Holder: what a Member asks of the worker that it speaks for. Pure."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from potluck.agree.records import Position
from potluck.fleet.description import Description
from potluck.wire.messages import Applied, Message, Welcome

T = TypeVar("T")
Waits = Generator[Any, Any, T]
"""A part of a story: it yields what it waits for, and is sent what that came to."""


@dataclass
class ConnectionLost:
    """In place of a message: the connection is gone, and why."""

    why: str


class Looked(NamedTuple):
    """Sums over rows that were evaluated: one of each figure, the loss first."""

    names: str
    figures: list[float]
    samples: float


class Holder(Protocol):
    """This worker, as far as its host has to do with it: its weights, its connection, its clock."""

    @property
    def rows_seen(self) -> int:
        """How many rows of the run are in its weights."""

    def now(self) -> float: ...

    def send(self, message: Message) -> None: ...

    def say(self, sentence: str) -> None: ...

    def hear(self, timeout_s: float) -> Waits[Message | ConnectionLost | None]:
        """The next message; None if none came in time."""

    def connect(self) -> Waits[Welcome]:
        """Connects again."""

    def reach(self, phase: str, step: int) -> Waits[None]:
        """A phase of the work begins, in which tests end this worker, or stop it."""

    def welcome(self) -> Welcome: ...

    def describe(self) -> Description: ...

    def digest(self) -> str:
        """The digest of the weights, which is remembered by a glance at them."""

    def is_changed(self) -> bool:
        """Whether the weights are not those of the last digest any more, or there was none."""

    def applied_message(self, version: int, digest: str, norm: float, fault: str) -> Applied: ...

    def average(self, step: int, without: frozenset[int]) -> Waits[Any]:
        """The means of a step, but for some parts; None if the connection was lost before."""

    def pass_over_until(self, step: int) -> None:
        """Averages up to this step are in the weights."""

    def stand_at(self, position: Position) -> None: ...

    def forget(self) -> None:
        """Discards what was computed since the last agreement."""

    def stop(self) -> None:
        """This worker is out of the run."""

    def nonfinite_hint(self) -> str: ...

    def look_at(self, start: int, end: int) -> Waits[Looked]: ...

    def receive_state(self, step: int, header: str) -> None: ...

    def take_chunk(self, data: bytes | memoryview) -> Waits[None]: ...

    def load_state(self) -> tuple[int, int]:
        """The state that has come is in the model: the version and the step that it is of."""

    def drop_state(self) -> None: ...

    def serve_state(self, transfer: int, version: int) -> Waits[None]: ...
