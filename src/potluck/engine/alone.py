"""StepAlone: this worker steps its own optimizer over rows of its own, batch by batch, and all agree once a window.

What that changed is what travels. The same in a group and under a host: how the mean is formed is said by a Mean
(means.py), and when a window ends by the table.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from potluck.agree.records import Range, Report
from potluck.agree.step_report import StepDecision, decide_sum
from potluck.data.loader import Loader
from potluck.data.plan import MicroBatch
from potluck.data.rows import mix
from potluck.devices import synchronize
from potluck.engine.figures import WindowFigures
from potluck.engine.run_parts import RunParts
from potluck.engine.table import Give, Outcome, RoundPlan, RoundWork
from potluck.events import StepSkipped
from potluck.replica.replica import Agreed, Replica
from potluck.sums.window_delta import WindowDelta


@dataclass(kw_only=True, slots=True)
class WindowSide:
    """The table's side of a window: when it ends, and how its mean is formed."""

    name: Callable[[], str]
    """This replica's, where a step of it is skipped."""
    sees_end: Callable[[RoundPlan, float, float], bool]
    """Asked after each batch, with the plan, and the batches and rows that are done by then: whether the window is over
    for us."""
    seeds: Callable[[RoundPlan, MicroBatch], tuple[int, ...]]
    """Numbers from which a micro-batch's seed is mixed, beside the run's seed."""
    apply: Callable[[Outcome], None]
    """Merges the mean."""
    on_batch: Callable[[int], None] = lambda done: None
    """Called as a batch ends, after so many others."""


class StepAlone(RoundWork):
    def __init__(self, run: RunParts, replica: Replica, delta: WindowDelta, side: WindowSide) -> None:
        assert run.composition.window is not None
        self._run = run
        self._replica = replica
        self.delta = delta
        self._side = side
        self.figures = WindowFigures(run.composition.window.figures)
        self.window = Report()
        """What this replica has done of the window, over all its ranks."""
        self.bad_samples = 0.0
        """The samples of its steps that were skipped."""
        self.stopped = 0
        """The row at which it stopped before the end of its part; 0: it did all of it."""
        self.started = 0.0
        self._norm = 0.0
        self._batches: list[tuple[Range, tuple[MicroBatch, ...]]] = []
        self._micros: list[MicroBatch] = []
        self._is_over = True
        self._plan: RoundPlan | None = None

    def begin(self, plan: RoundPlan) -> None:
        """Also again within a window, with what a lost worker had of it."""
        run = self._run
        self._plan, self._batches, self._micros = plan, list(plan.batches), []
        self.window, self.bad_samples, self.stopped = Report(), 0.0, 0
        self._is_over = not plan.batches
        self.delta.begin()
        self.figures.begin()
        if run.scheduled is not None:
            run.scheduled.begin_window()
        run.step.begin_again()  # a window that was left in the middle may have left a batch in the middle of its turns
        self.started = time.perf_counter()

    def next(self) -> Give | None:
        """The batches one after the other, each in micro-batches, as often as there are turns."""
        if self._is_over:
            return None
        if not self._micros:
            _, micros = self._batches[0]
            self._micros = [*micros] * self._run.turns.count
        return Give(self._micros.pop(0))

    def seeds_of(self, seed: int, micro: MicroBatch) -> tuple[int, int | None]:
        assert self._plan is not None
        own = mix(seed, *self._side.seeds(self._plan, micro))
        return mix(own, 1), own  # what the model draws must not depend on which process reads rows

    def expect(self, loader: Loader) -> None:
        """Who gets which rows of the next window is planned again."""
        plan = self._plan
        assert plan is not None

        def expected() -> Iterator[tuple[MicroBatch, int]]:
            for _, micros in plan.batches:
                yield from ((micro, self.seeds_of(loader.seed, micro)[0]) for micro in micros)

        first = plan.batches[0][0][0] if plan.batches else 0
        loader.follow((plan.epoch, plan.version, *(edge for rows, _ in plan.batches for edge in rows)), first, expected)

    def backward(self, micro: MicroBatch | None, loss: Tensor, samples: float, last: bool | None) -> None:
        assert micro is not None
        self._run.step.backward(micro, loss, samples, micro.last if last is None else last and micro.last)

    def is_ready(self, micro: MicroBatch | None) -> bool:
        return self._run.step.tally.is_last

    def end(self, micro: MicroBatch | None) -> StepSkipped | None:
        """Steps this replica's optimizer once its batch is done."""
        run, side, plan, before = self._run, self._side, self._plan, self.window
        if not run.step.tally.is_last:
            return None
        assert plan is not None
        side.on_batch(int(before.batches))
        (first, end), _ = self._batches[0]
        is_last, rows = run.turns.is_last, before.rows + end - first
        # All ranks of this replica step as one, and stop as one: the first decides.
        within = self.delta.within
        is_over = is_last and within.world > 1 and within.rank == 0 and side.sees_end(plan, before.batches + 1, rows)
        done, own_samples, decision = self._end_batch(is_over=is_over)
        self.figures.add(done)
        self._note(done, is_last=is_last, is_good=decision.fault is None)
        # As if all replicas were as far in the window as this one.
        done_share = round(plan.rows * min(plan.part, rows) / plan.part) if plan.part else plan.rows
        by_now = run.progress.rows_seen + plan.row - run.progress.at.row + done_share
        skipped = self._step(decision, own_samples, by_now, stretch=plan.stretch)
        run.step.end_turn()
        if is_last:
            self._batches.pop(0)
            self._micros = []
            if within.world == 1:
                is_over = bool(self._batches) and side.sees_end(plan, self.window.batches, self.window.rows)
            else:
                is_over = bool(done.is_over)
            if self._batches and is_over:
                self.stopped = end
            self._is_over = is_over or not self._batches
        return skipped

    def _end_batch(self, *, is_over: bool) -> tuple[Report, float, StepDecision]:
        """Return what the ranks of this replica did together in the batch; over which samples this rank's gradient is;
        and whether it is applied."""
        run, replica, tally, within = self._run, self._replica, self._run.step.tally, self.delta.within
        replica.unseal()
        if within.world == 1:
            _, norm, loss_sum = replica.reduce(tally.loss_sum)
            if replica.has_unused:
                replica.drop_unused()
            done = Report(samples=tally.samples, loss_sum=loss_sum, rows=tally.rows, is_over=is_over)
            own = tally.samples
        else:
            replica.start_sums()
            mine = Report(
                samples=tally.samples,
                loss_sum=tally.loss_sum.item(),
                rows=tally.rows,
                has_unused=replica.has_unused,
                is_over=is_over,
            )
            gathering = within.start_gather(mine.to_row())
            _, norm, _ = replica.reduce(tally.loss_sum)
            every = [Report.from_row(row) for row in gathering.wait()]
            if any(each.has_unused for each in every):
                replica.drop_unused()
            own = run.grid.own(every).samples
            samples, loss_sum, rows = (sum(column) for column in zip(*(each[:3] for each in every), strict=True))
            done = Report(samples=samples, loss_sum=loss_sum, rows=rows, is_over=every[0].is_over)
        fault = None if math.isfinite(done.loss_sum) else "the loss is not finite"
        loss = done.loss_sum / done.samples if done.samples else math.nan
        decision = decide_sum(done.samples, loss, norm, run.step.samples_per_gradient, run.config.clip, fault)
        run.step.scale.learn(done.samples, done.rows)
        return done, own, decision

    def _step(self, decision: StepDecision, own_samples: float, rows: int, *, stretch: float) -> StepSkipped | None:
        """This replica's step by itself: applied, or skipped and told. `rows`: of all workers, as if all were as far.

        `stretch`: by how much it is longer than the schedule says, as far as Rates.stretched() lets it.
        """
        run, replica, skipped = self._run, self._replica, None
        if decision.fault is None:
            run.step.is_good()
            run.rates.set(rows)
            with run.rates.stretched(stretch):
                replica.apply(decision.scale)
            replica.average_buffers(own_samples / decision.samples)
            self._norm = decision.norm
        else:
            where = f"on {self._side.name()}, "
            skipped = run.step.skip(decision, step=run.progress.step_number + 1, where=where)
            replica.restore_buffers()
            run.tell(skipped)
        run.step.begin()
        return skipped

    def _note(self, done: Report, *, is_last: bool, is_good: bool) -> None:
        before = self.window
        if not is_last:
            self.window = before._replace(skipped=before.skipped + (not is_good))
            return
        self.bad_samples += 0.0 if is_good else done.samples
        self.window = before._replace(
            samples=before.samples + done.samples * is_good,
            loss_sum=before.loss_sum + (done.loss_sum if is_good else 0.0),
            rows=before.rows + done.rows,
            batches=before.batches + 1,
            skipped=before.skipped + (not is_good),
            skipped_rows=before.skipped_rows + (0 if is_good else done.rows),
        )

    @property
    def busy_s(self) -> float:
        """How long this replica has computed, once what it was given is done."""
        synchronize(self._run.device)
        return time.perf_counter() - self.started

    @property
    def drift(self) -> float:
        return self.delta.drift

    @property
    def mean_loss(self) -> float:
        return self.window.loss_sum / self.window.samples if self.window.samples else math.nan

    def apply(self, outcome: Outcome) -> StepDecision:
        """The mean of what all changed, from where all began."""
        self._side.apply(outcome)
        return StepDecision(outcome.samples, outcome.loss, self._norm, 1.0, None)

    # What all agreed on

    def agreed(self) -> tuple[Agreed, Sequence[Tensor]]:
        return self.delta.agreed(), self.delta.agreed_buffers

    def as_agreed(self) -> AbstractContextManager[None]:
        return self.delta.as_agreed()

    def forget(self) -> None:
        self._is_over = True
        self._replica.drop()
        self.delta.forget()

    def start_anew(self) -> None:
        self._is_over = True
        self._replica.drop()
        self.delta.start_anew()
