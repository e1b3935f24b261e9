"""SliceSteps: a worker's slices of a step that all take together, computed one by one, and sent as their sums."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from potluck.agree.step_report import StepDecision, decide_mean
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, MicroBatch, plan_step
from potluck.data.rows import mix
from potluck.devices import synchronize
from potluck.engine.host_holder import HostHolder
from potluck.engine.part_sender import PartSender
from potluck.engine.run_parts import RunParts
from potluck.engine.table import Give, Outcome, RoundPlan, RoundWork
from potluck.events import StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.tree import slice_rows
from potluck.replica.replica import Agreed, Replica
from potluck.sums.slices import Gradients, SliceSums
from potluck.wire.messages import SliceReport

ANY_ROWS = BatchConfig(size=1 << 31)
"""A slice goes through the model at once, however many rows it has."""


class SliceSteps(RoundWork):
    ends_each = True

    def __init__(
        self, run: RunParts, replica: Replica, holder: HostHolder, sender: PartSender, gradients: Gradients
    ) -> None:
        self._run = run
        self._replica = replica
        self._holder = holder
        self._sender = sender
        self._gradients = gradients
        self.sums = SliceSums(replica.model, gradients, replica.link, sender.send)
        self.sums.before_last_part = self._send_used
        self.sums.send_exact = lambda exact: self._send_beside(buffers=exact)
        self.slices: list[int] = []
        self._reports: dict[int, tuple[float, float]] = {}
        """Of each slice: the samples of this rank's rows, and the sum of their losses."""
        self._loss = self._samples = 0.0
        self._plan: RoundPlan | None = None
        self._started = 0.0
        self._usual: list[int] = []
        """The slices of the last step that were given to this worker at first."""
        self._usual_at = -1

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.sums.described

    def set_idle(self, is_idle: bool) -> None:
        """Whether the replica's gradients are not slices' now."""
        self._gradients.is_idle = is_idle
        if is_idle:
            self._replica.drop()  # of a slice that was never agreed on, the replica awaits the step

    def seeds_of(self, seed: int, micro: MicroBatch) -> tuple[int, int | None]:
        """The slice's seed, no matter who computes it; the ranks of one worker each draw their own numbers."""
        own = self._seed_of_slice(seed, self._version - self._run.turns.now, self.slices[micro.number])
        return mix(own, 1), own  # what the model draws must not depend on which process reads rows

    def _seed_of_slice(self, seed: int, step: int, number: int) -> int:
        rank = self._replica.link.rank
        return mix(seed, step, number, *([rank + 1] if rank else []))

    def expect(self, loader: Loader) -> None:
        """Batches follow each other, until the epoch ends or the run is put elsewhere; each comes in all its turns."""
        plan, turns = self._plan, self._run.turns
        if plan is None or not self.slices:
            return
        thread = plan.epoch, plan.row * turns.count - (plan.version - turns.now) * loader.batch.size
        loader.follow(thread, plan.row, lambda: self._expected(plan, loader))

    def _expected(self, plan: RoundPlan, loader: Loader) -> Iterator[tuple[MicroBatch, int]]:
        """The slices of this batch, and then the same ones of each that follows: most workers keep theirs."""
        turns, size, rows = self._run.turns, loader.batch.size, loader.rows
        first = step = plan.version - turns.now
        while (row := plan.row + (step - first) // turns.count * size) < rows:
            bounds = slice_rows(row, count := min(size, rows - row), min(len(plan.bounds), count))
            for number in self._usual:
                if number < len(bounds):
                    yield self._own_rows(*bounds[number]), mix(self._seed_of_slice(loader.seed, step, number), 1)
            # Others may have been faster than we read.
            step = max(step, self._version - turns.now) + turns.count

    def begin(self, plan: RoundPlan) -> None:
        self._sender.begin()
        self._plan, self._reports = plan, {}
        self.slices = self.sums.begin(plan.nodes)
        if plan.version != self._usual_at:  # else it is what a lost worker had of the same step
            self._usual, self._usual_at = self.slices, plan.version
        self._started = time.perf_counter()

    def next(self) -> Give | None:
        """One for each slice. Of several ranks, each gets some of its rows, or some that do not count."""
        plan, sums = self._plan, self.sums
        if plan is None or sums.is_last_slice:
            return None
        sums.start_slice()
        self._replica.disarm()
        self._loss = self._samples = 0.0
        own = self._own_rows(*plan.bounds[self.slices[sums.at]])
        return Give(replace(own, last=sums.is_last_slice, step_end=plan.row + plan.rows, number=sums.at))

    def _own_rows(self, start: int, end: int) -> MicroBatch:
        link, in_pairs = self._replica.link, self._run.batch_norm is not None
        (own,) = plan_step(start, end, ANY_ROWS, (1.0,) * link.world, link.rank, in_step=True, in_pairs=in_pairs)
        return own

    def backward(self, micro: MicroBatch | None, loss: Tensor, samples: float, last: bool | None) -> None:
        """`last`: of this slice, of which a loop may give several."""
        assert micro is not None
        last, unit = last is not False, self._run.step.unit
        if micro.number == 0:
            self._holder.announce("forward")
        self._replica.arm(last=last)
        self._run.step.stand_in.close()
        samples = samples if micro.weighs else 0.0
        if samples:
            self._loss += loss.detach().item() * samples
            self._samples += samples
        if last:
            self._reports[self.slices[micro.number]] = (self._samples, self._loss)
            if micro.last:
                self._send_report()
        self._gradients.arm(communicate=last)
        self.sums.scale, self.sums.may_overflow = self._run.step.scale.factor, self._run.step.scale.may_fall
        if samples:
            (loss * (samples * self._run.step.gradient_unit)).backward()  # type: ignore[no-untyped-call]
        self._replica.end_backward()
        if last:
            self.sums.finish_slice(self._samples, unit)
            self._run.step.note_trained(micro)
        self._replica.seal()

    def is_ready(self, micro: MicroBatch | None) -> bool:
        return micro is not None and micro is self._run.step.trained

    def end(self, micro: MicroBatch | None) -> StepSkipped | None:
        self._replica.unseal()
        if micro is not None and micro.last:
            self._holder.announce("sent")
        return None

    def apply(self, outcome: Outcome) -> StepDecision:
        """The mean gradient goes to the optimizer, or all skip it."""
        run, sums = self._run, self.sums
        norm = self._gradients.load(outcome.means, outcome.used)
        decision = decide_mean(outcome.samples, outcome.loss, norm, 1.0, run.config.clip, outcome.fault)
        run.step.scale.learn(outcome.samples, outcome.rows)
        if decision.fault is not None:
            sums.restore_buffers()
        else:
            sums.apply_buffers(outcome.means, outcome.buffers)
            run.step.is_good()
            run.rates.set(run.progress.rows_seen)
            self._replica.apply(decision.scale)
            sums.reset()
        run.step.end_turn()
        return decision

    # What all agreed on

    def agreed(self) -> tuple[Agreed, Sequence[Tensor]]:
        return {}, self.sums.agreed_buffers

    def start_anew(self) -> None:
        self.sums.start_anew()

    def forget(self) -> None:
        """Discards what was computed: the model is again as it was agreed on."""
        self._plan = None
        self.sums.reset()
        self.sums.restore_buffers()

    def _send_report(self) -> None:
        numbers = np.array(list(self._reports), "<u4")
        mine = [number for report in self._reports.values() for number in report]
        found = np.sum(np.array(self._replica.link.gather_rows(mine), "<f8"), axis=0).reshape(-1, 2)
        self._holder.send(SliceReport(self._version, numbers, found[:, 0].copy(), found[:, 1].copy(), 0.0, b""))

    def _send_used(self) -> None:
        """Report which parameters the slices used, and how long they took: both are known when the last part is."""
        synchronize(self._run.device)
        busy_s = time.perf_counter() - self._started
        self._holder.member.check_weights(in_step=True)  # before the last part, without which nothing is committed
        overflowed = self._has_overflowed()
        self._send_beside(busy_s, self._gradients.used_bits(), overflowed=int(overflowed))

    def _has_overflowed(self) -> bool:
        """Here, or on another rank of this worker."""
        if not self.sums.may_overflow:
            return False
        return any(row[0] for row in self._replica.link.gather_rows([float(self.sums.has_overflowed)]))

    def _send_beside(self, busy_s: float = 0.0, used: bytes = b"", **beside: Any) -> None:
        """Send a report of no slice."""
        none = np.zeros(0)
        self._holder.send(SliceReport(self._version, none.astype("<u4"), none, none, busy_s, used, **beside))

    @property
    def _version(self) -> int:
        """The agreement that the slices lead to."""
        return self._holder.version + 1
