"""Connections of a virtual fleet, and what travels on them."""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from potluck.fleet.exchange import ExpectedPayloads, PeerConnection
from potluck.fleet.mean import Slot
from potluck.fleet.tree import Node
from potluck.wire.codec import decode, encode
from potluck.wire.messages import Heartbeat, Message
from tests.fleet.virtual.clock import VirtualClock
from tests.fleet.virtual.toy import Floats


@dataclass
class Payload:
    """Gradients of one part of one node, or, of a worker that dies, its first few."""

    step: int
    part: int
    gradients: Floats
    cut: bool = False
    node: Node = (0, 0)
    """What it is of, for those who look: the host knows what it asked for."""
    slot: Slot | None = None
    expected: ExpectedPayloads | None = None


@dataclass
class Average:
    step: int
    part: int
    values: Floats


@dataclass
class Lost:
    why: str


class Reads(Protocol):
    def read(self, line: "Line") -> None: ...


@dataclass(eq=False)
class Line:
    """One connection. Both ends read what was sent in its order, a while after it was sent."""

    clock: VirtualClock
    host: Reads
    peer: int
    on_down: Callable[["Line", Any], None]
    latency_s: float = 0.001
    up: deque[Any] = field(default_factory=deque)
    """What has arrived, and the host has not read."""
    is_open: bool = True
    """At the worker's end."""
    connection: PeerConnection | None = None
    """At the host's end, once its worker takes part."""
    closing: bool = False
    """The host has parted from it, and still reads what comes, as a server's thread does until the socket is closed."""
    received: list[Any] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """When anything came to the host's machine, whether it was read or not."""
    coming_up: int = 0
    coming_down: int = 0
    """Items that are on their way."""
    _cut: tuple[float, float] = (0.0, 0.0)
    """Nothing gets up, or down, before then; nothing of it is lost."""
    _last_up: float = 0.0
    _last_down: float = 0.0
    _is_broken: bool = False

    def send(self, item: Any) -> None:
        """From the worker."""
        if self.is_open:
            item = travelled(item)
            self._last_up = self._arrival(self._last_up, self._cut[0])
            self.coming_up += 1
            self.clock.at(self._last_up, lambda: self._arrive(item))

    def _arrival(self, last: float, cut_until: float) -> float:
        """After whatever was sent before, also where the link has become faster."""
        return max(self.clock.now + self.latency_s, cut_until, last)

    def close(self, why: str = "it closed the connection") -> None:
        """By the worker, or by its end."""
        if self.is_open:
            self.send(Lost(why))
            self.is_open = False

    def send_down(self, item: Any) -> None:
        item = travelled(item)

        def arrive() -> None:
            self.coming_down -= 1
            if not self._is_broken:
                self._deliver(item)

        self._last_down = self._arrival(self._last_down, self._cut[1])
        self.coming_down += 1
        self.clock.at(self._last_down, arrive)

    def _deliver(self, item: Any) -> None:
        self.received.append(item)
        if self.is_open:
            self.on_down(self, item)

    def _arrive(self, item: Any) -> None:
        self.coming_up -= 1
        if not self._is_broken:
            self._take(item)

    def _take(self, item: Any) -> None:
        self.arrivals.append(self.clock.now)
        self.up.append(item)
        self.host.read(self)

    def cut(self, seconds: float, patience_s: float, *, up: bool = True, down: bool = True) -> None:
        """Nothing passes, or nothing in one direction. Whoever cannot send for `patience` takes the link for lost."""
        until = self.clock.now + seconds
        self._cut = max(self._cut[0], until * up), max(self._cut[1], until * down)
        if seconds > patience_s:
            self.clock.after(patience_s, self._break)

    def _break(self) -> None:
        """Both systems have given it up; what was on its way is lost."""
        if not self._is_broken and self.clock.now < max(self._cut):
            self._is_broken = True
            self._take(Lost("the connection broke: timed out"))
            self._deliver(Lost("timed out"))
            self.is_open = False


def travelled(item: Any) -> Any:
    """As it comes out at the other end: what cannot be encoded is found here."""
    return decode(encode(item)[4:]) if isinstance(item, Message) and not isinstance(item, Heartbeat) else item


def packed(data: bytes) -> tuple[str, list[bytes]]:
    return json.dumps([["state", len(data)]]), [data[at : at + 16] for at in range(0, len(data), 16)]
