"""Steps: all workers take each step together, as if one process had the whole batch.

Gradients are summed over a link while the backward still runs; meanwhile each worker tells the others what it did, and
from the same words all reach the same decision: to apply the step, or to skip it.
"""

import time

import torch
from torch import Tensor

from potluck.agree.records import Report
from potluck.agree.shares import Balance, share_out
from potluck.agree.step_report import StepDecision, decide_step
from potluck.agree.wire_choice import WireChoice
from potluck.coded_numbers import Wire, coding_of
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare
from potluck.data.source import DataSource
from potluck.engine.common_steps import apply_step, report_of
from potluck.engine.local_steps import backward, is_batch_done
from potluck.engine.replica import Replica
from potluck.engine.rounds import check_same_data
from potluck.engine.run_state import RunState
from potluck.errors import ConfigError
from potluck.events import Decided, StepDone, StepSkipped
from potluck.link.link import Rows
from potluck.words import plural


class Steps:
    nodes = None

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._balance: Balance | None = None
        self._optimizer_s = self._waited_s = 0.0
        self._wire: WireChoice | None = None

    # Preparing

    def begin(self, replica: Replica) -> None:
        if self._run.composition.wire_is_measured:
            choice = self._wire = WireChoice()
            self._run.kept.add("wire", lambda tensors: choice.wire, lambda saved, tensors: self._resume_wire(saved))

    def _resume_wire(self, saved: Wire | None) -> None:
        assert self._wire is not None
        self._wire.resume(saved or "fp32")
        self._run.prepared().code(coding_of(self._wire.wire))

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        run, pipelines = self._run, self._run.grid.pipelines
        replica, shares = run.prepared(), run.composition.shares or (1.0,) * pipelines
        if 0 in (parts := share_out(batch.size, shares)):
            raise ConfigError(
                f"A batch of {batch.size} does not fit {plural(pipelines, 'worker')}: each needs at least one row, and"
                f" they would have {', '.join(map(str, parts))}. Use a larger batch, fewer workers, or more even"
                " shares."
            )
        share = BatchShare(shares, run.grid.pipeline, in_step=replica.in_step, in_pairs=run.batch_norm is not None)
        loader = Loader(source, batch, share, device=run.device, seed=seed)
        check_same_data(run, loader)
        # Where ranks gather parameters they wait for each other in every layer, and nobody's own speed can be seen.
        if run.composition.is_measured and pipelines > 1 and not replica.gathers:
            self._balance = Balance(batch.size, pipelines)
        return loader

    @property
    def has_fixed_shares(self) -> bool:
        return self._balance is None

    @property
    def is_under_way(self) -> bool:
        micro = self._run.loader.current if self._run.loader is not None else None
        return micro is not None and not micro.last

    # A step

    def backward(self, loss: Tensor, samples: float, last: bool | None) -> None:
        backward(self._run, loss, samples, last)

    def step(self) -> StepDone | StepSkipped | None:
        run = self._run
        if not is_batch_done(run):
            return None
        replica = run.prepared()
        replica.unseal()
        if run.device.type == "cuda" and run.link.world > 1 and not replica.gathers:
            torch.cuda.current_stream().synchronize()  # else busy would be the time to launch kernels
        busy_s = time.perf_counter() - run.tally.started + self._optimizer_s
        if replica.runs_ahead and run.tally.samples and not replica.has_unused and replica.is_whole:
            return self._step_ahead(replica, busy_s)
        replica.start_sums()
        told = self._tell(busy_s) if run.link.world > 1 else None
        wait_s, norm, loss_sum = replica.reduce(run.tally.loss_sum)
        self._waited_s = wait_s
        told = told or self._tell(busy_s, loss_sum)
        reports = [Report.from_row(row) for row in told.wait()]
        if any(report.has_unused for report in reports):
            replica.drop_unused()
        decision = decide_step(reports, norm, run.samples_per_gradient, run.config.clip)
        run.advance(sum(int(report.rows) for report in reports))
        run.stopping = any(report.wants_stop for report in reports)
        exchanged = time.perf_counter()
        event = self._apply(reports, decision, busy_s + wait_s)
        self._optimizer_s = time.perf_counter() - exchanged
        return self._end(event, reports)

    def _step_ahead(self, replica: Replica, busy_s: float) -> StepDone | StepSkipped:
        """Step as step() does, with the decision reached on the GPU, which has its next work before we know of it."""
        run, tally, per = self._run, self._run.tally, self._run.samples_per_gradient
        replica.finish()
        run.advance(tally.rows)
        run.set_lr(run.rows_seen)
        said = replica.apply_unless_bad(tally.loss_sum, per / tally.samples, run.config.clip)
        if run.loader is not None:
            run.loader.fetch_ahead()
        norm, was_bad, loss_sum = torch.stack([*said, tally.loss_sum]).tolist()
        if was_bad:  # perhaps only to float32
            norm = replica.norm().item()
        else:
            replica.drop()
        reports = [Report.from_row(row) for row in self._tell(busy_s, loss_sum).wait()]
        run.stopping = bool(reports[0].wants_stop)
        decision = decide_step(reports, norm, per, run.config.clip)
        return self._end(self._apply(reports, decision, busy_s, is_done=not was_bad), reports)

    def _tell(self, busy_s: float, loss_sum: float | None = None) -> Rows:
        """Tell all workers of this worker's step, and hear from all, while the sums are under way."""
        busy_s, send_s = self._run.prepared().times(busy_s, self._optimizer_s)
        mine = report_of(self._run, busy_s, sync_s=self._waited_s, loss_sum=loss_sum, send_s=send_s)
        return self._run.link.start_gather(mine.to_row())

    def _apply(
        self, reports: list[Report], decision: StepDecision, took_s: float, *, is_done: bool = False
    ) -> StepDone | StepSkipped:
        """`is_done`: the optimizer has stepped already, or has left it out."""
        run, grid = self._run, self._run.grid
        skipped = apply_step(run, decision, reports, grid.own(reports).samples, is_done=is_done)
        if skipped is not None:
            return skipped
        seconds = time.perf_counter() - run.tally.started
        return run.step_done(decision, run.lr, seconds, grid.worker_steps(reports, took_s))

    def _end(self, event: StepDone | StepSkipped, reports: list[Report]) -> StepDone | StepSkipped:
        run = self._run
        run.next_turn()
        run.tell(event)
        self._share_anew(run.grid.merge(reports, "pipeline"))
        self._choose_wire(reports)
        run.tell_agreed(run.step_number - 1)
        run.start_of_step()
        return event

    def _share_anew(self, reports: list[Report]) -> None:
        """Workers of different speeds get parts of different sizes."""
        run = self._run
        if self._balance is None or run.loader is None:
            return
        changed = self._balance.report([int(report.rows) for report in reports], [report.busy_s for report in reports])
        if changed is not None:
            parts, reason = changed
            run.loader.shares = tuple(float(part) for part in parts)
            run.events.emit(Decided(step=run.step_number, rows=tuple(parts), reason=reason))

    def _choose_wire(self, reports: list[Report]) -> None:
        """The slowest waits for the sums alone. Where ranks gather parameters, all of a step may be such waiting."""
        if self._wire is None:
            return
        replica, busy_s = self._run.prepared(), max(report.busy_s for report in reports)
        agree_s = min(report.sync_s for report in reports)
        sentence = self._wire.report(agree_s + busy_s * replica.gathers, agree_s + busy_s)
        if sentence is not None:
            replica.code(coding_of(self._wire.wire))
            self._run.notice(sentence)

    def settle(self) -> None:
        """All replicas are equal after every step."""
