"""StepTogether: a step that all workers of a group take as one, as if one process had the whole batch.

Gradients are summed over a link while the backward still runs. slice_steps.py is the same under a host.
"""

import time

import torch
from torch import Tensor

from potluck.agree.records import Report
from potluck.agree.step_report import StepDecision, decide_sum
from potluck.data.loader import Loader
from potluck.data.plan import MicroBatch
from potluck.engine.run_parts import RunParts
from potluck.engine.table import Give, Outcome, RoundPlan, RoundWork
from potluck.events import StepSkipped
from potluck.replica.replica import Replica


class StepTogether(RoundWork):
    def __init__(self, run: RunParts, replica: Replica) -> None:
        self._run = run
        self._replica = replica
        self._micros: list[MicroBatch | None] = []
        self._plan: RoundPlan | None = None
        self._norm = 0.0
        self._per = 1.0
        """By how many samples the gradients of the step were divided."""
        self._is_applied = False
        """Whether the optimizer has stepped already, on a GPU that decides by itself."""
        self.optimizer_s = 0.0
        """How long the last step of the optimizer took: the next one's computing begins with it."""

    def begin(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._micros = [micro for _, micros in plan.batches for micro in micros]
        if self._run.loader is None:
            self._micros = [None]  # the loop brings batches of its own

    def next(self) -> Give | None:
        return Give(self._micros.pop(0)) if self._micros else None

    def seeds_of(self, seed: int, micro: MicroBatch) -> tuple[int, int | None]:
        """Under Sync the model draws as it would in one process; where others steps are windows, as it does there."""
        assert self._run.loader is not None
        own = self._run.loader.seeds_of_place(micro)[0]
        return (own, None) if self._run.wanted.policy.steps_together else (own, own)

    def expect(self, loader: Loader) -> None:
        if self._run.wanted.policy.steps_together:
            loader.expect_rest()

    def backward(self, micro: MicroBatch | None, loss: Tensor, samples: float, last: bool | None) -> None:
        self._run.step.backward(micro, loss, samples, last)

    def is_ready(self, micro: MicroBatch | None) -> bool:
        return self._run.step.tally.is_last

    def end(self, micro: MicroBatch | None) -> StepSkipped | None:
        if self._run.step.tally.is_last:  # also where the loop left out some of the batch
            self._micros = []
        return None

    # Agreeing

    @property
    def runs_ahead(self) -> bool:
        """Whether the optimizer steps before we know whether it should: it decides on the GPU."""
        replica = self._replica
        return bool(replica.runs_ahead and self._run.step.tally.samples and not replica.has_unused and replica.is_whole)

    def step_ahead(self) -> float:
        """Steps the optimizer, unless the gradient is bad. Returns the sum of the losses."""
        run, replica, tally = self._run, self._replica, self._run.step.tally
        self._per = run.step.samples_per_gradient
        replica.finish()
        run.rates.set(run.progress.rows_seen + tally.rows * run.turns.is_last, step=run.progress.step_number)
        ahead = replica.apply_unless_bad(tally.loss_sum, self._per / tally.samples, run.config.clip)
        self._fetch_next()
        norm, was_bad, loss_sum = torch.stack([*ahead, tally.loss_sum]).tolist()
        self._is_applied = not was_bad
        self._norm = replica.norm().item() if was_bad else norm  # it may only have had no room in float32
        if not was_bad:
            replica.drop()
        return float(loss_sum)

    def _fetch_next(self) -> None:
        """The GPU has its next rows before it is done with these."""
        loader, plan = self._run.loader, self._plan
        if loader is not None and plan is not None and self._run.turns.is_last and plan.row + plan.rows < loader.rows:
            loader.fetch_ahead(loader.step_at(plan.row + plan.rows)[0])

    def wait(self) -> tuple[float, float]:
        """Ends the sums over all ranks: the seconds waited, and the sum of this worker's losses."""
        self._per = self._run.step.samples_per_gradient
        wait_s, self._norm, loss_sum = self._replica.reduce(self._run.step.tally.loss_sum)
        return wait_s, loss_sum

    def report(self, busy_s: float, *, sync_s: float, loss_sum: float | None = None) -> Report:
        """Make this worker's report of the step. `sync_s`: in the one before."""
        run, tally = self._run, self._run.step.tally
        busy_s, send_s = self._replica.times(busy_s, self.optimizer_s)
        return Report(
            samples=tally.samples,
            loss_sum=tally.loss_sum.item() if loss_sum is None else loss_sum,
            rows=tally.rows,
            busy_s=busy_s,
            has_unused=self._replica.has_unused,
            wants_stop=run.progress.wants_stop,
            send_s=send_s,
            sync_s=sync_s,
        )

    def apply(self, outcome: Outcome) -> StepDecision:
        run, replica, started = self._run, self._replica, time.perf_counter()
        decision = decide_sum(outcome.samples, outcome.loss, self._norm, self._per, run.config.clip, outcome.fault)
        run.step.scale.learn(decision.samples, outcome.rows_computed)
        if decision.fault is not None:
            replica.restore_buffers()
        else:
            run.step.is_good()
            if not self._is_applied:
                run.rates.set(run.progress.rows_seen)
                replica.apply(decision.scale)
            replica.average_buffers(outcome.own_samples / decision.samples)
        self._is_applied = False
        run.step.end_turn()
        self.optimizer_s = time.perf_counter() - started
        return decision

    def forget(self) -> None:
        self._micros = []
        self._replica.drop()

    def start_anew(self) -> None:
        self.forget()
