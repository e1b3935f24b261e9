"""WindowSteps: a host's worker steps by itself over rows of its own, and all agree once a window.

It steps its own optimizer, batch by batch, and sends what that changed as if it were a gradient; the mean that comes
back is subtracted from the parameters that all began with. So to the host a window is a step like any other: one
agreement, one record, one hash. `step_number` counts whole batches of the run; `version` counts agreements, and is what
the host calls a step.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from torch import Tensor

from potluck.agree.step_report import StepDecision
from potluck.agree.windows import stretch_of
from potluck.data.plan import MicroBatch, even_batches, plan_step
from potluck.data.rows import mix
from potluck.engine.figures import WindowFigures
from potluck.engine.local_steps import backward, end_batch, step_alone
from potluck.engine.means import HostMean
from potluck.engine.member_driver import MemberDriver
from potluck.engine.part_sender import PartSender
from potluck.engine.run_state import RunState
from potluck.engine.window_delta import WindowDelta
from potluck.errors import ConfigError
from potluck.events import StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.tree import Node
from potluck.wire.messages import Committed, SliceReport, Work


class WindowSteps:
    is_repeatable = False

    def __init__(self, run: RunState, driver: MemberDriver, sender: PartSender, mean: HostMean) -> None:
        self._run = run
        self._driver = driver
        self._sender = sender
        self._mean = mean
        self._delta = WindowDelta(run.prepared(), mean, within=run.link)
        assert run.composition.window is not None
        self._figures = WindowFigures(run.composition.window.figures)
        self._norm = 0.0

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._mean.described

    @property
    def divergence(self) -> float:
        return self._delta.drift

    def seed_of(self, seed: int, micro: MicroBatch) -> int:
        return mix(seed, self._step, micro.start)

    def expects_from(self, work: Work) -> tuple[int, ...]:
        """Who gets which rows of the next window is planned anew."""
        return work.epoch, work.step, *self._own

    def expected(self, work: Work, seed: int) -> Iterator[tuple[MicroBatch, int]]:
        for _, micros in self._batches_of(work):
            yield from ((micro, mix(seed, work.step, micro.start)) for micro in micros)

    def begin(self, work: Work, nodes: list[Node], bounds: Sequence[tuple[int, int]]) -> None:
        (node,) = nodes
        assert self._run.loader is not None
        self._step, self._run.turns.now = work.step, 0
        self._rows_before = self._run.rows_seen + work.row - self._run.loader.position.row
        self._numbers = range(*node)
        self._own = bounds[node[0]][0], bounds[node[1] - 1][1]
        self._stopped = 0
        self._whole = bounds[-1][1] - bounds[0][0]
        self._batches = 0
        self._samples = self._good_samples = self._good_loss = 0.0
        self._stretch = 1.0
        if self._mean.moments is not None and self._mean.moments.are_divided_by:
            self._stretch = stretch_of([last - at for at, last in bounds], work.batch, self._run.loader.batch.size)
        self._delta.begin()
        self._figures.begin()
        if self._run.scheduled is not None:
            self._run.scheduled.begin_window()
        self._run.start_of_step()
        self._started = time.perf_counter()

    def micro_batches(self, work: Work, is_void: Callable[[], bool]) -> Iterator[MicroBatch]:
        """This worker's batches, one after the other, each in micro-batches."""
        for number, ((first, end), micros) in enumerate(self._batches_of(work)):
            self._batch_end = end
            for micro in micros * self._run.turns.count:
                yield replace(micro, number=number)
                if is_void():
                    self._delta.forget()
                    return
            if self._stopped:
                return
            if self._batches <= number:
                raise ConfigError(
                    f"The batch of rows {first} to {end} was given out, but step() was not called after it."
                    " Call backward() and step() for every batch of the loader."
                )

    def _batches_of(self, work: Work) -> Iterator[tuple[tuple[int, int], list[MicroBatch]]]:
        """Where each begins and ends, and what goes through the model at once."""
        run, loader = self._run, self._run.loader
        assert loader is not None
        shares, in_pairs = (1.0,) * run.link.world, run.batch_norm is not None
        together = {"in_step": run.prepared().in_step, "in_pairs": in_pairs}
        for bounds in even_batches(*self._own, work.batch, loader.batch.size, in_pairs=in_pairs):
            yield bounds, plan_step(*bounds, loader.batch, shares, run.link.rank, **together)

    def backward(self, micro: MicroBatch, loss: Tensor, samples: float, last: bool | None) -> None:
        backward(self._run, loss, samples, micro.last if last is None else last and micro.last)

    def step(self, micro: MicroBatch) -> tuple[bool, StepSkipped | None]:
        """Steps this worker's optimizer once its batch is done."""
        run, driver = self._run, self._driver
        if not run.tally.is_last:
            return False, None
        driver.reach("batch", self._step, done=self._batches)
        # All ranks of this worker step as one, and stop as one.
        leaves = driver.client.wants_stop
        done, own_samples, decision = end_batch(run, run.link, is_over=leaves)
        self._figures.add(done)
        is_last = run.turns.is_last
        self._batches += is_last
        self._samples += done.samples * is_last
        if decision.fault is not None:
            run.skipped_steps(1)
        elif is_last:
            self._good_samples += done.samples
            self._good_loss += done.loss_sum
            self._norm = decision.norm
        first, end = self._own
        rows = self._rows_before + round(self._whole * (self._batch_end - first) / (end - first))
        skipped = step_alone(run, decision, own_samples, rows, driver.client.name, stretch=self._stretch)
        run.next_turn()
        if not is_last:
            return False, skipped
        if self._batch_end < end:
            if not done.is_over or len(self._numbers) < 2:  # the rest of a part that was cut is not cut again
                return False, skipped
            self._stopped = self._batch_end
        self._send_change(self._report(), self._samples * run.unit)
        return True, None

    def _report(self) -> SliceReport:
        self._sender.synchronize()
        busy_s = time.perf_counter() - self._started
        # Skipped steps weigh what they would have, so that a part weighs the same no matter who does it.
        loss = self._good_loss / self._good_samples * self._samples if self._good_samples else math.nan
        # Where all of it is done, nothing is left for the slice behind it.
        numbers = self._numbers[:1] if self._stopped else self._numbers
        none = [0.0] * (len(numbers) - 1)
        return SliceReport(
            self._step,
            np.array(numbers, "<u4"),
            np.array([self._samples, *none], "<f8"),
            np.array([loss, *none], "<f8"),
            busy_s,
            b"",
            self._batches,
            stopped=self._stopped,
            figures=self._figures.to_json(self._delta.drift),
        )

    def _send_change(self, report: SliceReport, weight: float) -> None:
        if report.slices[0] == 0:
            report = replace(report, buffers=self._delta.exact())
        self._driver.client.send(report)
        if self._run.link.world == 1:  # to look costs ranks a sum, and they look before they agree
            self._driver.check_weights(in_step=True)  # what the window began with, which its change is counted from
        self._delta.end(weight)
        self._driver.reach("sent")

    def agree(self, committed: Committed, means: list[Tensor]) -> StepDecision:
        """The mean of what all changed, from where all began."""
        self._mean.take(means, bytes(committed.buffers))
        self._delta.apply()
        if committed.samples:  # else there is no mean, and nobody has stepped
            self._mean.finish_moments()
        return StepDecision(committed.samples, committed.loss, self._norm, 1.0, None)

    # What all agreed on

    def hash_weights(self) -> tuple[str, Tensor]:
        return self._run.prepared().hash_weights(self._delta.agreed(), self._delta.agreed_buffers)

    def quick_digest(self) -> Tensor:
        return self._run.prepared().quick_digest(self._delta.agreed(), self._delta.agreed_buffers)

    def as_agreed(self) -> AbstractContextManager[None]:
        return self._delta.as_agreed()

    def forget(self) -> None:
        self._run.prepared().drop()
        self._delta.forget()

    def start_anew(self) -> None:
        self._run.prepared().drop()
        self._delta.start_anew()
