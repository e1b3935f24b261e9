"""What a host does with its coordinator's effects, without sockets and threads."""

import functools
import json
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from potluck.fleet import effects as core
from potluck.fleet.connection import Expected
from potluck.fleet.coordinator import Coordinator
from potluck.fleet.description import Description
from potluck.fleet.effects import Effect
from potluck.fleet.journal import Journal
from potluck.fleet.mean import Mean, Slot
from potluck.fleet.saving import SAVE
from potluck.fleet.tree import Node
from potluck.wire.messages import (
    StateBegin,
    StateChunk,
)
from tests.fleet.virtual.line import Average, Line, Lost, Payload, packed
from tests.fleet.virtual.toy import CHUNK, PARTS, TICK_S

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet


class Disk:
    """The host's checkpoints."""

    def __init__(self) -> None:
        self.states: dict[int, bytes] = {}
        self.is_checkpoint: Callable[[bytes], bool] = lambda data: True
        """As the keeper finds by its checksums and its manifest."""
        self.is_full = False
        self.late_s = 0.01
        self.refused: list[int] = []
        """Steps that it had no room for."""
        self._arriving: tuple[int, int, Callable[..., None]] | None = None
        self._data = b""

    def begin(self, step: int, header: str, on_saved: Callable[..., None]) -> None:
        self._arriving, self._data = (step, json.loads(header)[0][1], on_saved), b""

    def feed(self, data: bytes) -> None:
        if self._arriving is None:  # of the next one, which was refused meanwhile
            return
        step, size, on_saved = self._arriving
        self._data += data
        if len(self._data) >= size:
            assert len(self._data) == size
            self._arriving = None
            if not self.is_checkpoint(self._data):
                on_saved(step, "", "it is no checkpoint", 0, theirs=True)
                return
            if self.is_full:
                self.refused.append(step)
                on_saved(step, "", f"The host cannot keep the checkpoint of step {step}: No space left on device", 0)
                return
            self.states[step] = self._data
            on_saved(step, f"step-{step:08d}", "", size)

    def abort(self) -> None:
        self._arriving = None


class Host:
    """What server.py does with the coordinator's effects, without sockets and threads."""

    def __init__(self, fleet: "Fleet", coordinator: Coordinator, journal: Journal, disk: Disk) -> None:
        self.fleet = fleet
        self.core = coordinator
        self.journal = journal
        self.disk = disk
        self.lines: dict[int, Line] = {}
        self.mean: Mean | None = None
        self.step = 0
        self.formed: list[int] = []
        """Parts of that step whose average has been sent."""
        self.is_up = True
        self.paused_until = 0.0
        self.finish: core.Finish | None = None
        if coordinator.description is not None:
            self._describe(coordinator.description)
        if disk.states:
            coordinator.found(max(disk.states), "a folder")
        self._tick()

    def accept(self, line: Line) -> None:
        self.lines[line.peer] = line

    def crash(self) -> None:
        self.is_up = False
        for line in self.lines.values():
            line.send_down(Lost("the host is gone"))

    def pause(self, seconds: float) -> None:
        """It is stopped, as by SIGSTOP. What is sent to it meanwhile is read after its clock has ticked."""
        self.paused_until = self.fleet.clock.now + seconds
        for line in self.lines.values():
            self.fleet.clock.at(self.paused_until + 0.001, functools.partial(self.read, line))

    @property
    def is_paused(self) -> bool:
        return self.fleet.clock.now < self.paused_until

    def act(self, found: list[Effect]) -> None:
        for effect in found:
            self._do(effect)
        self._wake_held()

    def read(self, line: Line) -> None:
        """What has arrived, up to a payload that must wait for its turn."""
        if self.is_paused:
            self.fleet.clock.at(self.paused_until + 0.001, functools.partial(self.read, line))
            return
        while line.up and self.is_up and self.lines.get(line.peer) is line:
            item = line.up[0]
            if isinstance(item, Payload) and not self._pour(line, item):
                line.held = True
                return
            line.held = False
            line.up.popleft()
            self.core.on_heard(self.fleet.clock.now, line.peer)
            match item:
                case Payload() if item.cut:
                    pass
                case Payload():
                    self._payload_done(line, item)
                case Lost():
                    self._lost(line, item.why)
                case _ if not line.closing:
                    self.act(self.core.on_message(self.fleet.clock.now, line.peer, item))

    def _wake_held(self) -> None:
        for line in self.lines.values():
            if line.held:
                self.fleet.clock.after(0.0, functools.partial(self.read, line))

    def _lost(self, line: Line, why: str) -> None:
        if self.lines.pop(line.peer, None) is not None and self.is_up:
            self._revoke(line)
            self.act(self.core.on_closed(self.fleet.clock.now, line.peer, why))

    def _revoke(self, line: Line) -> None:
        line.expected.clear()
        if line.up and isinstance(line.up[0], Payload) and line.up[0].slot is not None:
            line.up[0].slot.revoked = True

    def _tick(self) -> None:
        if not self.is_up:
            return
        if self.is_paused:
            self.fleet.clock.at(self.paused_until, self._tick)
            return
        for line in self.lines.values():
            if line.held:  # its bytes are not being read, on purpose
                self.core.on_heard(self.fleet.clock.now, line.peer)
        self.act(self.core.on_tick(self.fleet.clock.now))
        self.fleet.clock.after(TICK_S, self._tick)

    def _do(self, effect: Effect) -> None:
        now, line = self.fleet.clock.now, self.lines.get(getattr(effect, "peer", -1))
        match effect:
            case core.Send() if line is not None:
                line.send_down(effect.message)
                if effect.credit is not None:
                    self.act(self.core.on_taken(now, *effect.credit))
            case core.Close() if line is not None:
                line.send_down(Lost(effect.why))
                line.closing = True
                self._revoke(line)
                self.fleet.clock.after(0.5, functools.partial(self._lost, line, effect.why))
            case core.Describe():
                self.journal.keep("description", effect.description.to_json())
                if effect.is_new:
                    self._describe(effect.description)
            case core.BeginStep():
                assert self.mean is not None
                self.step, self.formed = effect.step, []
                for other in self.lines.values():  # of a step that is begun anew, what was asked for before comes first
                    other.expected = deque(asked for asked in other.expected if asked.step == effect.step)
                    for asked in other.expected:
                        asked.useless.update(asked.nodes)
                self.mean.begin(effect.step, effect.slices, nodes=effect.nodes, several=effect.several)
            case core.Widen():
                assert self.mean is not None
                self.mean.widen(effect.step)
            case core.Expect() if line is not None:
                line.expected.append(Expected(effect.step, effect.nodes, effect.weights))
            case core.Discard() if line is not None:
                self._discard(line, effect.node)
            case core.SetScale():
                assert self.mean is not None
                self.mean.set_scale(effect.step, effect.scale)
            case core.AbandonStep() if self.mean is not None:
                self.formed = []
                self.mean.abort()
            case core.Subscribe() if line is not None:
                line.since = effect.since
                for part in self.formed if effect.since <= self.step else ():
                    self._send_average(line, self.step, part)
            case core.Record():
                self.journal.record(effect.step)
                self.fleet.on_record(effect.step)
            case core.Agreed():
                self.journal.agree(effect.step, effect.kind, effect.digest)
            case core.Emit():
                self.fleet.hear(effect.event)
            case core.StepApplied():
                self.fleet.records.append(effect.record)
            case core.SaveBegin():
                self.disk.begin(effect.step, effect.header, self._on_saved)
            case core.SaveChunk():
                self.disk.feed(bytes(effect.data))
                self.act(self.core.on_taken(now, effect.peer, SAVE))
            case core.SaveAbort():
                self.disk.abort()
            case core.Restore():
                self._restore(now)
            case core.SendCheckpoint() if line is not None:
                self._send_checkpoint(line, effect.transfer)
            case core.Finish():
                self.finish = self.finish or effect

    def _discard(self, line: Line, node: Node) -> None:
        for expected in line.expected:
            expected.useless.add(node)
        item = line.up[0] if line.up else None
        if isinstance(item, Payload) and item.node == node:
            item.useless.add(node)
            if item.slot is not None:
                item.slot.revoked = True

    def _describe(self, description: Description) -> None:
        self.mean = Mean([part.floats for part in description.parts], chunk=CHUNK)
        self.mean.on_part = self._on_part
        self.mean.on_done = lambda step: self.act(self.core.on_mean(self.fleet.clock.now, step))
        self.mean.on_bad = lambda *what: self.act(self.core.on_bad(self.fleet.clock.now, *what))

    def _on_part(self, step: int, part: int) -> None:
        self.formed.append(part)
        for line in self.lines.values():
            if line.since is not None and line.since <= step:
                self._send_average(line, step, part)

    def _send_average(self, line: Line, step: int, part: int) -> None:
        assert self.mean is not None
        line.send_down(Average(step, part, self.mean.results[part].copy()))

    def _pour(self, line: Line, item: Payload) -> bool:
        """A payload into the mean, chunk by chunk. Whether all of it is: else it waits for its turn."""
        assert self.mean is not None
        if item.slot is None:
            self._open(line, item)
        slot = item.slot
        assert slot is not None
        while len(item.gradients):
            if not _has_turn(self.mean, slot):
                return False
            count = min(slot.count, len(item.gradients))
            if count < slot.count:  # the rest never came
                break
            slot.space()[:] = item.gradients[:count].tobytes()
            item.gradients = item.gradients[count:]
            with np.errstate(over="ignore", invalid="ignore"):
                slot.filled()
            self._wake_held()
        slot.close()
        return True

    def _open(self, line: Line, item: Payload) -> None:
        assert self.mean is not None
        entry = line.expected[0] if line.expected else None
        if entry is None or entry.step != item.step:
            self.core.refused["stale payload"] += 1
        elif item.part != entry.at // len(entry.nodes):
            self.core.refused["foreign payload"] += 1
        elif not self._is_reported(line, entry):
            self.core.refused["payload before its report"] += 1
        else:
            item.node, item.useless = entry.nodes[entry.at % len(entry.nodes)], entry.useless
            entry.at += 1
            if entry.at == len(entry.nodes) * len(PARTS):
                line.expected.popleft()
        wanted = item.node is not None and item.node not in item.useless
        step, node = (item.step, item.node) if wanted and item.node is not None else (-1, (0, 1))
        item.slot = self.mean.open(line.peer, step, item.part, node, PARTS[item.part])

    def _is_reported(self, line: Line, entry: Expected) -> bool:
        node = entry.nodes[entry.at % len(entry.nodes)]
        return node in entry.useless or self.core.has_reported(line.peer, node)

    def _payload_done(self, line: Line, item: Payload) -> None:
        is_wanted = item.slot is not None and item.slot.is_current and item.node not in item.useless
        if item.node is not None and item.part == len(PARTS) - 1 and is_wanted:
            self.act(self.core.on_payload(self.fleet.clock.now, line.peer, item.step, item.node))

    def _on_saved(self, step: int, folder: str, error: str, size: int, *, theirs: bool = False) -> None:
        def tell() -> None:
            if self.is_up:
                self.act(self.core.on_saved(self.fleet.clock.now, step, folder, error, size, theirs=theirs))

        self.fleet.clock.after(self.disk.late_s, tell)

    def _restore(self, now: float) -> None:
        self.fleet.restores += 1
        assert self.fleet.restores < 20, "the run is restored again and again"
        newest = max(self.disk.states, default=None)
        standing = self.journal.standing(newest) if newest is not None else None
        self.journal.rewind(standing.step if standing is not None else 0)
        self.act(self.core.restored(now, standing))

    def _send_checkpoint(self, line: Line, transfer: int) -> None:
        step = max(self.disk.states)
        header, pieces = packed(self.disk.states[step])
        line.send_down(StateBegin(transfer, step, header))
        for piece in pieces:
            line.send_down(StateChunk(transfer, piece))


def _has_turn(mean: Mean, slot: Slot) -> bool:
    """Whether space() would return at once: here nobody else could end its wait."""
    step = slot.step
    if step is None or not mean._is_current(slot):
        return True
    return mean._base[slot.part] + slot._number < step.low + step.window
