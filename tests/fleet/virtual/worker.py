"""A worker of a virtual fleet: a real Member, and a toy to compute with."""

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from potluck.agree.records import Position, Range
from potluck.fleet.description import Description
from potluck.fleet.holder import ConnectionLost, Looked
from potluck.fleet.member import Member, MemberPhase, is_together
from potluck.fleet.tree import Node
from potluck.wire.messages import Applied, Committed, Message, SliceReport, Welcome, Work
from tests.fleet.virtual.client import Client
from tests.fleet.virtual.faults import Fault
from tests.fleet.virtual.line import Lost, Payload
from tests.fleet.virtual.process import Life, Receive, Sleep
from tests.fleet.virtual.task import Task
from tests.fleet.virtual.toy import (
    BATCH,
    CHUNK,
    PARTS,
    ROWS,
    VALIDATION_ROWS,
    VALIDATION_SIZE,
    Floats,
    State,
    described,
    digest_of,
    fresh_weights,
    loss_of,
    rows_after,
    validation_of,
)

if TYPE_CHECKING:
    from tests.fleet.virtual.fleet import Fleet

NAMES = '["loss", "two"]'
"""Of what it finds where it looks at held-out rows."""


class Worker(Client):
    def __init__(self, fleet: "Fleet", name: str, **options: Any) -> None:
        super().__init__(fleet, name, options.pop("latency_s", 0.001), options.pop("kind", "cpu"))
        self.slice_s: float = options.pop("slice_s", 0.1)
        self.evaluate_every: int = options.pop("evaluate_every", 0)
        self.names: str = options.pop("names", NAMES)
        self.gather_every: int = options.pop("gather_every", 0)
        self.ends_at: int = options.pop("ends_at", 0)
        """The step after which its loop finds that the run is over, though rows are left."""
        self.save_every: int = options.pop("save_every", 0)
        self.keeps_best: bool = options.pop("keeps_best", False)
        self.best = 0
        """Every third step is its best so far, and the last, which it says once its loop is over."""
        self.pack_s: float = options.pop("pack_s", 0.005)
        self.description: Description = options.pop("description", None) or described()
        self.state = State(weights=options.pop("weights", fresh_weights()))
        self.drifts: dict[int, float] = options.pop("drifts", {})
        """step -> what it tells of how far it was from the others"""
        self.figures: str = options.pop("figures", "")
        """What it tells of each window beside times and counts."""
        self.batch_s: float = options.pop("batch_s", 0.1)
        """Of a step of its own."""
        self.own_code: Callable[[Floats], Floats] = options.pop("own_code", lambda weights: weights)
        """What its loop does to the weights between two steps."""
        self.update: Callable[[Floats], Floats] = options.pop("update", lambda weights: weights)
        """What its device does to them in each."""
        assert not options, f"unknown options {options}"
        self.may_differ = self.is_windowed or fleet.faults.flips
        self.member = Member(ToyHolder(self))
        self.validated: dict[int, float] = {}
        self.gathered: dict[int, list[str]] = {}
        """Of each step, whose values it was given: each is its worker's name and the step."""
        self.stopping = False
        self.has_finished = False
        self.slices_computed: list[tuple[int, int]] = []
        """(step, slice)"""
        self.doing: Work | None = None
        """What it is computing."""

    def __repr__(self) -> str:
        place = f"step {self.state.step}, epoch {self.state.epoch}, row {self.state.row}"
        return f"{self.name}: {place}, {digest_of(self.state.weights)}"

    @property
    def is_windowed(self) -> bool:
        return self.description.windowed is not None

    @property
    def is_like_sync(self) -> bool:
        """Whether all steps that its weights are of were taken together."""
        policy, step = self.description.windowed, self.state.step
        if policy is None or not step or policy.chooses:
            return policy is None
        share = policy.together * self.description.rows_limit
        return self.description.batch == BATCH and rows_after(step - 1) < share

    @property
    def weights(self) -> bytes:
        return self.state.weights.tobytes()

    @property
    def is_at_the_end(self) -> bool:
        return self.state.epoch >= self.fleet.epochs

    def ask_to_leave(self) -> None:
        self.member.wants_stop = "asked to stop"
        self.poke()

    # The loop

    def live(self) -> Life:
        yield from self.join()
        yield from self.member.join()
        yield from self._train()
        if self.save_every:
            yield from self._save()
            yield from self.member.await_saves(until_kept=True)
        yield from self._keep_best()
        yield from self.member.finish()

    def _train(self) -> Life:
        """Until the end, which is on the host's disk before the loop is over where it is known: till then this worker
        may be put back, and train on."""
        while True:
            while not self.stopping and not self.is_at_the_end:
                yield from self._rest_of_epoch()
            if not self.stopping and self.description.rows_limit:
                yield from self._save()
                yield from self.member.await_saves(until_kept=True)
            if self.stopping or self.is_at_the_end:
                self.has_finished = self.is_at_the_end and self.member.is_in and not self.member.left
                return

    def _rest_of_epoch(self) -> Life:
        while self._has_rows():
            if (yield from self.member.leave_if_asked()):
                continue
            if (work := self.member.begin()) is None:
                self.member.check_weights()
            else:
                self.doing = work
                yield from self._compute(work)
                self.doing = None
            if (found := (yield from self.member.await_step())) is not None:
                yield from self._commit(*found)
        if self.state.row >= ROWS:
            self.state.epoch, self.state.row = self.state.epoch + 1, 0

    def _has_rows(self) -> bool:
        """A worker that is given the last weights may be put at the beginning of an epoch that nobody trains."""
        return not self.stopping and self.state.row < ROWS and not self.is_at_the_end

    # Steps

    def _compute(self, work: Work) -> Life:
        """The reports of a step go before its gradients; of a window the whole is reported, and then sent."""
        started = self.clock.now
        assert work.step == self.state.step + 1, f"{self} has work of step {work.step}"
        task = Task(work, self.state)
        yield from self.at("forward", work.step)
        if work.batch:
            yield from self._take_batches(task)
        else:
            yield Sleep(self.slice_s * (len(task.numbers) - 1))
        losses = [
            math.inf
            if self.fleet.faults.take(self.name, "loss", work.step, n)
            else loss_of(work.epoch, *task.bounds[n])
            for n in task.numbers
        ]
        samples = np.array([task.bounds[n][1] - task.bounds[n][0] for n in task.numbers], "<f8")
        numbers, told = np.array(task.numbers, "<u4"), np.array(losses, "<f8")
        took_s = self.clock.now - started if work.batch else 0.0
        report = SliceReport(
            work.step,
            numbers,
            samples,
            told,
            took_s,
            b"",
            task.batches,
            stopped=task.stopped,
            figures=self.figures if work.batch else "",
        )
        yield from self._send_work(task, report, started)

    def _take_batches(self, task: Task) -> Life:
        """Of a window, of which a worker that leaves does not do all."""
        for done in range(1, task.batches + 1):
            yield Sleep(self.batch_s)
            if self.member.wants_stop and done < task.batches and len(task.numbers) > 1:
                task.stop(done)
                return

    def _send_work(self, task: Task, report: SliceReport, started: float) -> Life:
        work, line = task.work, self.line
        self.send(report)
        if work.batch:
            self.member.check_weights(in_step=True)
        has_momentum = bool(self.description.moments)
        faults = self.fleet.faults
        sums = task.sums(
            lambda number: faults.take(self.name, "gradient", work.step, number) is not None, has_momentum=has_momentum
        )
        for part in range(len(sums[0])):
            if not work.batch:
                yield from self._backward(work, part, started)
            yield from self._send_part(work.step, part, task.nodes, [total[part] for total in sums])
        if line is self.line:
            done = [number for number in task.numbers if task.bounds[number][0] < task.bounds[number][1]]
            self.slices_computed += [(work.step, number) for number in done]
        yield from self.at("sent", work.step)

    def _loss_of(self, work: Work, number: int, rows: Range) -> float:
        is_bad = self.fleet.faults.take(self.name, "loss", work.step, number) is not None
        return math.inf if is_bad else loss_of(work.epoch, *rows)

    def _backward(self, work: Work, part: int, started: float) -> Life:
        """Of the last slice, during which the sums of the parts that are done leave."""
        yield Sleep(self.slice_s / len(PARTS))
        if part == len(PARTS) - 1:
            self.member.check_weights(in_step=True)
            nothing = np.zeros(0)
            self.send(
                SliceReport(work.step, nothing.astype("<u4"), nothing, nothing, self.clock.now - started, b"\x07")
            )

    def _send_part(self, step: int, part: int, nodes: list[Node], sums: list[Floats]) -> Life:
        for node, values in zip(nodes, sums, strict=True):
            if part == 1 and node == nodes[0]:
                yield from self.at("backward", step)
                if self.fleet.faults.take(self.name, "half", step) is not None:
                    self.send(Payload(step, part, values[:CHUNK], cut=True, node=node))
                    self.kill()
                    yield Receive()
            self.send(Payload(step, part, values, node=node))

    def _commit(self, committed: Committed, parts: list[Floats]) -> Life:
        is_step = not self.is_windowed or is_together(committed)
        self.member.check_weights(in_step=True)
        self.member.agree(committed)
        mean = np.concatenate(parts[: len(PARTS)])
        (self.state.apply if is_step else self.state.agree)(mean, committed.rows)
        if len(parts) > len(PARTS):
            self.state.momentum = parts[-1].copy()
        assert self.state.step == committed.step, f"{self.name} missed a step before {committed.step}"
        self.state.weights = self.update(self.state.weights)
        if self.fleet.faults.take(self.name, "applying", committed.step):
            self.state.weights[0] += 1
        yield from self.member.tell_applied(1.0, "")
        self.stopping |= bool(committed.stop)
        self.state.weights = self.own_code(self.state.weights)
        yield from self.at("applied", self.state.step)
        if self.gather_every and self.state.step % self.gather_every == 0:
            yield from self._gather()
        if not self.member.is_replaying:
            if self.evaluate_every and self.state.step % self.evaluate_every == 0 and not self.stopping:
                yield from self._evaluate()
            if self.save_every and self.state.step % self.save_every == 0:
                yield from self._save()
            if self.keeps_best and self.state.step % 3 == 1:
                yield from self._save_best()
        if self.ends_at and self.state.step >= self.ends_at:
            self.stopping = self.member.ends_for_all = True
        if self.member.wants_stop and not self.stopping:
            yield from self.member.leave()

    # Looking, saving, giving

    def _evaluate(self) -> Life:
        step = self.state.step
        evaluation = yield from self.member.evaluate(VALIDATION_ROWS, VALIDATION_SIZE)
        if evaluation.samples:
            self.validated[step] = evaluation.figures[0] / evaluation.samples
            assert (evaluation.names, evaluation.figures[1]) == (NAMES, 2 * evaluation.samples)

    def _gather(self) -> Life:
        step = self.state.step
        gathered = yield from self.member.gather(f"{self.name} {step}".encode())
        found = self.gathered[step] = [data.decode() for data in gathered]
        is_right = len({*found}) == len(found) and all(each.endswith(f" {step}") for each in found)
        assert is_right, f"{self} was given {found}"

    def _save(self) -> Life:
        is_past = self.member.is_replaying and not self.is_at_the_end
        if not (is_past or self.member.left or self.member.is_over or self.member.saves.due == self.state.step):
            yield from self.member.save(2)

    def _save_best(self) -> Life:
        member, step = self.member, self.state.step
        is_asked = (member.saves.due, member.saves.is_best) >= (step, True)
        is_past = member.is_replaying and not self.is_at_the_end
        if not (is_past or member.left or member.is_over or is_asked):
            self.best = step
            yield from member.save(2, is_best=True)

    def _keep_best(self) -> Life:
        """What a script does after its loop, whose last step was kept before it."""
        member, step = self.member, self.state.step
        if not self.keeps_best:
            return
        yield from self._save_best()
        yield from member.await_saves(until_kept=True)
        if member.left or member.is_over or self.fleet.lost_at:  # else the disk may have lost what it had
            return
        newest = self.fleet.disk.newest
        if member.saves.is_best and member.saves.due == newest == step:  # else the run has gone back meanwhile
            assert State.from_bytes(self.fleet.disk.states[newest]).best == step, f"{self}'s best step is not kept so"

    # Meeting faults

    def reach(self, phase: str) -> Life:
        yield from self.at(phase, self.state.step + 1)

    def on_half_sent(self) -> None:
        self._meet("parcel", self.state.step)

    def at(self, phase: str, step: int) -> Life:
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
                self.clock.stop(fault.seconds)
            case "leave":
                self.member.wants_stop = "asked to stop"
            case "cut":
                self.lose_connection()
            case "quit":
                self.stopping = True
            case "flip":
                self.state.weights = self.state.weights.copy()
                self.state.weights.view(np.uint32)[3] ^= 1 << 22
        return fault


class ToyHolder:
    """What a Member asks of a virtual worker: it waits on the virtual clock."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._told = ""
        self._arriving, self._arriving_bytes = b"", 0

    @property
    def rows_seen(self) -> int:
        return self._worker.state.epoch * ROWS + self._worker.state.row

    def now(self) -> float:
        return self._worker.clock.now

    def send(self, message: Message) -> None:
        self._worker.send(message)

    def say(self, sentence: str) -> None:
        pass

    def hear(self, timeout_s: float) -> Life:
        # A real worker looks every fifth of a second whether it is to stop; this one is poked.
        member = self._worker.member
        waits = member.phase is MemberPhase.LEAVING or member.wants_stop
        item = yield Receive(timeout_s if waits else None)
        return ConnectionLost(item.why) if isinstance(item, Lost) else item

    def connect(self) -> Life:
        yield Sleep(0.05)
        yield from self._worker.join()

    def reach(self, phase: str, step: int) -> Life:
        if phase in ("joined", "gathering", "save due"):  # the others the worker meets by itself
            yield from self._worker.at(phase, step)

    def welcome(self) -> Welcome:
        assert self._worker.welcome is not None
        return self._worker.welcome

    def describe(self) -> Description:
        return self._worker.description

    def digest(self) -> str:
        self._told = digest_of(self._worker.state.weights)
        return self._told

    def is_changed(self) -> bool:
        return digest_of(self._worker.state.weights) != self._told

    def applied_message(self, version: int, digest: str, norm: float, fault: str) -> Applied:
        step = self._worker.state.step
        return Applied(step, digest, 0.1, 1.0, fault, self._worker.drifts.get(step, 0.0))

    def average(self, step: int, without: frozenset[int]) -> Life:
        worker = self._worker
        yield from worker.at("committed", worker.state.step)
        return worker.take_means(step, len(worker.description.parts) - len(without))

    def pass_over_until(self, step: int) -> None:
        self._worker.pass_over_until(step)

    def stand_at(self, position: Position) -> None:
        self._worker.state.epoch, self._worker.state.row = position.epoch, position.row

    def forget(self) -> None:
        pass

    def stop(self) -> None:
        self._worker.stopping = True

    def nonfinite_hint(self) -> str:
        return ""

    def look_at(self, start: int, end: int) -> Life:
        worker = self._worker
        yield from worker.at("evaluating", worker.state.step)
        yield Sleep(worker.slice_s)
        return Looked(worker.names, [validation_of(start, end), 2.0 * (end - start)], float(end - start))

    def receive_state(self, step: int, header: str) -> None:
        self._arriving, self._arriving_bytes = b"", json.loads(header)[0][1]

    def take_chunk(self, data: bytes | memoryview) -> Life:
        self._arriving += bytes(data)
        left = self._arriving_bytes - len(self._arriving)
        if left <= self._arriving_bytes // 2 < left + len(data):
            yield from self._worker.at("catching up", self._worker.state.step)

    def load_state(self) -> tuple[int, int]:
        self._worker.state = State.from_bytes(self._arriving)
        return self._worker.state.step, self._worker.state.step

    def drop_state(self) -> None:
        self._arriving = b""

    def serve_state(self, transfer: int, version: int) -> Life:
        yield from ()
        worker = self._worker
        worker.state.best = worker.best
        data, step, line = worker.state.to_bytes(), worker.state.step, worker.line
        is_best = worker.best == step
        worker.member.check_weights()
        assert line is not None
        worker.fleet.clock.after(worker.pack_s, lambda: worker.send_parcel(line, transfer, step, data, is_best))
