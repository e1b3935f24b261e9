"""SliceSteps: a worker's slices of a step that all take together, computed one by one, and sent as their sums."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor

from potluck.engine.buffers import SavedBuffers
from potluck.engine.led import Led
from potluck.engine.loader import BatchConfig, MicroBatch, plan_step
from potluck.engine.node_client import NodeClient
from potluck.engine.part_sender import PartSender
from potluck.engine.replica import Replica, find_batch_norm
from potluck.engine.rows import mix
from potluck.engine.slices import Gradients, SliceSums, WholeGradients
from potluck.errors import ConfigError
from potluck.fleet.tree import Node
from potluck.wire.messages import SliceReport

if TYPE_CHECKING:
    from potluck.engine.sharded import ShardedReplica

ANY_ROWS = BatchConfig(size=1 << 31)
"""A slice goes through the model at once, however many rows it has."""


class SliceSteps:
    def __init__(
        self, replica: Replica, led: Led, sender: PartSender, send_part: Callable[[int, Tensor], None]
    ) -> None:
        self._replica = replica
        self._link = replica.link
        self._led = led
        self._sender = sender
        self._in_pairs = find_batch_norm(replica.model) is not None
        self.sums = SliceSums(replica.model, _gradients(replica, led, sender), replica.link, send_part)
        self.sums.before_last_part = self._send_used
        self.sums.send_exact = self._send_exact
        self.slices: list[int] = []
        self._reports: dict[int, tuple[float, float]] = {}
        """Of each slice: the samples of this rank's rows, and the sum of their losses."""
        self._loss = self._samples = 0.0
        self.is_done = True
        """step() was called for the slice that was given out last."""
        self._started = 0.0

    def begin(self, nodes: list[Node]) -> None:
        self._reports = {}
        self.slices = self.sums.begin(nodes)
        self._started = time.perf_counter()

    def micro_batches(
        self, bounds: Sequence[tuple[int, int]], step_end: int, is_void: Callable[[], bool]
    ) -> Iterator[MicroBatch]:
        """One for each slice, until all are done or of no use any more. Of several ranks, each gets some of its rows,
        or some that do not count."""
        for index, number in enumerate(self.slices):
            if is_void():
                return
            start, end = bounds[number]
            self.sums.start_slice()
            self._replica.disarm()
            self._loss = self._samples = 0.0
            self.is_done = False
            last = index == len(self.slices) - 1
            yield replace(self._own_rows(start, end), last=last, step_end=step_end, number=index)
            if not self.is_done:
                raise ConfigError(
                    f"The slice of rows {start} to {end} was given out, but step() was not called after it."
                    " Call backward() and step() for every batch of the loader."
                )

    def _own_rows(self, start: int, end: int) -> MicroBatch:
        shares = (1.0,) * self._link.world
        (own,) = plan_step(start, end, ANY_ROWS, shares, self._link.rank, in_step=True, in_pairs=self._in_pairs)
        return own

    def seed_of(self, micro: MicroBatch, seed: int) -> int:
        """Of the slice, so that it does not matter who computes it; the ranks of one worker each draw their own."""
        rank = (self._link.rank + 1,) if self._link.rank else ()
        return mix(seed, self._step, self.slices[micro.number], *rank)

    def backward(self, micro: MicroBatch, loss: Tensor, samples: float, unit: float, *, last: bool) -> None:
        """`last`: of this slice, of which a loop may give several."""
        self._replica.arm(last=last)
        samples = samples if micro.counts else 0.0
        if samples:
            self._loss += loss.detach().item() * samples
            self._samples += samples
        if last:
            self._reports[self.slices[micro.number]] = (self._samples, self._loss)
            if micro.last:
                self._send_report()
        self.sums.arm(communicate=last)
        if samples:
            (loss * (samples * unit)).backward()  # type: ignore[no-untyped-call]
        self._replica.end_backward()
        if last:
            self.sums.finish_slice(self._samples, unit)

    def forget(self) -> None:
        """The model is again as it was agreed on."""
        self.sums.reset()
        self.sums.restore_buffers()

    def agreed_tensors(self) -> list[Tensor]:
        return [*self._replica.model.parameters(), *self.sums.agreed_buffers]

    def load(self, means: list[Tensor], used: bytes) -> float:
        """The mean gradient goes to where the optimizer finds it. Its norm."""
        return self.sums.load(means, used)

    def _send(self, report: SliceReport) -> None:
        self._led.client.send(report)

    def _send_report(self) -> None:
        numbers = np.array(list(self._reports), "<u4")
        mine = [number for report in self._reports.values() for number in report]
        found = np.sum(np.array(self._link.gather_rows(mine), "<f8"), axis=0).reshape(-1, 2)
        self._send(SliceReport(self._step, numbers, found[:, 0].copy(), found[:, 1].copy(), 0.0, b""))

    def _send_used(self) -> None:
        """Which parameters the slices used is known when the last part is; so is how long they took."""
        self._sender.synchronize()
        busy_s = time.perf_counter() - self._started
        self._led.check_weights(in_step=True)  # before the last part, without which nothing is committed
        none = np.zeros(0)
        self._send(SliceReport(self._step, none.astype("<u4"), none, none, busy_s, self.sums.used_bits()))

    def _send_exact(self, exact: bytes) -> None:
        none = np.zeros(0)
        self._send(SliceReport(self._step, none.astype("<u4"), none, none, 0.0, b"", buffers=exact))

    @property
    def _step(self) -> int:
        return self._led.member.version + 1


def _gradients(replica: Replica, led: Led, sender: PartSender) -> Gradients:
    if replica.link.world == 1:
        return WholeGradients(replica, sender.make_room(replica.model))
    from potluck.engine.split_gradients import SplitGradients

    return SplitGradients(
        cast("ShardedReplica", replica), cast(NodeClient, led.client), SavedBuffers(replica.model).parts
    )
