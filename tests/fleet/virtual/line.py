"""Connections of a virtual fleet, and what travels on them."""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from potluck.fleet.connection import Expected
from potluck.fleet.mean import Slot
from potluck.fleet.tree import Node
from potluck.wire.codec import decode, encode
from potluck.wire.messages import (
    Message,
    StateBegin,
)
from tests.fleet.virtual.clock import VirtualClock
from tests.fleet.virtual.toy import Floats

if TYPE_CHECKING:
    from tests.fleet.virtual.host import Host


@dataclass
class Payload:
    """Gradients of one part of one node, or, of a worker that dies, its first few."""

    step: int
    part: int
    gradients: Floats
    cut: bool = False
    slot: Slot | None = None
    node: Node | None = None
    useless: set[Node] = field(default_factory=set)


@dataclass
class Average:
    step: int
    part: int
    values: Floats


@dataclass
class Lost:
    why: str


@dataclass
class Parcel:
    transfer: int
    chunks: list[bytes]
    begin: StateBegin | None
    """Until it has been sent."""
    credit: int = 0
    cancelled: bool = False


@dataclass(eq=False)
class Line:
    """One connection. Both ends read what was sent in its order, a while after it was sent."""

    clock: VirtualClock
    host: "Host"
    peer: int
    on_down: Callable[["Line", Any], None]
    latency_s: float = 0.001
    up: deque[Any] = field(default_factory=deque)
    is_open: bool = True
    """At the worker's end."""
    since: int | None = None
    expected: deque[Expected] = field(default_factory=deque)
    held: bool = False
    closing: bool = False
    """The host has parted from it, and still reads what comes, as a server's thread does until the socket is closed."""
    parcels: list[Parcel] = field(default_factory=list)
    received: list[Any] = field(default_factory=list)
    cut_until: float = 0.0
    """Nothing gets through before then; nothing of it is lost."""
    last_up: float = 0.0
    last_down: float = 0.0

    def send(self, item: Any) -> None:
        """From the worker."""
        if self.is_open:
            item = _travelled(item) if isinstance(item, Message) else item
            self.last_up = self._arrival(self.last_up)
            self.clock.at(self.last_up, lambda: self._arrive(item))

    def _arrival(self, last: float) -> float:
        """After whatever was sent before, also where the link has become faster."""
        return max(self.clock.now + self.latency_s, self.cut_until, last)

    def close(self, why: str = "it closed the connection") -> None:
        """By the worker, or by its end."""
        if self.is_open:
            self.send(Lost(why))
            self.is_open = False

    def send_down(self, item: Any) -> None:
        item = _travelled(item) if isinstance(item, Message) else item

        def arrive() -> None:
            self.received.append(item)
            if self.is_open:
                self.on_down(self, item)

        self.last_down = self._arrival(self.last_down)
        self.clock.at(self.last_down, arrive)

    def _arrive(self, item: Any) -> None:
        self.up.append(item)
        self.host.read(self)


def _travelled(message: Message) -> Message:
    """As it comes out at the other end: whatever cannot be encoded is found here."""
    return decode(encode(message)[4:])


def packed(data: bytes) -> tuple[str, list[bytes]]:
    return json.dumps([["state", len(data)]]), [data[at : at + 16] for at in range(0, len(data), 16)]
