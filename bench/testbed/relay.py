"""A long, slow link: forwards TCP connections both ways, each byte late, and no faster than a rate.

    with Relay("127.0.0.1", port, mbit=100, delay_s=0.025) as link:
        ...  # connect to link.port in place of `port`
        link.traffic()

A Relay is one machine's access link: each direction has one rate, which all connections over it share. A connection has
at most `window_bytes` on their way, as TCP has, since the kernel's own window does not see the delay; what its sender
has beyond that, and beyond a short queue before the link, waits at the sender. There is no loss and no slow start.

It runs in a process of its own, which ends with its parent, and leads only to this machine: to loopback, and to
namespaces of a testbed. Imports nothing that is not in the standard library.
"""

import argparse
import json
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).parents[2]
WITHIN = (ip_network("127.0.0.0/8"), ip_network("198.18.0.0/15"))
"""Loopback, and where testbeds have their networks."""
WINDOW_BYTES = 4 << 20
PIECE_BYTES = 32 << 10
"""What is read at once: 3 ms at 100 Mbit/s."""
QUEUE_S = 0.05
"""What is read ahead of the link's rate, as before any router."""
SLOT_S = 0.05
"""Of the record of what passed."""
MOST_SLOTS = 100_000
MOST_CONNECTIONS = 64
START_S = 20.0


class Line:
    """One direction of the link: when what is sent now will arrive. Pure: it is told the time."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s
        self.free_at = 0.0
        """When all that was sent has left."""
        self.passed_bytes = 0
        self.slots: dict[int, int] = {}
        """Bytes that left, by the SLOT_S of the clock in which they did."""

    def send(self, now: float, count: int) -> float:
        """When the last of these bytes arrives."""
        self.free_at = max(now, self.free_at) + count / self.bytes_per_s
        self.passed_bytes += count
        slot = int(self.free_at / SLOT_S)
        if slot in self.slots or len(self.slots) < MOST_SLOTS:
            self.slots[slot] = self.slots.get(slot, 0) + count
        return self.free_at + self.delay_s

    def has_room(self, now: float) -> bool:
        return self.free_at - now < QUEUE_S


@dataclass
class Flow:
    """One direction of one connection. Pure: bytes are taken from it and given to it, and it is told the time."""

    line: Line
    window_bytes: int = WINDOW_BYTES
    on_way: deque[tuple[float, memoryview]] = field(default_factory=deque)
    """What was sent and not delivered, and when each piece arrives."""
    unheard: deque[tuple[float, int]] = field(default_factory=deque)
    """What was delivered, and when its sender hears of that."""
    used_bytes: int = 0
    """Of the window."""
    is_ended: bool = False

    def room(self, now: float) -> int:
        """How many bytes the sender may send now."""
        while self.unheard and self.unheard[0][0] <= now:
            self.used_bytes -= self.unheard.popleft()[1]
        return min(PIECE_BYTES, self.window_bytes - self.used_bytes) if self.line.has_room(now) else 0

    def put(self, now: float, piece: memoryview) -> None:
        self.used_bytes += len(piece)
        self.on_way.append((self.line.send(now, len(piece)), piece))

    def due(self, now: float) -> memoryview | None:
        return self.on_way[0][1] if self.on_way and self.on_way[0][0] <= now else None

    def took(self, now: float, count: int) -> None:
        """Its receiver took so many bytes of what was due."""
        at, piece = self.on_way.popleft()
        if count < len(piece):
            self.on_way.appendleft((at, piece[count:]))
        self.unheard.append((now + self.line.delay_s, count))

    def next_at(self, now: float) -> float:
        """When something may change by the time alone."""
        times = [self.line.free_at - QUEUE_S]
        times += [at for at, _ in (*list(self.on_way)[:1], *list(self.unheard)[:1])]
        return min((at for at in times if at > now), default=now + 1.0)


@dataclass(eq=False)
class _Way:
    """A flow and the sockets at its ends."""

    flow: Flow
    source: socket.socket
    target: socket.socket

    is_done: bool = False
    """All that its sender had to say has been delivered, and the end of it too."""

    def send(self, now: float) -> None:
        """Raises BlockingIOError if its receiver takes nothing now."""
        while (piece := self.flow.due(now)) is not None:
            self.flow.took(now, self.target.send(piece))
        if self.flow.is_ended and not self.flow.on_way and not self.is_done:
            self.target.shutdown(socket.SHUT_WR)
            self.is_done = True

    def read(self, now: float) -> None:
        data = self.source.recv(self.flow.room(now))
        if data:
            self.flow.put(now, memoryview(data))
        else:
            self.flow.is_ended = True


class Forwarder:
    """Everything of the relay's process: one thread, which sleeps until bytes come or are due."""

    def __init__(self, target: tuple[str, int], lines: tuple[Line, Line], window_bytes: int) -> None:
        self._target, self._lines, self._window_bytes = target, lines, window_bytes
        self._listener = socket.create_server((_here_for(target[0]), 0))
        self._listener.setblocking(False)
        self._ways: list[_Way] = []

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def run(self, asked: IO[str], answer: Callable[[str], None]) -> None:
        """Until `asked` ends. A line of it is answered with what has passed."""
        while True:
            now = time.monotonic()
            watched, timeout_s = self._watched(now)
            poller = select.poll()
            for descriptor, what in {**watched, asked.fileno(): select.POLLIN}.items():
                poller.register(descriptor, what)
            ready = {descriptor for descriptor, _ in poller.poll(1000 * timeout_s)}
            if asked.fileno() in ready:
                if not asked.readline():
                    return
                answer(json.dumps([vars(line) for line in self._lines]))
            if self._listener.fileno() in ready:
                self._accept()
            self._forward(time.monotonic(), ready)

    def _watched(self, now: float) -> tuple[dict[int, int], float]:
        """What is waited for, and for how long at most."""
        watched = {self._listener.fileno(): select.POLLIN} if len(self._ways) < 2 * MOST_CONNECTIONS else {}
        until = now + 1.0
        for way in self._ways:
            if not way.flow.is_ended and way.flow.room(now):
                watched[way.source.fileno()] = watched.get(way.source.fileno(), 0) | select.POLLIN
            if way.flow.due(now) is not None:
                watched[way.target.fileno()] = watched.get(way.target.fileno(), 0) | select.POLLOUT
            until = min(until, way.flow.next_at(now))
        return watched, max(0.0, until - now)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=START_S)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = (Flow(line, self._window_bytes) for line in self._lines)
        self._ways += [_Way(up, near, far), _Way(down, far, near)]

    def _forward(self, now: float, ready: set[int]) -> None:
        for way in list(self._ways):
            try:
                if way.source.fileno() in ready and not way.flow.is_ended and way.flow.room(now):
                    with suppress(BlockingIOError):  # it is ready to be written to
                        way.read(now)
                with suppress(BlockingIOError):
                    way.send(now)
            except OSError:
                self._drop(way)
                continue
            if way.is_done and all(each.is_done for each in self._ways if each.source is way.target):
                self._drop(way)

    def _drop(self, way: _Way) -> None:
        """A connection that broke, or has ended: both of its directions."""
        self._ways = [each for each in self._ways if way.source not in (each.source, each.target)]
        way.source.close()
        way.target.close()


class Relay:
    """Its parent's side."""

    def __init__(self, host: str, port: int, *, mbit: float, delay_s: float, window_bytes: int = WINDOW_BYTES) -> None:
        """`delay_s`: one way. `host`: an address of this machine."""
        if not any(ip_address(host) in net for net in WITHIN):
            raise ValueError(f"a relay leads to loopback or to a testbed's network, not to {host}")
        self._command = [host, str(port), str(mbit), str(delay_s), str(window_bytes)]
        self.port = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "bench.testbed.relay", *self._command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._answer())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # the end of its input is its own

    def traffic(self) -> dict[str, dict[str, Any]]:
        """Of each direction: what passed, and when."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        up, down = json.loads(self._answer())
        return {"up": up, "down": down}

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the relay has ended; its words are above")
        return line


def _here_for(host: str) -> str:
    """Where those listen who lead there: the address itself in a namespace's network would be another's."""
    return "127.0.0.1" if ip_address(host).is_loopback else "0.0.0.0"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.testbed.relay", description=(__doc__ or "").split(":")[0])
    parser.add_argument("host")
    for name, kind in (("port", int), ("mbit", float), ("delay_s", float), ("window_bytes", int)):
        parser.add_argument(name, type=kind)
    told = parser.parse_args()
    lines = (Line(told.mbit * 1e6 / 8, told.delay_s), Line(told.mbit * 1e6 / 8, told.delay_s))
    forwarder = Forwarder((told.host, told.port), lines, told.window_bytes)

    def answer(text: str) -> None:
        print(text, flush=True)

    answer(str(forwarder.port))
    forwarder.run(sys.stdin, answer)


if __name__ == "__main__":
    main()
