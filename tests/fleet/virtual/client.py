"""What client.py does, over a line: it joins, beats, sends parcels and keeps averages. It decides nothing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from potluck.fleet.file_stream import Parcels
from potluck.fleet.membership import beat_s
from potluck.wire.messages import (
    PROTOCOL,
    TOO_SOON,
    Admitted,
    Heartbeat,
    Hello,
    Refusal,
    StateBegin,
    StateMore,
    Welcome,
)
from tests.fleet.virtual.line import Average, Line, packed
from tests.fleet.virtual.process import Ended, Life, Process, Receive, Sleep
from tests.fleet.virtual.toy import Floats

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet

ANSWER_S = 10.0
"""How long a host may take to answer, at least; then the next attempt begins."""


class Client(Process):
    def __init__(self, fleet: "Fleet", name: str, latency_s: float, kind: str) -> None:
        super().__init__(fleet, name, latency_s)
        self.kind = kind
        self.welcome: Welcome | None = None
        self.held_off: list[float] = []
        """When the host told it to come later."""
        self.may_differ = False
        """Whether an average may come twice with other bits: one of a window, or one that was formed from flips."""
        self._means: dict[int, dict[int, Floats]] = {}
        self._since = 0
        self._parcels = Parcels()

    def join(self) -> Life:
        """Until a host has let it in."""
        if self.line is not None:
            self.line.close()
        while True:
            while not self.fleet.host.is_up:
                yield Sleep(0.05)
            self._means.clear()
            self._parcels = Parcels()
            line = self.connect()
            yield from self.reach("connected")
            self.send(Hello(PROTOCOL, self.fleet.secret, self.name, self.kind))
            answer = yield Receive(max(ANSWER_S, self.fleet.patience_s))
            if isinstance(answer, Welcome):
                self.welcome = answer
                self._beat(line)
                return
            line.close()
            if isinstance(answer, Refusal) and answer.code != TOO_SOON:
                raise Ended(answer.sentence)
            if isinstance(answer, Refusal):
                self.held_off.append(self.fleet.clock.now)
            yield Sleep(0.05)

    def reach(self, phase: str) -> Life:
        """Faults are met here."""
        raise NotImplementedError

    def take(self, line: Line, item: Any) -> None:
        match item:
            case Average():
                self._keep(item)
            case StateMore():
                self._parcels.on_more(item)
                self._send_parcels()
            case Heartbeat():
                pass
            case _:
                if isinstance(item, Admitted) and item.wait:  # other weights will come, and other averages after them
                    self._since = item.step
                    self._means.clear()
                super().take(line, item)

    def _beat(self, line: Line) -> None:
        if not self.is_alive or line is not self.line or not line.is_open:
            return
        if not self.clock.is_stopped:
            line.send(Heartbeat(self.name, self.clock.wall_ms))
        self.fleet.clock.after(beat_s(self.fleet.patience_s), lambda: self._beat(line))

    # Averages

    def _keep(self, item: Average) -> None:
        if item.step <= self._since:
            return
        parts = self._means.setdefault(item.step, {})
        before = parts.get(item.part)
        if before is not None and not self.may_differ:  # the step was begun anew
            assert self.fleet.are_alike(before, item.values), f"{self.name} got two means of step {item.step}"
        parts[item.part] = item.values

    def pass_over_until(self, step: int) -> None:
        self._since = step
        self._means = {number: parts for number, parts in self._means.items() if number > step}

    def take_means(self, step: int, count: int) -> list[Floats] | None:
        """Of so many parts. None: they come first, so that a loss is next."""
        parts = self._means.get(step, {})
        if not parts.keys() >= {*range(count)}:
            return None
        del self._means[step]
        return [parts[part] for part in range(count)]

    # Parcels

    def send_parcel(self, line: Line, transfer: int, step: int, data: bytes, is_best: bool) -> None:
        if self.is_alive and line.is_open and line is self.line:
            header, pieces = packed(data)
            self._parcels.add(
                transfer, StateBegin(transfer, step, header, int(is_best)), self._leaving(pieces), lambda: None
            )
            self._send_parcels()

    def _leaving(self, pieces: list[bytes]) -> Iterator[bytes]:
        for number, piece in enumerate(pieces):
            if number == len(pieces) - 3:
                self.on_half_sent()
            yield piece

    def _send_parcels(self) -> None:
        while not self.dead and (message := self._parcels.next()) is not None:
            self.send(message)

    def on_half_sent(self) -> None:
        """Faults are met here, too."""
