"""OpenStep: the step under way on this worker: its backwards, what they add up to, and how gradients are scaled."""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from potluck.agree.loss_scale import LossScale
from potluck.agree.step_report import StepDecision
from potluck.data.plan import MicroBatch
from potluck.data.rows import mix
from potluck.events import StepSkipped
from potluck.replica.evaluate import LossFunction
from potluck.replica.replica import MicroPass, StepTally

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts


class OpenStep:
    def __init__(self, run: "RunParts") -> None:
        self._run = run
        self.trained: MicroBatch | None = None
        """The last that had a backward."""
        self.stand_in = ExitStack()
        """Puts back what the forward of a row that does not count has changed in buffers."""
        self.unit = 1.0
        """Factor of each gradient, beside its samples: about one over the rows of a batch."""
        self.scale = LossScale(is_on=run.config.precision == "fp16")
        """Further factor of each gradient in fp16."""
        self._skipped_in_a_row = 0
        self.begin()

    def begin(self) -> None:
        run = self._run
        self.tally = StepTally(torch.zeros((), device=run.device), time.perf_counter(), is_untouched=run.loader is None)
        if run.replica is not None:
            run.replica.remember_buffers()

    def begin_again(self) -> None:
        """Forgets what was computed since the last agreement."""
        self._run.turns.go_to(self._run.progress.at.turn)
        self.begin()

    def end_turn(self) -> None:
        """A step is done, applied or skipped."""
        if self._run.turns.count > 1:
            self._run.turns.next()
            self.trained = None  # the same batch comes again

    # Its gradients

    @property
    def gradient_unit(self) -> float:
        """Weight of a gradient for each sample where a host adds them up, until it is applied."""
        return self.unit * self.scale.factor

    @property
    def samples_per_gradient(self) -> float:
        """By how many samples gradients are divided from their backward on, on all who step together alike.

        It is the step's rows, so that a hook on an activation sees what it would see in one process; or the samples of
        the only backward, so that its loss is as it was given. What they are short of is made up for by the step.
        """
        run, scale = self._run, self.scale
        if (only := self.tally.only_samples) is not None:
            return only / (scale.factor * (scale.samples_per_row if scale.is_on else 1.0))
        if run.loader is None:
            return 1 / scale.factor
        rows, micro = run.loader.batch.size, run.loader.current
        if micro is not None and run.wanted.policy.steps_together:
            rows = max(1, micro.step_end - run.progress.at.row)
        return rows / scale.factor

    def backward(self, micro: MicroBatch | None, loss: Tensor, samples: float, last: bool | None) -> None:
        """The gradient of a mean over `samples`, weighted by them."""
        replica, tally = self._run.prepared(), self.tally
        if last is None:
            last = micro is None or micro.last
        replica.arm(last=last)
        self.stand_in.close()
        if micro is not None and not micro.weighs:
            samples = 0.0
        if samples:  # a mean over nothing is not a number, and has no gradient
            if last and not tally.samples and replica.is_summed_alone:
                tally.only_samples = samples
            (loss * (samples / self.samples_per_gradient)).backward()  # type: ignore[no-untyped-call]
        replica.end_backward()
        if samples:
            tally.loss_sum = tally.loss_sum + loss.detach().reshape(()) * samples  # in float64, if the loss is
            tally.samples += samples
        tally.is_last, tally.is_untouched = last, False
        if micro is None:
            tally.rows += int(samples)
        elif micro is not self.trained:  # several backwards of one batch still use its rows once
            self._count_rows(micro)
        replica.seal()

    def train(self, loss_of: LossFunction, batch: Any) -> tuple[Tensor, float] | None:
        """The forward of a batch: its mean loss and its samples; None where stages go backward by themselves, with the
        last of a step."""
        replica, at = self._run.prepared(), self._micro_pass()
        if not replica.is_whole:
            self.stand_in.close()  # each stage puts buffers aside itself: all forwards of a step are still to come
        result = replica.forward(loss_of, batch, at)
        if result is None and at.micro is not None:
            self._count_rows(at.micro)
            self.tally.is_last = at.micro.last
        return result

    def _micro_pass(self) -> MicroPass:
        """The micro-batch that the loader gave last, as it goes through the replica."""
        loader, now, seed = self._run.loader, self._run.turns.now, 0
        micro = loader.current if loader is not None else None
        if loader is not None and micro is not None:
            seed = mix(loader.seed, loader.position.epoch, micro.start, *([now] if now else []))
        return MicroPass(micro, seed, self.samples_per_gradient, self.tally)

    def _count_rows(self, micro: MicroBatch) -> None:
        """A micro-batch had its backward. Of a pipeline, the last stage counts its rows."""
        run = self._run
        if micro.counts and run.grid.is_last:
            self.tally.rows += micro.end - micro.start
            if run.turns.is_last:
                run.progress.ledger.record(micro.start, micro.end)
        self.note_trained(micro)

    def note_trained(self, micro: MicroBatch) -> None:
        self.trained = micro

    # Whether they were of use

    def is_good(self) -> None:
        self._skipped_in_a_row = 0
        self.scale.rise()

    def skip(self, decision: StepDecision, *, step: int, where: str = "") -> StepSkipped:
        """The gradient is of no use."""
        self._run.prepared().drop()
        reason, in_a_row = f"{where}{decision.fault}", 0
        if decision.samples and self.scale.fall():
            reason += f", and the loss scale falls to {self.scale.value:g}"
        else:
            in_a_row = self._skipped_in_a_row = self._skipped_in_a_row + 1
        return StepSkipped(step=step, loss=decision.loss, in_a_row=in_a_row, reason=reason)
