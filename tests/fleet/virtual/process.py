"""A process of a virtual fleet with one connection: a generator that yields whenever it waits."""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from potluck.errors import PotluckError
from tests.fleet.virtual.clock import ProcessClock
from tests.fleet.virtual.line import Line, Lost

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Receive:
    """The next message, or Lost; none if neither came in time, or somebody pokes it."""

    timeout_s: float | None = None


class Ended(Exception):
    """A refusal, as the sentence that a person reads."""


Life = Generator[Sleep | Receive, Any, Any]


class Process:
    def __init__(self, fleet: "Fleet", name: str, latency_s: float) -> None:
        self.fleet = fleet
        self.name = name
        self.latency_s = latency_s
        self.clock = ProcessClock(fleet.clock)
        self.line: Line | None = None
        self.error: str | None = None
        self.dead = self.done = False
        self.waits: Sleep | Receive | None = None
        self.inbox: deque[Any] = deque()
        self.unread: deque[tuple[Line, Any]] = deque()
        """What has come; it stays here while the process is stopped."""
        self._turn = 0
        self._life = self.live()

    def live(self) -> Life:
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        return not self.dead and not self.done

    def start(self) -> None:
        self._resume(None)

    def kill(self) -> None:
        """Its process is gone; what it sent still arrives."""
        if self.line is not None:
            self.line.close()
        self.dead = True

    def lose_connection(self) -> None:
        assert self.line is not None
        self.line.close()
        self.inbox.append(Lost("it broke"))
        self._wake()

    def poke(self) -> None:
        """A wait for a message ends without one."""
        if isinstance(self.waits, Receive) and not self.inbox:
            self.inbox.append(None)
            self._wake()

    def connect(self) -> Line:
        self.inbox.clear()
        self.line = self.fleet.connect(self._on_down, self.latency_s)
        return self.line

    def send(self, item: Any) -> None:
        assert self.line is not None
        if not self.dead:
            self.line.send(item)

    # Being driven

    def _resume(self, value: Any) -> None:
        if not self.is_alive:
            return
        if self.clock.is_stopped:
            before = self._turn
            self.fleet.clock.at(self.clock.stopped_until, lambda: self._resume(value) if before == self._turn else None)
            return
        self._turn += 1
        turn = self._turn
        self.waits = None
        try:
            self.waits = self._life.send(value)
        except StopIteration:
            self.done = True
        except (Ended, PotluckError) as error:
            self.error, self.done = str(error), True
        if self.done and self.line is not None:
            self.line.close()
        if not self.is_alive:
            return
        waits = self.waits
        seconds = waits.seconds if isinstance(waits, Sleep) else waits.timeout_s
        if isinstance(waits, Receive) and self.inbox:
            self._wake()
        elif seconds is not None:
            self.fleet.clock.after(seconds, lambda: self._resume(None) if turn == self._turn else None)

    def _wake(self) -> None:
        if not isinstance(self.waits, Receive) or not self.inbox:
            return
        turn = self._turn

        def go() -> None:
            if turn != self._turn or not self.inbox:
                return
            if self.clock.is_stopped:  # it stays in the inbox: what is given to a stopped process is lost to the next
                self.fleet.clock.at(self.clock.stopped_until, go)
            else:
                self._resume(self.inbox.popleft())

        self.fleet.clock.after(0.0, go)

    def _on_down(self, line: Line, item: Any) -> None:
        self.unread.append((line, item))
        self._read_on()

    def _read_on(self) -> None:
        if self.clock.is_stopped:
            self.fleet.clock.at(self.clock.stopped_until, self._read_on)
        while self.unread and not self.clock.is_stopped:
            line, item = self.unread.popleft()
            if self.is_alive and line is self.line:
                self.take(line, item)
                self._wake()

    def take(self, line: Line, item: Any) -> None:
        """Something has come."""
        if isinstance(item, Lost):
            line.is_open = False
        self.inbox.append(item)
