"""PageConnection: a browser's connection, which is closed when it takes too long to ask.

Anyone who may not look can still connect. So a connection has a limited time for the head of each request; and where
all places are taken, one that waits for a head makes room: the oldest of the peer that has the most of them. So half
requests of strangers do not keep the owner out.
"""

import asyncio
import ipaddress
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Seconds for the head of a request, and for what is left of one that was answered before it was whole."""
MOST = 128
BACKLOG = 100
"""How many are accepted in one turn: fewer than places, so that heads are read before their places are needed."""


class PageConnection(H11Protocol):
    made = 0
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        PageConnection.made += 1
        self.number = PageConnection.made
        self._await_head()
        if len(self.connections) > MOST:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head is not None:
            self._head.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    @property
    def is_waiting(self) -> bool:
        """Whether nothing was asked yet, or all that was asked is answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def peer(self) -> str:
        """An address; of IPv6 its network, which is one peer's."""
        host = self.client[0] if self.client else ""
        if ":" not in host:
            return host
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_S, self._end_if_waiting)

    def _end_if_waiting(self) -> None:
        if self.is_waiting:
            self.transport.abort()

    def _make_room(self) -> None:
        waiting: list[Any] = [each for each in self.connections if isinstance(each, PageConnection) and each.is_waiting]
        counts = Counter(each.peer for each in waiting)
        # The newest is the latest to be ended, and it is all there is to end where all others are being answered.
        loser = max(waiting, key=lambda each: (counts[each.peer], -each.number))
        self.connections.discard(loser)  # its place is free now; that it was lost is heard later
        loser.transport.abort()
