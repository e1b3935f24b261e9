"""The engine of a worker that a host leads under Cadence or Async: it steps by itself, and all agree once a window.

The host hands out a range of rows to each worker. The worker steps its own optimizer over it, batch by batch, and sends
what that changed as if it were a gradient; the mean that comes back is subtracted from the parameters that all began
with. So to the host a window is a step like any other: one agreement, one record, one hash.
`step_number` counts whole batches of the run; `version` counts agreements, and is what the host calls a step.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from potluck.agree.pulse import Verdict, decide_alone
from potluck.engine.elastic import ElasticEngine
from potluck.engine.loader import MicroBatch, even_batches, plan_step
from potluck.engine.losses import STEP_TOO_EARLY, insist_on_mean
from potluck.engine.means import HostMean
from potluck.engine.replica import Replica
from potluck.engine.rows import mix
from potluck.engine.window_delta import WindowDelta
from potluck.errors import ConfigError
from potluck.events import StepDone, StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.phases import reach
from potluck.fleet.tree import Node
from potluck.wire.messages import Committed, SliceReport, Work


class ElasticWindowEngine(ElasticEngine):
    def _insist_on_slices(self, slices: int) -> None:
        raise ConfigError(
            f"batch.slices cuts a batch on which all workers step together, as under the Sync policy. Under"
            f" {type(self.policy).__name__} each gets rows by its speed: leave batch.slices out."
        )

    def _make_parts(self, replica: Replica) -> tuple[Part, ...]:
        self._mean = self._make_mean(replica)
        assert self.composition.window is not None
        self._delta = WindowDelta(replica, self._mean, self.composition.window.outer, within=self.link)
        self._norm = 0.0
        return self._mean.described

    def _make_mean(self, replica: Replica) -> HostMean:
        return HostMean(self._send_part, self._sender.begin, self._sender.make_room(replica.model))

    def _seed_of(self, micro: MicroBatch) -> int:
        """Of the rows, so that whoever takes over a part draws the same."""
        return mix(self._loader().seed, self.version + 1, micro.start)

    # The end

    def _begin_run(self) -> None:
        super()._begin_run()
        self._keep_the_end()

    def _rest_of_epoch(self) -> Iterator[MicroBatch]:
        while True:
            yield from super()._rest_of_epoch()
            if not self._is_at_the_end:
                return
            self._keep_the_end()
            if self.stopping or self._is_at_the_end:
                return

    def _keep_the_end(self) -> None:
        """The last agreement is on the host's disk before any loop is over with it: nobody can be made to compute that
        window again then, which would have other bits. Until it is kept, the run may go back, and this worker with it.
        """
        if not self._is_at_the_end:
            return
        self.save("", keep_last=1)
        self.wait_for_saves()
        if self.left or not self.led.member.is_in:  # the run may yet end elsewhere, or has
            words = (
                self.last_words() if self.left else "The run has ended without this worker; the host has its weights."
            )
            self.close()
            raise self.interrupted(words)
        if not self._is_at_the_end and not self._is_over:
            self.stopping = False  # whoever stopped it had seen the end

    # A window

    def _begin_nodes(self, nodes: list[Node]) -> None:
        (node,) = nodes
        self._number = node[0]
        self._own = self._bounds[node[0]]
        self._whole = self._bounds[-1][1] - self._bounds[0][0]
        self._batches = 0
        self._samples = self._good_samples = self._good_loss = 0.0
        self._done_rows = 0
        self._delta.begin()
        if self._scheduled is not None:
            self._scheduled.begin_window()
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._batch_loss = torch.zeros((), device=self.device)
        self._batch_samples = 0.0
        self._is_last = False
        self._prepared().remember_buffers()

    def _parts_of(self, work: Work) -> Iterator[MicroBatch]:
        """This worker's batches, one after the other, each in micro-batches."""
        turn, batch, shares = self.led.member.turn, self._loader().batch, (1.0,) * self.link.world
        in_pairs = self._batch_norm is not None
        for number, (first, end) in enumerate(even_batches(*self._own, work.batch, batch.size, in_pairs=in_pairs)):
            self._batch_end = end
            options = {"in_step": self._prepared().in_step, "in_pairs": in_pairs}
            for micro in plan_step(first, end, batch, shares, self.link.rank, **options):
                yield replace(micro, number=number)
                if self._is_void(work, turn):
                    self._delta.forget()
                    return
            if self._batches <= number:
                raise ConfigError(
                    f"The batch of rows {first} to {end} was given out, but step() was not called after it."
                    " Call backward() and step() for every batch of the loader."
                )

    def backward(self, loss: Tensor, *, samples: float, last: bool | None = None) -> None:
        replica, micro = self._prepared(), self._loader().current
        loss = insist_on_mean(loss, samples)
        if micro is None or not self.led.has_joined:
            raise ConfigError("Under a host, batches come from the loader that prepare() gave. Iterate over that.")
        last = micro.last if last is None else last and micro.last
        replica.arm(last=last)
        self._stand_in.close()
        samples = samples if micro.counts else 0.0
        if samples:  # a mean over nothing is not a number, and has no gradient
            (loss * (samples * self._unit)).backward()  # type: ignore[no-untyped-call]
        replica.end_backward()
        if samples:
            self._batch_loss += loss.detach().reshape(()) * samples
            self._batch_samples += samples
        self._is_last = last
        self._trained = micro
        replica.seal()

    def step(self) -> StepDone | StepSkipped | None:
        """Steps this worker's optimizer once its batch is done. After the last of the window, waits for the others."""
        micro = self._loader().current
        if micro is None or micro is not self._trained:
            raise ConfigError(STEP_TOO_EARLY)
        if not self._is_last:
            return None
        self._prepared().unseal()
        self._done_rows = self._batch_end - self._own[0]
        reach("batch", self.version + 1, engine=self, done=self._batches)
        skipped = self._step_alone(self._prepared())
        if self._batch_end < self._own[1]:
            return skipped
        self._send_changes()
        reach("sent", self.version + 1, engine=self)
        return self._await_step()

    def _step_alone(self, replica: Replica) -> StepSkipped | None:
        replica.finish()
        norm, loss_sum = torch.stack([replica.norm().to(self.device), self._batch_loss]).tolist()
        told = self.link.gather_rows([self._batch_samples, loss_sum])  # all ranks of this worker step as one
        samples, loss_sum = (sum(column) for column in zip(*told, strict=True))
        self._batches += 1
        self._samples += samples
        verdict = decide_alone(samples, loss_sum, norm, self._unit, self.config.clip)
        if verdict.fault is None:
            self._good_samples += samples
            self._good_loss += loss_sum
            self._norm = verdict.norm
        else:
            self.skipped += 1
        event = self._apply_alone(verdict, self.client.name)
        if verdict.fault is None:
            replica.average_buffers(self._batch_samples / samples)
        self._begin_batch()
        return event

    def _rows_of_schedule(self) -> int:
        """As if all workers were as far in the window as this one."""
        return self.rows_seen + round(self._whole * self._done_rows / (self._own[1] - self._own[0]))

    def _send_changes(self) -> None:
        self._sender.synchronize()
        busy_s = time.perf_counter() - self._work_started
        # Steps that were skipped weigh what they would have, so that a part weighs the same whoever does it.
        loss = self._good_loss / self._good_samples * self._samples if self._good_samples else math.nan
        self.client.send(
            SliceReport(
                self.version + 1,
                np.array([self._number], "<u4"),
                np.array([self._samples], "<f8"),
                np.array([loss], "<f8"),
                busy_s,
                b"",
                self._batches,
                self._delta.exact() if self._number == 0 else b"",
            )
        )
        self.led.check_weights(in_step=True)  # what the window began with, which its change is counted from
        self._delta.end(self._samples * self._unit)

    def _count_rows(self, rows: int) -> None:
        self.step_number += self._loader().pass_rows(rows)

    def _agree(
        self, committed: Committed, means: list[Tensor], told: dict[str, Any], started: float
    ) -> tuple[StepDone | StepSkipped, Verdict]:
        """The mean of what all changed, from where all began."""
        self._mean.take(means, bytes(committed.buffers))
        self._delta.apply()
        self._divergence = self._delta.drift
        verdict = Verdict(committed.samples, committed.loss, self._norm, 1.0, None)
        return self._tell_step(verdict, told, started), verdict

    def _agreed_tensors(self) -> list[Tensor]:
        agreed = self._delta.agreed()
        weights = [agreed.get(id(parameter), parameter) for parameter in self._prepared().model.parameters()]
        return [*weights, *self._delta.agreed_buffers]

    def forget_work(self) -> None:
        self._prepared().drop()
        self._delta.forget()

    def _start_anew(self) -> None:
        self._prepared().drop()
        self._delta.start_anew()

    # What needs all workers to be one

    def evaluate(self, loss_of: Callable[[nn.Module, Any], Any], dataset: Any, batch_size: int) -> float:
        with self._delta.as_agreed():
            return super().evaluate(loss_of, dataset, batch_size)

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        if not self.version or self.led.member.save_due < self.version:
            super().save(folder, keep_last=keep_last)

    def start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        with self._delta.as_agreed():
            return super().start_snapshot(folder)
