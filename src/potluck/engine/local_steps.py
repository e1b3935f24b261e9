"""One batch on this worker's own replica: its backwards; and, where replicas step by themselves, its step."""

import math
from typing import Any

from torch import Tensor

from potluck.agree.records import Report
from potluck.agree.step_report import StepDecision, decide_sum
from potluck.data.plan import MicroBatch
from potluck.engine.evaluate import LossFunction
from potluck.engine.run_state import RunState
from potluck.events import StepSkipped
from potluck.link.link import Link


def backward(run: RunState, micro: MicroBatch | None, loss: Tensor, samples: float, last: bool | None) -> None:
    """The gradient of a mean over `samples`, weighted by them."""
    replica = run.prepared()
    if last is None:
        last = micro is None or micro.last
    replica.arm(last=last)
    run.stand_in.close()
    if micro is not None and not micro.weighs:
        samples = 0.0
    if samples:  # a mean over nothing is not a number, and has no gradient
        if last and not run.tally.samples and replica.is_summed_alone:
            run.tally.only_samples = samples
        (loss * (samples / run.samples_per_gradient)).backward()  # type: ignore[no-untyped-call]
    replica.end_backward()
    tally = run.tally
    if samples:
        tally.loss_sum = tally.loss_sum + loss.detach().reshape(()) * samples  # in float64, if the loss is
        tally.samples += samples
    tally.is_last, tally.is_untouched = last, False
    if micro is None:
        tally.rows += int(samples)
    elif micro is not run.trained:  # several backwards of one batch still use its rows once
        run.count_rows(micro)
    replica.seal()


def train(run: RunState, loss_of: LossFunction, batch: Any) -> tuple[Tensor, float] | None:
    """The forward of a batch: its mean loss and its samples; None where stages go backward by themselves, with the
    last of a step."""
    replica, at = run.prepared(), run.micro_pass()
    if not replica.is_whole:
        run.stand_in.close()  # each stage puts buffers aside itself, and all of a step's forwards are still to come
    found = replica.forward(loss_of, batch, at)
    if found is None and at.micro is not None:
        run.count_rows(at.micro)
        run.tally.is_last = at.micro.last
    return found


def end_batch(run: RunState, within: Link, *, is_over: bool = False) -> tuple[Report, float, StepDecision]:
    """End a batch: return what the ranks of this replica did together in it; over which samples this rank's gradient
    is; and whether it is applied."""
    replica, tally = run.prepared(), run.tally
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
        told = within.start_gather(mine.to_row())
        _, norm, _ = replica.reduce(tally.loss_sum)
        every = [Report.from_row(row) for row in told.wait()]
        if any(each.has_unused for each in every):
            replica.drop_unused()
        own = run.grid.own(every).samples
        samples, loss_sum, rows = (sum(column) for column in zip(*(each[:3] for each in every), strict=True))
        done = Report(samples=samples, loss_sum=loss_sum, rows=rows, is_over=every[0].is_over)
    fault = None if math.isfinite(done.loss_sum) else "the loss is not finite"
    loss = done.loss_sum / done.samples if done.samples else math.nan
    decision = decide_sum(done.samples, loss, norm, run.samples_per_gradient, run.config.clip, fault)
    run.scale.learn(done.samples, done.rows)
    return done, own, decision


def step_alone(
    run: RunState, decision: StepDecision, own_samples: float, rows: int, where: str, *, stretch: float = 1.0
) -> StepSkipped | None:
    """This replica's step by itself: applied, or skipped and told. `rows`: of all workers, as if all were as far.

    `stretch`: by how much it is longer than the schedule says, as far as stretched_lr() lets it.
    """
    replica, skipped = run.prepared(), None
    if decision.fault is None:
        run.good_step()
        run.set_lr(rows)
        with run.stretched_lr(stretch):
            replica.apply(decision.scale)
        replica.average_buffers(own_samples / decision.samples)
    else:
        skipped = run.skip(decision, step=run.step_number + 1, where=f"on {where}, ")
        replica.restore_buffers()
        run.tell(skipped)
    run.start_of_step()
    return skipped
