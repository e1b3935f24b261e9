"""What server.py does with the effects, without sockets and threads; the exchange of gradients is real."""

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from potluck.fleet import effects
from potluck.fleet.coordinator import Coordinator, feed
from potluck.fleet.description import Description
from potluck.fleet.effects import Effect
from potluck.fleet.exchange import Exchange, PeerConnection
from potluck.fleet.journal import Journal
from potluck.fleet.mean import PayloadMean
from potluck.fleet.outbox import Outbox
from potluck.fleet.pipe import Pipe
from potluck.fleet.reading import PeerReader
from potluck.wire.messages import (
    SAVE,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Message,
    StateBegin,
    StateChunk,
)
from tests.fleet.virtual.clock import ProcessClock
from tests.fleet.virtual.disk import Disk
from tests.fleet.virtual.line import Average, Line, Lost, Payload
from tests.fleet.virtual.toy import CHUNK, TICK_S

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet


class _AtOnce:
    """In place of an outbox: what is put there leaves at once."""

    def __init__(self, line: Line, exchange: Exchange) -> None:
        self._line, self._exchange = line, exchange

    def put(self, message: Any, done: Callable[[], None] = lambda: None) -> None:
        match message:
            case AveragedBlockGradient():
                message = self._average(message, ("block", message.block_idx))
            case AveragedNonBlockGradient():
                message = self._average(message, ("component", message.component))
        self._line.send_down(message)
        done()

    def _average(self, message: Any, key: tuple[str, int]) -> Average:
        return Average(message.step, self._exchange.layout.parts[key], message.gradients.copy())

    def drop(self) -> None:
        pass


class _Wire(PeerConnection):
    """A peer that takes part, at the end of a line."""

    def __init__(self, line: Line, exchange: Exchange, *, plain: bool, since: int) -> None:
        pipe = cast(Pipe, SimpleNamespace(travelled_bytes=(0, 0, 0), heard_at=line.host.clock.now))
        super().__init__(pipe, peer=line.peer, plain=plain, since=since)
        self.out = cast(Outbox, _AtOnce(line, exchange))

    def close(self) -> None:
        pass


class _Pourer(PeerReader):
    """Takes payloads where they were asked for, and never waits: a payload whose turn has not come is tried again."""

    def pour(self, item: Payload) -> bool:
        """A payload into the mean, chunk by chunk. Whether all of it is: else it waits for its turn."""
        if item.slot is None:
            item.expected, item.slot = self._open_next(item.step, item.part, self._mean.sizes[item.part])
        slot = item.slot
        while len(item.gradients):
            if not slot.has_turn:
                return False
            count = min(slot.count, len(item.gradients))
            if count < slot.count:  # the rest never came
                break
            slot.space()[:] = item.gradients[:count].tobytes()
            item.gradients = item.gradients[count:]
            with np.errstate(over="ignore", invalid="ignore"):
                slot.filled()
        self._shut(slot)
        if not item.cut:
            self._part_done(item.expected, slot)
        return True


class Host:
    def __init__(self, fleet: "Fleet", coordinator: Coordinator, journal: Journal, disk: Disk) -> None:
        self.fleet = fleet
        self.core = coordinator
        self.journal = journal
        self.disk = disk
        self.lines: dict[int, Line] = {}
        self.clock = ProcessClock(fleet.clock)
        self.exchange = Exchange(coordinator, self.decide, threading.RLock(), is_local=False)
        self.is_up = True
        self.reads_first = False
        """Whether, on waking, it reads what has come before its clock ticks."""
        self.ran_at = fleet.clock.now
        """When its clock last ticked before now."""
        self.finish: effects.Finish | None = None
        self._restored: int | None = None
        if coordinator.description is not None:
            self._describe(coordinator.description)
        if disk.standing is not None and coordinator.standing.version:
            coordinator.saving.found(disk.standing, "a folder")
        self._tick()

    def accept(self, line: Line) -> None:
        self.lines[line.peer] = line

    def crash(self) -> None:
        self.is_up = False
        for line in self.lines.values():
            line.send_down(Lost("the host is gone"))

    def pause(self, seconds: float) -> None:
        """It is stopped, as by SIGSTOP."""
        self.clock.stop(seconds)

    # Deciding and doing

    def decide(self, name: str, *what: Any) -> None:
        """Feeds the coordinator one of its INPUTS, and does what it decides."""
        self.act(feed(self.core, self.clock.now, name, *what))

    def act(self, found: list[Effect]) -> None:
        for effect in found:
            self._do(effect)
        self._wake_held()

    def _do(self, effect: Effect) -> None:
        line = self.lines.get(getattr(effect, "peer", -1))
        match effect:
            case effects.Send():
                self._send(line, effect)
            case effects.Close() if line is not None:
                self._close(line, effect.why)
            case effects.Describe():
                self.journal.keep("description", effect.description.to_json())
                if effect.is_new:
                    self._describe(effect.description)
            case effects.Subscribe() if line is not None:
                self._subscribe(line, effect.since)
            case effects.Record():
                self.journal.record(effect.step)
                self.fleet.on_record(effect.step)
            case effects.Agreed():
                self.journal.agree(effect.step, effect.kind, effect.digest)
            case effects.Emit():
                self.fleet.hear(effect.event)
            case effects.StepApplied():
                self.fleet.records.append(effect.record)
            case effects.SaveBegin():
                self.disk.begin(effect.step, effect.header, self._on_saved)
            case effects.SaveChunk():
                self.disk.feed(bytes(effect.data))
                self.decide("taken", effect.peer, SAVE)
            case effects.SaveAbort():
                self.disk.abort()
            case effects.Restore():
                self._restore()
            case effects.SendCheckpoint() if line is not None:
                self._send_checkpoint(line, effect.transfer)
            case effects.Finish():
                self.finish = self.finish or effect
            case _:
                if isinstance(effect, effects.BeginStep):
                    self.fleet.on_begin(effect.slices)
                self.exchange.do(effect)

    def _send(self, line: Line | None, effect: effects.Send) -> None:
        if line is not None:
            line.send_down(effect.message)
            if effect.credit is not None:
                self.decide("taken", *effect.credit)

    def _describe(self, description: Description) -> None:
        """With a mean that takes so few numbers at a time that even a toy's parts arrive in several."""
        self.exchange.describe(description)
        made = self.exchange.mean
        assert made is not None
        mean = self.exchange.mean = PayloadMean(made.sizes, chunk=CHUNK)
        mean.on_part, mean.on_done, mean.on_bad = made.on_part, made.on_done, made.on_bad

    def _subscribe(self, line: Line, since: int) -> None:
        if line.connection is not None:
            line.connection.since = since
            return
        plain = self.core.membership.members[line.peer].plain
        line.connection = _Wire(line, self.exchange, plain=plain, since=since)
        self.exchange.connections[line.peer] = line.connection
        if not plain:
            self.exchange.send_by_parts(line.connection)

    # Peers

    def read(self, line: Line) -> None:
        """What has arrived, up to a payload that must wait for its turn."""
        if self.clock.is_stopped:
            late_s = 0.0 if self.reads_first else 0.001
            self.fleet.clock.at(self.clock.stopped_until + late_s, functools.partial(self.read, line))
            return
        while line.up and self.is_up and self.lines.get(line.peer) is line:
            item = line.up[0]
            if isinstance(item, Payload) and not self._pour(line, item):
                return
            line.up.popleft()
            if line.connection is not None:
                line.connection.pipe.heard_at = self.clock.now
            if isinstance(item, Lost):
                self._lost(line, item.why)
            elif isinstance(item, Message) and not line.closing:
                self.decide("message", line.peer, item)

    def _pour(self, line: Line, item: Payload) -> bool:
        if line.connection is None:
            return True
        if line.connection.blocks is None:
            self.exchange.send_by_parts(line.connection)
        if item.slot is None and not line.closing:
            self.fleet.on_payload(item)
        before, line.connection.held = len(item.gradients), False
        is_poured = _Pourer(line.connection, self.exchange).pour(item)
        line.connection.held = not is_poured
        if len(item.gradients) < before:
            self._wake_held()
        return is_poured

    def _wake_held(self) -> None:
        for line in self.lines.values():
            if line.connection is not None and line.connection.held:
                self.fleet.clock.after(0.0, functools.partial(self.read, line))

    def _close(self, line: Line, why: str) -> None:
        self.fleet.on_parting(line, why)
        line.send_down(Lost(why))
        line.closing = True
        if line.connection is not None:
            line.connection.revoke()
        self.fleet.clock.after(0.5, functools.partial(self._lost, line, why))

    def _lost(self, line: Line, why: str) -> None:
        if self.lines.pop(line.peer, None) is None or not self.is_up:
            return
        if line.connection is not None:
            self.exchange.lost(line.connection, why)
        else:
            self.decide("closed", line.peer, why)

    def _tick(self) -> None:
        if not self.is_up:
            return
        if self.clock.is_stopped:
            late_s = 0.001 if self.reads_first else 0.0
            self.fleet.clock.at(self.clock.stopped_until + late_s, self._tick)
            return
        # The bytes of those that are held are not being read, on purpose.
        now, connections = self.clock.now, self.exchange.connections.values()
        self.decide("tick", {c.peer: now if c.held else c.pipe.heard_at for c in connections}, self._wait_for())
        self.ran_at = self.fleet.clock.now
        self.fleet.clock.after(TICK_S, self._tick)

    def _wait_for(self) -> set[int]:
        """Half of those who have not applied the last step are taken for such whose averages filled their buffers."""
        members = self.core.membership.members.values()
        return {m.peer for m in members if m.peer % 2 and m.is_ready and m.applied < self.core.standing.version}

    # Checkpoints

    def _on_saved(self, step: int, folder: str, error: str, size: int, *, theirs: bool = False) -> None:
        def tell() -> None:
            if self.clock.is_stopped:
                self.fleet.clock.at(self.clock.stopped_until, tell)
            elif self.is_up:
                self.decide("saved", step, folder, error, size, theirs)

        self.fleet.clock.after(self.disk.late_s, tell)

    def _restore(self) -> None:
        self.fleet.restores += 1
        assert self.fleet.restores < 100, "the run is restored again and again"
        self._restored = self.disk.newest
        self.decide("restored", self.journal.go_back(self.disk.standing))

    def _send_checkpoint(self, line: Line, transfer: int) -> None:
        step = self._restored
        if step is None or step not in self.disk.states:  # it was removed meanwhile: the newcomer comes again
            self._close(line, "the checkpoint is gone")
            return
        header, pieces = self.disk.stream(step)
        line.send_down(StateBegin(transfer, step, header))
        for piece in pieces:
            line.send_down(StateChunk(transfer, piece))
