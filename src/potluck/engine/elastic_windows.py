"""The engine of a worker that a host leads under Cadence or Async: it steps by itself, and all agree once a window.

The host hands out a range of rows to each worker. The worker steps its own optimizer over it, batch by batch, and sends
what that changed as if it were a gradient; the mean that comes back is subtracted from the parameters that all began
with. So to the host a window is a step like any other: one agreement, one record, one hash.
`step_number` counts whole batches of the run; `version` counts agreements, and is what the host calls a step.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from potluck.agree.pulse import Verdict, decide_alone
from potluck.engine.averages import difference_, finite_norm
from potluck.engine.buckets import Allocate, split_like
from potluck.engine.buffers import SavedBuffers
from potluck.engine.elastic import ElasticEngine
from potluck.engine.loader import MicroBatch, even_batches, plan_step
from potluck.engine.losses import STEP_TOO_EARLY, insist_on_mean
from potluck.engine.replica import Replica
from potluck.engine.rows import mix
from potluck.engine.slices import insist_on_float32, plan_parts
from potluck.errors import ConfigError
from potluck.events import StepDone, StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.phases import reach
from potluck.fleet.tree import Node
from potluck.shard.blocks import find_blocks
from potluck.wire.messages import Committed, SliceReport, Work


class Changes:
    """What a window changed in a model. For each: begin; train; finish; apply."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        allocate: Allocate | None = None,
        own: Callable[[nn.Parameter], list[Tensor]] = lambda parameter: [parameter.data],
    ) -> None:
        """`own`: the memory of what is here of a parameter; of one that is split it may be a part, or nothing."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        insist_on_float32(trained)
        self._buffers = SavedBuffers(model)
        planned = plan_parts(model, blocks)
        self.described = tuple(part for part, _ in planned) + self._buffers.parts
        self.planned = [parameters for _, parameters in planned]
        """The parameters of each part."""
        self._parameters = [[piece for each in parameters for piece in own(each)] for _, parameters in planned]
        self._flats = [(allocate or _zeros)(sum(map(Tensor.numel, of)), of[0]) for of in self._parameters]
        """While a window is open, the parameters that it began with; then what it changed, weighted."""
        self._before: list[Tensor] = []
        self._weight = 0.0
        self._forgotten = 0
        """How many times."""
        self.is_open = False

    @torch.no_grad()
    def begin(self) -> None:
        """From the parameters as they are: those that all agreed on."""
        for flat, parameters in self._parts():
            torch._foreach_copy_(split_like(flat, parameters), parameters)
        self._before = self._buffers.copy()
        self.is_open = True

    def starts(self) -> dict[int, Tensor]:
        """While a window is open: by a parameter's id, what all began with."""
        parts = zip(self._parts(), self.planned, strict=True) if self.is_open else ()
        return {
            id(parameter): start
            for (flat, pieces), parameters in parts
            for parameter, start in zip(parameters, split_like(flat, pieces), strict=True)
        }

    @property
    def agreed_buffers(self) -> list[Tensor]:
        return self._before if self.is_open else self._buffers.now()

    def exact(self) -> bytes:
        """What the window changed in buffers that have no mean. Before finish()."""
        return self._buffers.for_host(self._before, 0.0)[1]

    @torch.no_grad()
    def finish(self, weight: float) -> Iterator[tuple[int, Tensor]]:
        """What to send, part by part. The model is again as it was at the beginning."""
        self.is_open, self._weight = False, weight
        for index, (flat, parameters) in enumerate(self._parts()):
            ended = torch.cat([parameter.reshape(-1) for parameter in parameters])
            torch._foreach_copy_(parameters, split_like(flat, parameters))
            changed = self._whole(index, difference_(flat, ended).mul_(weight))
            if changed is not None:
                yield index, changed
        self._on_written()
        if len(self._buffers):
            moved, _ = self._buffers.for_host(self._before, weight)
            self._buffers.put(self._before)
            yield len(self._flats), moved

    def _whole(self, index: int, changed: Tensor) -> Tensor | None:
        """What is sent of a part, from what is here of it; none if another sends it."""
        return changed

    def _of_replica(self, squares: list[float]) -> list[float]:
        """Sums over the whole replica, from those of what is here."""
        return squares

    def _on_written(self) -> None:
        """The parameters' memory was written."""

    @torch.no_grad()
    def apply(self, means: Sequence[Tensor], exact: bytes = b"") -> float:
        """What all agreed on, from where all began. How far this worker's own end was from it, as a part of it."""
        off = size = 0.0
        for (flat, parameters), mean in zip(self._parts(), means, strict=False):
            mean = mean.to(flat.device)
            torch._foreach_sub_(parameters, split_like(mean, parameters))
            size += float(finite_norm(parameters)) ** 2
            if self._weight:
                off += float((flat / self._weight - mean).norm()) ** 2
        if len(self._buffers):
            self._buffers.apply_from_host(self._buffers.copy(), means[-1], exact)
        self._weight = 0.0
        self._on_written()
        off, size = self._of_replica([off, size])
        return math.sqrt(off / size) if size else 0.0

    @torch.no_grad()
    def forget(self) -> None:
        """What was computed since begin() is of no use: the model is again as it was."""
        if self.is_open:
            self._go_back()
        self.start_anew()

    def start_anew(self) -> None:
        """The model's state has been replaced."""
        self.is_open, self._weight = False, 0.0
        self._forgotten += 1

    def _go_back(self) -> None:
        for flat, parameters in self._parts():
            torch._foreach_copy_(parameters, split_like(flat, parameters))
        self._buffers.put(self._before)
        self._on_written()

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """The model as all agreed on it last, also in the middle of a window."""
        if not self.is_open:
            yield
            return
        tensors = [*self._buffers.now(), *(parameter for parameters in self._parameters for parameter in parameters)]
        own, forgotten = [tensor.clone() for tensor in tensors], self._forgotten
        with torch.no_grad():
            self._go_back()
        self.is_open = False
        try:
            yield
        finally:
            if forgotten == self._forgotten:  # else the window was lost meanwhile, with the connection
                self.is_open = True
                with torch.no_grad():
                    torch._foreach_copy_(tensors, own)
                self._on_written()

    def _parts(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        yield from zip(self._flats, self._parameters, strict=True)


def _zeros(total: int, like: Tensor) -> Tensor:
    return torch.zeros(total, device=like.device)


class ElasticWindowEngine(ElasticEngine):
    def _insist_on_slices(self, slices: int) -> None:
        raise ConfigError(
            f"batch.slices cuts a batch on which all workers step together, as under the Sync policy. Under"
            f" {type(self.policy).__name__} each gets rows by its speed: leave batch.slices out."
        )

    def _make_parts(self, replica: Replica) -> tuple[Part, ...]:
        self._changes = self._make_changes(replica)
        self._norm = 0.0
        return self._changes.described

    def _make_changes(self, replica: Replica) -> Changes:
        return Changes(replica.model, find_blocks(replica.model), self._sender.make_room(replica.model))

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
        self._changes.begin()
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
                    self._changes.forget()
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
                self._changes.exact() if self._number == 0 else b"",
            )
        )
        self.led.check_weights(in_step=True)  # what the window began with, which its change is counted from
        for part, changed in self._changes.finish(self._samples * self._unit):
            self._send_part(part, changed)

    def _count_rows(self, rows: int) -> None:
        self.step_number += self._loader().pass_rows(rows)

    def _agree(
        self, committed: Committed, means: list[Tensor], told: dict[str, Any], started: float
    ) -> tuple[StepDone | StepSkipped, Verdict]:
        """The mean of what all changed, from where all began."""
        self._divergence = self._changes.apply(means, bytes(committed.buffers))
        verdict = Verdict(committed.samples, committed.loss, self._norm, 1.0, None)
        return self._tell_step(verdict, told, started), verdict

    def _agreed_tensors(self) -> list[Tensor]:
        starts = self._changes.starts()
        weights = [starts.get(id(parameter), parameter) for parameter in self._prepared().model.parameters()]
        return [*weights, *self._changes.agreed_buffers]

    def forget_work(self) -> None:
        self._prepared().drop()
        self._changes.forget()

    def _start_anew(self) -> None:
        self._prepared().drop()
        self._changes.start_anew()

    # What needs all workers to be one

    def evaluate(self, loss_of: Callable[[nn.Module, Any], Any], dataset: Any, batch_size: int) -> float:
        with self._changes.as_agreed():
            return super().evaluate(loss_of, dataset, batch_size)

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        if not self.version or self.led.member.save_due < self.version:
            super().save(folder, keep_last=keep_last)

    def start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        with self._changes.as_agreed():
            return super().start_snapshot(folder)
