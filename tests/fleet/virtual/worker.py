"""A worker of a virtual fleet: a real Member, with a toy to compute with."""

import json
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.fleet import member_effects as effects
from potluck.fleet.coordinator import PROTOCOL, TOO_SOON
from potluck.fleet.description import Description
from potluck.fleet.member import Member
from potluck.fleet.tree import Node, merges, sized_rows, slice_rows
from potluck.wire.messages import (
    Admitted,
    Applied,
    Committed,
    Heartbeat,
    Hello,
    Refusal,
    SliceReport,
    StateBegin,
    StateChunk,
    StateMore,
    Welcome,
    Work,
)
from tests.fleet.virtual.faults import Fault
from tests.fleet.virtual.line import Average, Line, Lost, Parcel, Payload, packed
from tests.fleet.virtual.toy import (
    CHUNK,
    PARTS,
    ROWS,
    UNIT,
    VALIDATION_ROWS,
    VALIDATION_SIZE,
    Floats,
    State,
    described,
    digest_of,
    fresh_weights,
    gradient_of,
    loss_of,
    noise,
    validation_of,
)

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet


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
                case effects.Rejoin():
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
        yield from self._at("forward", work.step)
        yield Sleep(batches * self.batch_s)
        self.state.momentum = self.state.momentum * np.float32(0.5) + noise(work.epoch, start, end)
        change = (self.state.weights + self.state.momentum) * np.float32(0.01 * (end - start) * UNIT)
        told = SliceReport(
            work.step,
            np.array([number], "<u4"),
            np.array([end - start], "<f8"),
            np.array([loss_of(work.epoch, start, end)], "<f8"),
            self.clock.now - started,
            b"",
            batches,
        )
        self._send(told)
        yield from self._check_weights(in_step=True)
        edges = np.cumsum([0, *PARTS])
        for part in range(len(PARTS)):
            values = change[edges[part] : edges[part + 1]]
            if part == 1:
                yield from self._at("backward", work.step)
                if self.fleet.faults.take(self.name, "half", work.step) is not None:
                    self._send(Payload(work.step, part, values[:CHUNK], cut=True))
                    self.kill()
                    yield Receive()
            self._send(Payload(work.step, part, values))
        if line is self.line:
            self.slices_computed.append((work.step, int(number)))
        yield from self._at("sent", work.step)

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
        self.member.agree(committed)
        (self.state.agree if self.is_windowed else self.state.apply)(mean, committed.rows)
        assert self.state.step == committed.step, f"{self.name} missed a step before {committed.step}"
        self.state.weights = self.update(self.state.weights)
        if self.fleet.faults.take(self.name, "applying", committed.step):
            self.state.weights[0] += 1
        yield from self._do([effects.TellApplied()])
        self.stopping |= bool(committed.stop)
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
            header, pieces = packed(data)
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
