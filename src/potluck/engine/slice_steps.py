"""SliceSteps: a worker's slices of a step that all take together, computed one by one, and sent as their sums."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
from torch import Tensor

from potluck.agree.step_report import StepDecision, decide_mean
from potluck.data.plan import BatchConfig, MicroBatch, plan_step
from potluck.data.rows import mix
from potluck.engine.member_driver import MemberDriver
from potluck.engine.part_sender import PartSender
from potluck.engine.replica import Replica
from potluck.engine.run_state import RunState
from potluck.engine.slices import Gradients, SliceSums
from potluck.errors import ConfigError
from potluck.events import StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.member import has_overflowed
from potluck.fleet.tree import Node, slice_rows
from potluck.wire.messages import Committed, SliceReport, Work

ANY_ROWS = BatchConfig(size=1 << 31)
"""A slice goes through the model at once, however many rows it has."""


OVERFLOW = "a gradient overflows in fp16"


class SliceSteps:
    is_repeatable = True
    divergence = 0.0

    def __init__(
        self, run: RunState, replica: Replica, driver: MemberDriver, sender: PartSender, gradients: Gradients
    ) -> None:
        self._run = run
        self._replica = replica
        self._driver = driver
        self._sender = sender
        self.sums = SliceSums(replica.model, gradients, replica.link, sender.send)
        self.sums.before_last_part = self._send_used
        self.sums.send_exact = self._send_exact
        self.slices: list[int] = []
        self._reports: dict[int, tuple[float, float]] = {}
        """Of each slice: the samples of this rank's rows, and the sum of their losses."""
        self._loss = self._samples = 0.0
        self.is_done = True
        """Whether step() was called for the last slice that was given out."""
        self._started = 0.0
        self._usual: list[int] = []
        """The slices of the last step that were given to this worker at first."""
        self._usual_at = -1

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.sums.described

    def set_idle(self, is_idle: bool) -> None:
        """Whether the replica's gradients are not slices' now."""
        self.sums.set_idle(is_idle)
        if is_idle:
            self._replica.drop()  # of a slice that was never agreed on, the replica awaits the step

    def seed_of(self, seed: int, micro: MicroBatch) -> int:
        """The slice's seed; the ranks of one worker each draw their own numbers."""
        return self._seed_of_slice(seed, self._step - self._run.turns.now, self.slices[micro.number])

    def _seed_of_slice(self, seed: int, step: int, number: int) -> int:
        rank = self._replica.link.rank
        return mix(seed, step, number, *([rank + 1] if rank else []))

    def expects_from(self, work: Work) -> tuple[int, ...]:
        """Batches follow each other, until the epoch ends or the run is put elsewhere; each comes in all its turns."""
        loader, turns = self._run.loader, self._run.turns
        assert loader is not None
        return work.epoch, work.row * turns.count - (work.step - turns.now) * loader.batch.size

    def expected(self, work: Work, seed: int) -> Iterator[tuple[MicroBatch, int]]:
        """The slices of this batch, and then the same ones of each that follows: most workers keep theirs."""
        loader, turns = self._run.loader, self._run.turns
        assert loader is not None
        size, rows = loader.batch.size, loader.rows
        first = step = work.step - turns.now
        while (row := work.row + (step - first) // turns.count * size) < rows:
            bounds = slice_rows(row, count := min(size, rows - row), min(work.slices, count))
            for number in self._usual:
                if number < len(bounds):
                    yield self._own_rows(*bounds[number]), self._seed_of_slice(seed, step, number)
            # Others may have been faster than we read.
            step = max(step, self._step - turns.now) + turns.count

    def begin(self, work: Work, nodes: list[Node], bounds: Sequence[tuple[int, int]]) -> None:
        self._sender.begin()
        self._reports, self._bounds = {}, bounds
        self.slices = self.sums.begin(nodes)
        if work.step != self._usual_at:  # else it is what a lost worker had of the same step
            self._usual, self._usual_at = self.slices, work.step
        self._started = time.perf_counter()

    def micro_batches(self, work: Work, is_void: Callable[[], bool]) -> Iterator[MicroBatch]:
        """One for each slice, until all are done or of no use any more. Of several ranks, each gets some of its rows,
        or some that do not count."""
        for index, number in enumerate(self.slices):
            if is_void():
                return
            start, end = self._bounds[number]
            self.sums.start_slice()
            self._replica.disarm()
            self._loss = self._samples = 0.0
            self.is_done = False
            is_last = index == len(self.slices) - 1
            yield replace(self._own_rows(start, end), last=is_last, step_end=work.row + work.rows, number=index)
            if not self.is_done:
                raise ConfigError(
                    f"The slice of rows {start} to {end} was given out, but step() was not called after it."
                    " Call backward() and step() for every batch of the loader."
                )

    def _own_rows(self, start: int, end: int) -> MicroBatch:
        link, in_pairs = self._replica.link, self._run.batch_norm is not None
        (own,) = plan_step(start, end, ANY_ROWS, (1.0,) * link.world, link.rank, in_step=True, in_pairs=in_pairs)
        return own

    def backward(self, micro: MicroBatch, loss: Tensor, samples: float, last: bool | None) -> None:
        """`last`: of this slice, of which a loop may give several."""
        last, unit = last is not False, self._run.unit
        if micro.number == 0:
            self._driver.reach("forward")
        self._replica.arm(last=last)
        self._run.stand_in.close()
        samples = samples if micro.weighs else 0.0
        if samples:
            self._loss += loss.detach().item() * samples
            self._samples += samples
        if last:
            self._reports[self.slices[micro.number]] = (self._samples, self._loss)
            if micro.last:
                self._send_report()
        self.sums.arm(communicate=last)
        self.sums.scale, self.sums.may_overflow = self._run.scale.factor, self._run.scale.may_fall
        if samples:
            (loss * (samples * self._run.gradient_unit)).backward()  # type: ignore[no-untyped-call]
        self._replica.end_backward()
        if last:
            self.sums.finish_slice(self._samples, unit)
            self._run.trained = micro
        self._replica.seal()

    def step(self, micro: MicroBatch) -> tuple[bool, StepSkipped | None]:
        self._replica.unseal()
        self.is_done = True
        if micro.last:
            self._driver.reach("sent")
        return micro.last, None

    def agree(self, committed: Committed, means: list[Tensor]) -> StepDecision:
        """The mean gradient goes to the optimizer, or all skip it."""
        run, sums = self._run, self.sums
        norm = sums.load(means, bytes(committed.used))
        overflow = OVERFLOW if run.scale.is_on and has_overflowed(committed) else None
        decision = decide_mean(committed.samples, committed.loss, norm, 1.0, run.config.clip, overflow)
        run.scale.learn(committed.samples, committed.rows)
        if decision.fault is not None:
            sums.restore_buffers()
            run.next_turn()
            return decision
        sums.apply_buffers(means, bytes(committed.buffers))
        run.good_step()
        run.set_lr(run.rows_seen)
        self._replica.apply(decision.scale)
        sums.reset()
        run.next_turn()
        return decision

    # What all agreed on

    def as_agreed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hash_weights(self) -> tuple[str, Tensor]:
        return self._replica.hash_weights({}, self.sums.agreed_buffers)

    def quick_digest(self) -> Tensor:
        return self._replica.quick_digest({}, self.sums.agreed_buffers)

    def start_anew(self) -> None:
        self.sums.start_anew()

    def forget(self) -> None:
        """Discards what was computed: the model is again as it was agreed on."""
        self.sums.reset()
        self.sums.restore_buffers()

    def _send(self, report: SliceReport) -> None:
        self._driver.client.send(report)

    def _send_report(self) -> None:
        numbers = np.array(list(self._reports), "<u4")
        mine = [number for report in self._reports.values() for number in report]
        found = np.sum(np.array(self._replica.link.gather_rows(mine), "<f8"), axis=0).reshape(-1, 2)
        self._send(SliceReport(self._step, numbers, found[:, 0].copy(), found[:, 1].copy(), 0.0, b""))

    def _send_used(self) -> None:
        """Report which parameters the slices used, and how long they took: both are known when the last part is."""
        self._sender.synchronize()
        busy_s = time.perf_counter() - self._started
        self._driver.check_weights(in_step=True)  # before the last part, without which nothing is committed
        none, overflowed = np.zeros(0), self._has_overflowed()
        report = SliceReport(self._step, none.astype("<u4"), none, none, busy_s, self.sums.used_bits())
        self._send(replace(report, overflowed=1) if overflowed else report)

    def _has_overflowed(self) -> bool:
        """Here, or on another rank of this worker."""
        if not self.sums.may_overflow:
            return False
        return any(row[0] for row in self._replica.link.gather_rows([float(self.sums.has_overflowed)]))

    def _send_exact(self, exact: bytes) -> None:
        none = np.zeros(0)
        self._send(SliceReport(self._step, none.astype("<u4"), none, none, 0.0, b"", buffers=exact))

    @property
    def _step(self) -> int:
        return self._driver.member.version + 1
