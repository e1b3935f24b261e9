"""A step that all workers take as one: what each tells of it, and how it is applied or skipped."""

from collections.abc import Sequence

from potluck.agree.records import Report
from potluck.agree.step_report import StepDecision
from potluck.engine.run_state import RunState
from potluck.events import StepSkipped


def report_of(
    run: RunState, busy_s: float, *, sync_s: float, loss_sum: float | None = None, send_s: float = 0.0
) -> Report:
    """Make this worker's report of the step. `sync_s`: in the one before."""
    return Report(
        samples=run.tally.samples,
        loss_sum=run.tally.loss_sum.item() if loss_sum is None else loss_sum,
        rows=run.tally.rows,
        busy_s=busy_s,
        has_unused=run.prepared().has_unused,
        wants_stop=run.wants_stop,
        send_s=send_s,
        sync_s=sync_s,
    )


def apply_step(
    run: RunState, decision: StepDecision, reports: Sequence[Report], samples: float, *, is_done: bool = False
) -> StepSkipped | None:
    """Apply what all have agreed on; a step that is skipped is returned. `samples`: over which this replica's buffers
    moved.

    `is_done`: the optimizer has stepped already, or has left it out.
    """
    replica = run.prepared()
    run.scale.learn(decision.samples, sum(report.rows for report in reports))
    if decision.fault is not None:
        skipped = run.skip(decision, step=run.step_number)
        replica.restore_buffers()
        run.skipped_steps(1, sum(int(report.rows) for report in reports))
        return skipped
    run.good_step()
    if not is_done:
        run.set_lr(run.rows_seen)
        replica.apply(decision.scale)
    replica.average_buffers(samples / decision.samples)
    return None
