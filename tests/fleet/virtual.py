"""A fleet in one process, on a clock of its own: Coordinator, Mean and Journal are real, and all around them are toys.

A worker drives a real Member, with a vector of a few numbers for a model. What a slice's gradient is depends on its
rows and on the weights alone, so a run must end with the bits of undisturbed(), which knows nothing of a fleet. Faults
are scripted, and a test proves by `fired` that its fault came about.
"""

import functools
import hashlib
import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.events import Event, WorkerCame, WorkerWent
from potluck.fleet import effects as core
from potluck.fleet import member_effects as effects
from potluck.fleet.coordinator import PROTOCOL, TOO_SOON, Coordinator
from potluck.fleet.description import Description, Part
from potluck.fleet.effects import Effect, StepRecord
from potluck.fleet.journal import Journal
from potluck.fleet.ledger import prove
from potluck.fleet.mean import Mean, Slot
from potluck.fleet.member import Member
from potluck.fleet.run_state import Standing
from potluck.fleet.saving import SAVE
from potluck.fleet.tree import Node, children, merges, sized_rows, slice_rows
from potluck.wire.codec import decode, encode
from potluck.wire.messages import (
    Admitted,
    Applied,
    Committed,
    Heartbeat,
    Hello,
    Message,
    Refusal,
    SliceReport,
    StateBegin,
    StateChunk,
    StateMore,
    Welcome,
    Work,
)

Floats = npt.NDArray[np.float32]

PARTS = (5, 3, 4)
CHUNK = 2
"""Floats of the mean at a time: so few that even these parts arrive in several."""
ROWS, BATCH, SLICES, EPOCHS = 37, 16, 8, 2
STEPS = EPOCHS * -(-ROWS // BATCH)
"""An epoch's last step has five rows, and so only five slices."""
UNIT = 0.25
VALIDATION_ROWS, VALIDATION_SIZE = 10, 3
PATIENCE_S = 10.0
TICK_S = 0.25
SECRET = "the secret"


# The model


def described(**changes: Any) -> Description:
    values: dict[str, Any] = {
        "parts": tuple(Part(len(PARTS) - 1 - i, None, (floats,)) for i, floats in enumerate(PARTS)),
        "model": "a hash",
        "rows": ROWS,
        "batch": BATCH,
        "slices": SLICES,
        "seed": 1,
        "unit": UNIT,
        "samples_per_row": 1.0,
        "policy": "sync",
        "data": {"origin": "", "marks": {"0": ["a hash", []]}},
        "training": {"optimizer.lr": 0.1},
        "told": {},
    }
    return Description(**(values | changes))


def fresh_weights() -> Floats:
    return np.linspace(-1, 1, sum(PARTS), dtype=np.float32)


@functools.cache
def _noise(epoch: int, start: int, end: int) -> Floats:
    return np.random.default_rng((epoch, start, end)).standard_normal(sum(PARTS), np.float32)


def gradient_of(weights: Floats, epoch: int, start: int, end: int) -> Floats:
    """Of the sum over a slice's rows, times the unit. [floats]"""
    return (weights * np.float32(0.125) + _noise(epoch, start, end)) * np.float32((end - start) * UNIT)


def loss_of(epoch: int, start: int, end: int) -> float:
    """Summed over a slice's rows."""
    return float(_noise(epoch, start, end)[0]) * (end - start)


def validation_of(start: int, end: int) -> float:
    return math.fsum(0.1 * row for row in range(start, end))


def digest_of(weights: Floats) -> str:
    return hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()


@dataclass
class State:
    """What a checkpoint holds."""

    weights: Floats = field(default_factory=fresh_weights)
    momentum: Floats = field(default_factory=lambda: np.zeros(sum(PARTS), np.float32))
    step: int = 0
    epoch: int = 0
    row: int = 0

    def apply(self, mean: Floats, rows: int) -> None:
        self.momentum = self.momentum * np.float32(0.5) + mean
        self.weights = self.weights - np.float32(0.1) * self.momentum
        self.step += 1
        self.row += rows

    def agree(self, mean: Floats, rows: int) -> None:
        """After a window: the momentum is each worker's own."""
        self.weights = self.weights - mean
        self.step += 1
        self.row += rows

    def to_bytes(self) -> bytes:
        place = np.array([self.step, self.epoch, self.row], "<i8")
        return self.weights.tobytes() + self.momentum.tobytes() + place.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "State":
        size = 4 * sum(PARTS)
        step, epoch, row = (int(n) for n in np.frombuffer(data[2 * size :], "<i8"))
        weights, momentum = (np.frombuffer(data[at : at + size], np.float32).copy() for at in (0, size))
        return cls(weights, momentum, step, epoch, row)


@functools.cache
def undisturbed(step: int = STEPS) -> bytes:
    """The weights of one machine after so many steps. The tree is summed as it is defined, by no code of the fleet."""
    return _undisturbed(step).weights.tobytes()


@functools.cache
def _undisturbed(step: int) -> State:
    if not step:
        return State()
    before = _undisturbed(step - 1)
    state = State(before.weights, before.momentum, before.step, before.epoch, before.row)
    if state.row >= ROWS:
        state.epoch, state.row = state.epoch + 1, 0
    rows = min(BATCH, ROWS - state.row)
    bounds = slice_rows(state.row, rows, min(SLICES, rows))

    def sum_of(node: Node) -> Floats:
        if node[1] - node[0] == 1:
            return gradient_of(state.weights, state.epoch, *bounds[node[0]])
        left, right = children(node)
        return sum_of(left) + sum_of(right)

    state.apply(sum_of((0, len(bounds))) * np.float32(1 / (rows * UNIT)), rows)
    return state


# Time and faults


class VirtualClock:
    """What happens next happens at once; what happens at the same time happens in the order it was asked for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.after_each: Callable[[], None] = lambda: None
        """Called after whatever happens."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._count), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came about within so many seconds."""
        deadline = self.now + limit_s
        while not until():
            if not self._heap or self._heap[0][0] > deadline:
                self.now = deadline
                return False
            self.now, _, call = heapq.heappop(self._heap)
            call()
            self.after_each()
        return True


@dataclass
class Fault:
    kind: str
    name: str
    step: int
    phase: str
    seconds: float = 0.0
    slice: int = 0


class FaultScript:
    """What goes wrong, where, and when. `fired` says what did.

    Phases, and the step that they are counted by: that which is being computed for joined, forward, backward (one part
    is sent), half (of a payload is sent) and sent; the last one applied for committed (the averages are here), applied,
    evaluating, save due, parcel (half of its state is sent, to whomever) and catching up (half of one has come).
    """

    def __init__(self) -> None:
        self.pending: list[Fault] = []
        self.fired: list[str] = []
        self.flips = False
        """Whether averages may have been formed from wrong weights, and be sent again."""

    def _add(self, *given: Any, **named: Any) -> "FaultScript":
        self.pending.append(Fault(*given, **named))
        return self

    def kill(self, name: str, *, at_step: int, phase: str = "forward") -> "FaultScript":
        """Nothing of it runs from then on; what it has sent arrives."""
        return self._add("kill", name, at_step, phase)

    def silence(self, name: str, *, at_step: int, seconds: float, phase: str = "forward") -> "FaultScript":
        """It is stopped, as by SIGSTOP: not even its heart beats."""
        return self._add("silence", name, at_step, phase, seconds)

    def stall(self, name: str, *, at_step: int, seconds: float, phase: str = "forward") -> "FaultScript":
        """It does nothing, but its heart beats."""
        return self._add("stall", name, at_step, phase, seconds)

    def cut(self, name: str, *, at_step: int, phase: str = "forward") -> "FaultScript":
        """Its connection breaks; it joins again by itself."""
        return self._add("cut", name, at_step, phase)

    def leave(self, name: str, *, at_step: int, phase: str = "forward") -> "FaultScript":
        """It is asked to stop, and leaves politely."""
        return self._add("leave", name, at_step, phase)

    def quit(self, name: str, *, at_step: int, phase: str = "applied") -> "FaultScript":
        """Its script ends with 0, as if all were done."""
        return self._add("quit", name, at_step, phase)

    def drift(self, name: str, *, at_step: int) -> "FaultScript":
        """A bit of its weights flips while it applies a step."""
        return self._add("drift", name, at_step, "applying")

    def flip(self, name: str, *, at_step: int, phase: str, slice: int = 0) -> "FaultScript":
        """A bit of its weights flips in its memory."""
        self.flips = True
        return self._add("flip", name, at_step, phase, slice=slice)

    def poison(self, name: str, *, at_step: int, slice: int) -> "FaultScript":
        """One number of its gradient of a slice is none."""
        return self._add("poison", name, at_step, "gradient", slice=slice)

    def poison_loss(self, name: str, *, at_step: int, slice: int) -> "FaultScript":
        return self._add("poison_loss", name, at_step, "loss", slice=slice)

    def take(self, name: str, phase: str, step: int, slice: int = 0) -> Fault | None:
        for fault in self.pending:
            if (fault.name, fault.phase, fault.step, fault.slice) == (name, phase, step, slice):
                self.pending.remove(fault)
                self.fired.append(f"{fault.kind} {name}")
                return fault
        return None


# Wires


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


@dataclass
class Expected:
    step: int
    nodes: tuple[Node, ...]
    at: int = 0
    useless: set[Node] = field(default_factory=set)


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
                line.expected.append(Expected(effect.step, effect.nodes))
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
        header, pieces = _packed(self.disk.states[step])
        line.send_down(StateBegin(transfer, step, header))
        for piece in pieces:
            line.send_down(StateChunk(transfer, piece))


def _has_turn(mean: Mean, slot: Slot) -> bool:
    """Whether space() would return at once: here nobody else could end its wait."""
    step = slot.step
    if step is None or not mean._is_current(slot):
        return True
    return mean._base[slot.part] + slot._number < step.low + step.window


def _packed(data: bytes) -> tuple[str, list[bytes]]:
    return json.dumps([["state", len(data)]]), [data[at : at + 16] for at in range(0, len(data), 16)]


# Workers


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class Receive:
    """The next message, or Lost; none if neither came in time."""

    timeout_s: float | None = None


class Ended(Exception):
    """A refusal, as the sentence that a person reads."""


Life = Generator[Sleep | Receive, Any, Any]


class Worker:
    """A Member on a virtual line, with a toy to compute with: a generator that yields whenever it waits."""

    def __init__(self, fleet: "Fleet", name: str, **options: Any) -> None:
        self.fleet = fleet
        self.clock = fleet.clock
        self.name = name
        self.slice_s: float = options.pop("slice_s", 0.1)
        self.kind: str = options.pop("kind", "cpu")
        self.latency_s: float = options.pop("latency_s", 0.001)
        self.evaluate_every: int = options.pop("evaluate_every", 0)
        self.save_every: int = options.pop("save_every", 0)
        self.pack_s: float = options.pop("pack_s", 0.005)
        self.description: Description = options.pop("description", None) or described()
        self.state = State(weights=options.pop("weights", fresh_weights()))
        self.drifts: dict[int, float] = options.pop("drifts", {})
        """step -> what it tells of how far it was from the others"""
        self.batch_s: float = options.pop("batch_s", 0.1)
        """Of a step of its own."""
        self.own_code: Callable[[Floats], Floats] = options.pop("own_code", lambda weights: weights)
        """What its loop does to the weights between two steps."""
        self.update: Callable[[Floats], Floats] = options.pop("update", lambda weights: weights)
        """What its device does to them in each."""
        assert not options, f"unknown options {options}"
        self.line: Line | None = None
        self.error: str | None = None
        self.validated: dict[int, float] = {}
        self.dead = self.done = self.stopping = self.finished = False
        self.held_off: list[float] = []
        """When the host told it to come later."""
        self.slices_computed: list[tuple[int, int]] = []
        """(step, slice)"""
        self._inbox: deque[Any] = deque()
        self._unread: deque[tuple[Line, Any]] = deque()
        """What has come; it stays here while the worker is silent."""
        self._means: dict[int, dict[int, Floats]] = {}
        self._since = 0
        self.member = Member()
        self._welcome: Welcome | None = None
        self._told = ""
        self._own: Floats | None = None
        """Its weights at the end of its last part of a window, where it continues from there."""
        self._held: tuple[SliceReport, Floats] | None = None
        """What it has done ahead: its report, and what it changed."""
        self._arriving, self._arriving_bytes = b"", 0
        self._silent_until = 0.0
        self._waits: Sleep | Receive | None = None
        self._turn = 0
        self._life: Life = self._live()

    def __repr__(self) -> str:
        place = f"step {self.state.step}, epoch {self.state.epoch}, row {self.state.row}"
        return f"{self.name}: {place}, {digest_of(self.state.weights)}"

    @property
    def is_windowed(self) -> bool:
        return self.description.windowed is not None

    @property
    def weights(self) -> bytes:
        return self.state.weights.tobytes()

    # Being driven

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
        self._inbox.append(Lost("it broke"))
        if isinstance(self._waits, Receive):
            self._wake()

    def _resume(self, value: Any) -> None:
        if self.dead or self.done:
            return
        if self._is_silent:
            self._turn += 1
            turn = self._turn
            self.clock.at(self._silent_until, lambda: self._resume(value) if turn == self._turn else None)
            return
        self._waits = None
        self._turn += 1
        try:
            self._waits = self._life.send(value)
        except StopIteration:
            self.done = True
        except Ended as error:
            self.error, self.done = str(error), True
        if self.done and self.line is not None:
            self.line.close()
        if self.dead or self.done:
            return
        turn = self._turn
        seconds = self._waits.seconds if isinstance(self._waits, Sleep) else self._waits.timeout_s
        if isinstance(self._waits, Receive) and self._inbox:
            self._wake()
        elif seconds is not None:
            self.clock.after(seconds, lambda: self._resume(None) if turn == self._turn else None)

    def _wake(self) -> None:
        turn = self._turn

        def go() -> None:
            if turn == self._turn and self._inbox:
                self._resume(self._inbox.popleft())

        self.clock.after(0.0, go)

    @property
    def _is_silent(self) -> bool:
        return self.clock.now < self._silent_until

    # As client.py does

    def _on_down(self, line: Line, item: Any) -> None:
        self._unread.append((line, item))
        self._read_on()

    def _read_on(self) -> None:
        if self._is_silent:
            self.clock.at(self._silent_until, self._read_on)
        while self._unread and not self._is_silent:
            self._take(*self._unread.popleft())

    def _take(self, line: Line, item: Any) -> None:
        if self.dead or self.done or line is not self.line:
            return
        match item:
            case Average():
                if item.step > self._since:
                    parts = self._means.setdefault(item.step, {})
                    # Once more if the step was begun anew, and then with the same bits.
                    before = parts.setdefault(item.part, item.values)
                    if self.is_windowed or self.fleet.faults.flips:
                        before = parts[item.part] = item.values
                    assert before.tobytes() == item.values.tobytes(), f"{self.name} got two means of step {item.step}"
            case StateMore():
                for parcel in line.parcels:
                    if parcel.transfer == item.transfer:
                        parcel.credit += item.chunks
                        parcel.cancelled = not item.chunks
                        break
                self._send_chunks(line)
            case Heartbeat():
                pass
            case _:
                if isinstance(item, Lost):
                    line.is_open = False
                elif isinstance(item, Admitted):  # the averages that follow are of what is after this step
                    self._since = item.step
                    self._means.clear()
                self._inbox.append(item)
        if isinstance(self._waits, Receive) and self._inbox:
            self._wake()

    def _beat(self, line: Line) -> None:
        if self.dead or self.done or line is not self.line or not line.is_open:
            return
        if not self._is_silent:
            line.send(Heartbeat(self.name, int(self.clock.now * 1000)))
        self.clock.after(self.fleet.patience_s / 4, lambda: self._beat(line))

    def _send_chunks(self, line: Line) -> None:
        """Of parcels with one number, one after the other: credit for one must not be taken for another's."""
        for transfer in dict.fromkeys(parcel.transfer for parcel in line.parcels):
            while mine := [parcel for parcel in line.parcels if parcel.transfer == transfer]:
                parcel = mine[0]
                if parcel.begin is not None:
                    line.send(parcel.begin)
                    parcel.begin = None
                if parcel.cancelled or (parcel.credit and not parcel.chunks):
                    line.parcels.remove(parcel)
                    continue
                if not parcel.credit:
                    break
                parcel.credit -= 1
                line.send(StateChunk(transfer, parcel.chunks.pop(0)))
                if len(parcel.chunks) == 3:
                    self._meet("parcel", self.state.step)

    def _connect(self) -> Life:
        if self.line is not None:
            self.line.close()
        while True:
            while not self.fleet.host.is_up:
                yield Sleep(0.05)
            self._inbox.clear()
            self._means.clear()
            self.line = self.fleet.connect(self._on_down, self.latency_s)
            yield from self._at("connected", self.state.step + 1)
            self._send(Hello(PROTOCOL, self.fleet.secret, self.name, self.kind))
            answer = yield Receive()
            if isinstance(answer, Refusal) and answer.code == TOO_SOON:
                self.held_off.append(self.clock.now)
                self.line.close()
            elif not isinstance(answer, Lost):
                break
            yield Sleep(0.05)
        if isinstance(answer, Refusal):
            raise Ended(answer.sentence)
        assert isinstance(answer, Welcome), answer
        self._welcome = answer
        self._beat(self.line)

    def _send(self, item: Any) -> None:
        assert self.line is not None
        if not self.dead:
            self.line.send(item)

    # As engine/led.py drives it

    def _live(self) -> Life:
        yield from self._connect()
        yield from self._present()
        yield from self._settle()
        yield from self._train()
        if self.save_every:
            yield from self._save()
            yield from self._wait_for_saves()
        if not self.member.is_over:
            yield from self._do(self.member.finish(self.clock.now))
            yield from self._settle()

    def _train(self) -> Life:
        """Until the end, which is on the host's disk before the loop is over where it is known: till then this worker
        may be put back, and train on."""
        while True:
            while not self.stopping and self.state.epoch < self.fleet.epochs:
                yield from self._rest_of_epoch()
            if not self.stopping and self.description.rows_limit:
                yield from self._save()
                yield from self._wait_for_saves()
            if self.stopping or self.state.epoch >= self.fleet.epochs:
                self.finished = self.state.epoch >= self.fleet.epochs and self.member.is_in and not self.member.left
                return

    def _rest_of_epoch(self) -> Life:
        while not self.stopping and self.state.row < ROWS and self.state.epoch < self.fleet.epochs:
            if (work := self.member.begin()) is None:
                yield from self._check_weights()
            else:
                yield from self._compute(work)
            yield from self._await_step()
        if self.state.row >= ROWS:
            self.state.epoch, self.state.row = self.state.epoch + 1, 0

    def _await_step(self) -> Life:
        while True:
            for effect in self.member.take():
                match effect:
                    case effects.Compute():
                        return
                    case effects.Apply():
                        yield from self._commit(effect.committed)
                        return
                    case _:
                        yield from self._do([effect])
            if (yield from self._pump()):
                return

    def _pump(self) -> Life:
        """One message, or none in time, and what it leads to. Whether the run may stand elsewhere than before."""
        turn = self.member.turn
        yield from self._hear()
        yield from self._settle()
        return self.member.turn != turn

    def _settle(self) -> Life:
        """Until this worker is in the run, or out of it."""
        while not self.member.is_settled:
            yield from self._hear()
        self.stopping |= self.member.is_over

    def _hear(self) -> Life:
        item = yield Receive(self.member.wait_s(self.clock.now))
        match item:
            case None:
                yield from self._do(self.member.nothing(self.clock.now))
            case Lost():
                yield from self._do(self.member.lost(item.why))
            case _:
                yield from self._do(self.member.hear(self.clock.now, item))

    def _do(self, found: list[effects.Effect]) -> Life:
        for effect in found:
            match effect:
                case effects.Send():
                    self._send(effect.message)
                case effects.Fail():
                    raise Ended(effect.sentence)
                case effects.DropAhead():
                    self._held = self._own = None
                case effects.Rejoin():
                    self._held = self._own = None
                    yield Sleep(0.05)
                    yield from self._connect()
                    yield from self._present()
                case effects.StandAt():
                    self.state.epoch, self.state.row = effect.epoch, effect.row
                case effects.SkipAverages():
                    self._since = effect.step
                    self._means = {number: parts for number, parts in self._means.items() if number > effect.step}
                case effects.ReceiveState():
                    self._arriving, self._arriving_bytes = b"", json.loads(effect.header)[0][1]
                case effects.TakeChunk():
                    yield from self._take_chunk(bytes(effect.data))
                case effects.Load():
                    self.state = State.from_bytes(self._arriving)
                    self._held = self._own = None
                    yield from self._do(self.member.loaded(self.state.step, self.state.step))
                case effects.ServeState():
                    yield from self._send_state(effect.transfer)
                case effects.TellApplied():
                    self._told = digest_of(self.state.weights)
                    drift = self.drifts.get(self.state.step, 0.0)
                    self._send(Applied(self.state.step, self._told, 0.1, 1.0, effect.fault, drift))
                case effects.LookAt():
                    yield from self._at("evaluating", self.state.step)
                    yield Sleep(self.slice_s)
                    rows = float(effect.end - effect.start)
                    yield from self._do(self.member.looked(effect, validation_of(effect.start, effect.end), rows))

    def _take_chunk(self, data: bytes) -> Life:
        self._arriving += data
        left = self._arriving_bytes - len(self._arriving)
        if left <= self._arriving_bytes // 2 < left + len(data):
            yield from self._at("catching up", self.state.step)

    def _present(self) -> Life:
        yield from self._at("joined", self.state.step + 1)
        before, self._told = self._told, digest_of(self.state.weights)
        described, is_same = self.description.to_json(), before == self._told
        assert self._welcome is not None
        yield from self._do(self.member.present(self._welcome, described, self._told, is_same=is_same))

    def _compute_window(self, work: Work) -> Life:
        """As ElasticWindowEngine does: steps of its own, then what they changed."""
        started, line, (number, _) = self.clock.now, self.line, work.nodes
        (start, end) = sized_rows(work.row, map(int, work.sizes))[number]
        batches = -(-(end - start) // work.batch)
        is_ahead = work.step == self.state.step + 2
        assert is_ahead or work.step == self.state.step + 1, f"{self} has work of step {work.step}"
        begun = self._own if is_ahead and self._own is not None else self.state.weights
        yield from self._at("forward", work.step)
        yield Sleep(batches * self.batch_s)
        self.state.momentum = self.state.momentum * np.float32(0.5) + _noise(work.epoch, start, end)
        change = (begun + self.state.momentum) * np.float32(0.01)
        told = SliceReport(
            work.step,
            np.array([number], "<u4"),
            np.array([end - start], "<f8"),
            np.array([loss_of(work.epoch, start, end)], "<f8"),
            self.clock.now - started,
            b"",
            batches,
        )
        if is_ahead:
            self._held = told, change
            yield from self._at("ahead", work.step)
        else:
            self._own = begun - change
            yield from self._send_window(told, change, line)

    def _send_window(self, told: SliceReport, change: Floats, line: Line | None) -> Life:
        step, weight = told.step, np.float32(told.samples[0] * UNIT)
        self._send(told)
        yield from self._check_weights(in_step=True)
        edges = np.cumsum([0, *PARTS])
        for part in range(len(PARTS)):
            values = change[edges[part] : edges[part + 1]] * weight
            if part == 1:
                yield from self._at("backward", step)
                if self.fleet.faults.take(self.name, "half", step) is not None:
                    self._send(Payload(step, part, values[:CHUNK], cut=True))
                    self.kill()
                    yield Receive()
            self._send(Payload(step, part, values))
        if line is self.line:
            self.slices_computed.append((step, int(told.slices[0])))
        yield from self._at("sent", step)

    def _compute(self, work: Work) -> Life:
        if work.batch:
            yield from self._compute_window(work)
            return
        started, line = self.clock.now, self.line
        nodes = [(int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True)]
        numbers = [number for node in nodes for number in range(*node)]
        bounds = slice_rows(work.row, work.rows, work.slices)
        yield from self._at("forward", work.step)
        for _ in numbers[:-1]:
            yield Sleep(self.slice_s)
        losses = []
        for n in numbers:
            poisoned = self.fleet.faults.take(self.name, "loss", work.step, n)
            losses.append(math.inf if poisoned else loss_of(work.epoch, *bounds[n]))
        samples = np.array([bounds[n][1] - bounds[n][0] for n in numbers], "<f8")
        self._report(work.step, numbers, samples, np.array(losses, "<f8"))
        sums = [self._sum_of(work, node, bounds) for node in nodes]
        edges = np.cumsum([0, *PARTS])
        for part in range(len(PARTS)):
            yield Sleep(self.slice_s / len(PARTS))
            if part == len(PARTS) - 1:
                yield from self._check_weights(in_step=True)
                self._report(work.step, [], np.zeros(0), np.zeros(0), self.clock.now - started, b"\x07")
            for index, total in enumerate(sums):
                values = total[edges[part] : edges[part + 1]]
                if part == 1 and index == 0:
                    yield from self._at("backward", work.step)
                    if self.fleet.faults.take(self.name, "half", work.step) is not None:
                        self._send(Payload(work.step, part, values[:CHUNK], cut=True))
                        self.kill()
                        yield Receive()
                self._send(Payload(work.step, part, values))
        if line is self.line:
            self.slices_computed += [(work.step, number) for number in numbers]
        yield from self._at("sent", work.step)

    def _sum_of(self, work: Work, node: Node, bounds: list[tuple[int, int]]) -> Floats:
        """As SliceSums adds them: each slice into the sums that are waiting for it."""
        stack: list[Floats] = []
        for number, count in zip(range(*node), merges(node), strict=True):
            value = gradient_of(self.state.weights, work.epoch, *bounds[number])
            if self.fleet.faults.take(self.name, "gradient", work.step, number):
                value[PARTS[0] + 1] = np.nan
            for _ in range(count):
                value = stack.pop() + value
            stack.append(value)
        (total,) = stack
        return total

    def _report(
        self, step: int, numbers: list[int], samples: Any, losses: Any, busy_s: float = 0.0, used: bytes = b""
    ) -> None:
        self._send(SliceReport(step, np.array(numbers, "<u4"), samples, losses, busy_s, used))

    def _commit(self, committed: Committed) -> Life:
        yield from self._at("committed", self.state.step)
        if len(self._means.get(committed.step, {})) < len(PARTS):
            return  # the averages come first, so that a loss is next
        parts = self._means.pop(committed.step)
        mean = np.concatenate([parts[part] for part in range(len(PARTS))])
        yield from self._check_weights(in_step=True)
        held, self._held, self._own = self._held, None, None
        assert self.member.is_ahead == (held is not None), f"{self} has not done ahead what it should"
        sends = self.member.agree(committed)
        (self.state.agree if self.is_windowed else self.state.apply)(mean, committed.rows)
        assert self.state.step == committed.step, f"{self.name} missed a step before {committed.step}"
        self.state.weights = self.update(self.state.weights)
        if self.fleet.faults.take(self.name, "applying", committed.step):
            self.state.weights[0] += 1
        yield from self._do([effects.TellApplied()])
        self.stopping |= bool(committed.stop)
        if held is not None and sends:
            self._own = self.state.weights - held[1]
            yield from self._send_window(*held, self.line)
        self.state.weights = self.own_code(self.state.weights)
        yield from self._at("applied", self.state.step)
        if not self.member.is_replaying:
            if self.evaluate_every and self.state.step % self.evaluate_every == 0 and not self.stopping:
                yield from self._evaluate()
            if self.save_every and self.state.step % self.save_every == 0:
                yield from self._save()
        if self.member.wants_stop and not self.stopping:
            yield from self._do(self.member.leave(self.clock.now))
            yield from self._settle()

    def _check_weights(self, *, in_step: bool = False) -> Life:
        if digest_of(self.state.weights) != self._told:
            yield from self._do(self.member.changed(in_step=in_step))

    def _evaluate(self) -> Life:
        step = self.state.step
        yield from self._do(self.member.evaluate(VALIDATION_ROWS, VALIDATION_SIZE))
        evaluation = self.member.evaluation
        assert evaluation is not None
        while evaluation.loss is None:
            yield from self._pump()
        if not math.isnan(evaluation.loss):
            self.validated[step] = evaluation.loss

    def _save(self) -> Life:
        is_past = self.member.is_replaying and self.state.epoch < self.fleet.epochs
        if is_past or self.member.left or self.member.is_over or self.member.save_due == self.state.step:
            return
        if self.member.leads:
            yield from self._wait_for_saves(until_kept=False)
        told, *served = self.member.save(self.clock.now, 2)
        yield from self._do([told])
        yield from self._at("save due", self.state.step)
        yield from self._do(served)

    def _wait_for_saves(self, *, until_kept: bool = True) -> Life:
        while self.member.is_saving(until_kept=until_kept):
            yield from self._pump()

    def _send_state(self, transfer: int) -> Life:
        data, step, line = self.state.to_bytes(), self.state.step, self.line
        yield from self._check_weights()
        assert line is not None

        def begin() -> None:
            if self.dead or self.done or not line.is_open:
                return
            header, pieces = _packed(data)
            line.parcels.append(Parcel(transfer, pieces, StateBegin(transfer, step, header)))
            self._send_chunks(line)

        self.clock.after(self.pack_s, begin)

    # Meeting faults

    def _at(self, phase: str, step: int) -> Life:
        fault = self._meet(phase, step)
        if self.dead:
            yield Receive()
        if fault is not None and fault.kind in ("stall", "silence"):
            yield Sleep(fault.seconds)

    def _meet(self, phase: str, step: int) -> Fault | None:
        fault = self.fleet.faults.take(self.name, phase, step)
        match fault.kind if fault is not None else None:
            case "kill":
                self.kill()
            case "silence":
                assert fault is not None
                self._silent_until = self.clock.now + fault.seconds
            case "leave":
                self.member.wants_stop = True
            case "cut":
                self.lose_connection()
            case "quit":
                self.stopping = True
            case "flip":
                self.state.weights = self.state.weights.copy()
                self.state.weights.view(np.uint32)[3] ^= 1 << 22
        return fault


# The fleet


class Fleet:
    def __init__(
        self,
        *,
        workers: int = 0,
        faults: FaultScript | None = None,
        patience_s: float = PATIENCE_S,
        epochs: int = EPOCHS,
        at_least: int | None = None,
        journal: Path | str = ":memory:",
        **options: Any,
    ) -> None:
        """`workers` are called w0, w1, ..., come at once, and each has the `options`."""
        self.clock = VirtualClock()
        self.faults = faults or FaultScript()
        self.patience_s = patience_s
        self.epochs = epochs
        self.secret = SECRET
        self.events: list[Event] = []
        self.records: list[StepRecord] = []
        self.on_record: Callable[[StepRecord], None] = lambda record: None
        """Called when the journal has it."""
        self.workers: dict[str, Worker] = {}
        self.restores = 0
        self.journal = Journal(Path(journal))
        self.disk = Disk()
        self._at_least = at_least if at_least is not None else max(1, workers)
        self._next_peer = 0
        self._expected = 0
        self._next_id = 0
        self.host = self._start_host()
        for number in range(workers):
            self.add(f"w{number}", **options)

    @property
    def core(self) -> Coordinator:
        return self.host.core

    def _start_host(self) -> Host:
        resumed = replace(self.journal.resumed(), next_id=self._next_id, expected=self._expected)
        coordinator = Coordinator(
            patience_s=self.patience_s,
            secret=SECRET,
            at_least=self._at_least,
            resumed=resumed,
        )
        return Host(self, coordinator, self.journal, self.disk)

    def crash_host(self, back_after_s: float = 1.0) -> None:
        """The coordinator dies; another goes on from its journal."""
        self._next_id = self.core.membership.next_id
        self.host.crash()

        def come_back() -> None:
            self.host = self._start_host()

        self.clock.after(back_after_s, come_back)

    def add(self, name: str, *, at_s: float = 0.0, **options: Any) -> Worker:
        worker = self.workers[name] = Worker(self, name, **options)
        self.clock.after(at_s, worker.start)
        return worker

    def connect(self, on_down: Callable[[Line, Any], None], latency_s: float = 0.001) -> Line:
        self._next_peer += 1
        line = Line(self.clock, self.host, self._next_peer, on_down, latency_s)
        self.host.accept(line)
        return line

    def stranger(self) -> Line:
        """A connection that the test speaks on by itself. What comes back is in `received`."""
        return self.connect(lambda line, item: None)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerCame | WorkerWent):  # as the host's journal has it
            self._expected = len(self.core.membership.ready)

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def member(self, name: str) -> Any:
        return next((m for m in self.core.membership.members.values() if m.name == name), None)

    def run_until(self, condition: Callable[[], bool], limit_s: float = 1000.0) -> None:
        assert self.clock.run(condition, limit_s), f"it did not come about in {limit_s} s: {self.describe()}"

    def run_for(self, seconds: float) -> None:
        self.clock.run(lambda: False, seconds)

    def finish(self, limit_s: float = 2000.0) -> "Fleet":
        """Until the run is over, as it should be: the same weights everywhere, and each row used once."""
        self.run_until(lambda: self.host.finish is not None, limit_s)
        assert self.host.finish is not None and not self.host.finish.failed, self.host.finish
        self.run_for(1.0)
        self.assert_right()
        return self

    def assert_right(self) -> None:
        for epoch in range(self.epochs):
            assert prove(self.journal.ranges(epoch), ROWS).holds, prove(self.journal.ranges(epoch), ROWS)
        described = self.core.description
        if described is not None and described.windowed is not None:
            end = self.standing().step  # a run that began anew has another, and other weights
            last = [w for w in self.workers.values() if (w.state.epoch, w.state.step) == (self.epochs, end)]
            if described.rows_limit:  # then whoever has finished has what is kept; one that was killed may have less
                last = [worker for worker in self.workers.values() if worker.finished]
                assert {w.weights for w in last} == {State.from_bytes(self.disk.states[end]).weights.tobytes()}, last
            assert last and len({worker.weights for worker in last}) == 1, [w.state for w in self.workers.values()]
            return
        steps = self.epochs * -(-ROWS // BATCH)
        ended = [worker for worker in self.workers.values() if worker.state.step == steps]
        assert ended, f"nobody saw the end: {[(w.name, w.state.step, w.error) for w in self.workers.values()]}"
        for worker in ended:
            assert worker.weights == undisturbed(steps), f"{worker.name} has other weights"
        assert self.journal.steps() == list(range(1, steps + 1))

    def standing(self) -> Standing:
        return self.core.standing

    def describe(self) -> str:
        members = [
            f"{m.name}: {m.phase.name}, {m.doing(self.core.standing.step)}, {m.nodes}"
            for m in self.core.membership.members.values()
        ]
        workers = [
            f"{w.name}: step {w.state.step}, waits for {w._waits}, inbox {list(w._inbox)[:2]}, error {w.error}"
            for w in self.workers.values()
            if not w.dead and not w.done
        ]
        held = [line.peer for line in self.host.lines.values() if line.held]
        under = self.core.now
        step = f"{under.step} with {len(under.reports)} reports of {under.slices} slices" if under else "none"
        return (
            f"step {self.core.standing.step}, under way {step}; members {members}; workers {workers}; held {held};"
            f" refused {dict(self.core.refused)}; fired {self.faults.fired}, pending {self.faults.pending}"
        )
