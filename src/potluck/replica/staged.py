"""A replica that is cut into stages: this worker has some layers, and micro-batches go through all of them.

forward() takes one micro-batch of the loader, and with the last of a step all of them go forward and backward, in the
order of the schedule. A step's figures are the last stage's to tell. Several replicas, cut alike, stand side by side:
under Sync each stage sums its gradients with its peers, under Cadence and Async each averages its own part with them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from potluck.agree.step_report import norm_of_stages
from potluck.data.loader import Loader
from potluck.errors import ConfigError
from potluck.link.grid import Grid
from potluck.replica.evaluate import LookSums, LossFunction, check_grad, loss_and_samples
from potluck.replica.model_checks import explain_single_rows
from potluck.replica.precision import autocast, in_float32
from potluck.replica.replica import MicroPass, Replica
from potluck.replica.sharded import ShardedReplica
from potluck.sharding.whole_steps import check_hooks
from potluck.stages.cut import CutStage
from potluck.stages.pipeline import Channel, PipelineRunner
from potluck.stages.protocol import Schedule
from potluck.stages.schedule import forward_only, plan_orders
from potluck.stages.stage_modules import CutModel, StageModules, StageShard, Ties

AT_ONCE = 8
"""Micro-batches that go through the stages together where nothing is trained."""


@dataclass(slots=True)
class _Micro:
    """A micro-batch that waits for the others of its step."""

    batch: Any
    seed: int
    weight: float
    """1, or 0 for rows that do not count."""


class _Work:
    """The computation of one stage on the micro-batches at hand."""

    def __init__(self, stage: CutStage, replica: Replica) -> None:
        self._stage = stage
        self._replica = replica
        held = replica.model
        self._run: Callable[[Callable[[], Any]], Any] = held if isinstance(held, StageModules) else lambda run: run()
        self.micros: list[_Micro] = []
        self.loss_of: LossFunction | None = None
        self.samples = 0.0
        self.loss_sum: Tensor | None = None
        self._per = 1.0
        self._looks: LookSums | None = None

    def begin(
        self, loss_of: LossFunction, micros: list[_Micro], *, per: float = 1.0, looks: LookSums | None = None
    ) -> None:
        """`per`: as in MicroPass. `looks`: nothing is trained, and what the last stage finds is added to it."""
        self.loss_of, self.micros, self._per, self._looks = loss_of, micros, per, looks
        self.samples, self.loss_sum = 0.0, None

    def forward(self, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        one, loss_of, replica = self.micros[micro], self.loss_of, self._replica
        assert loss_of is not None
        kept = nullcontext() if one.weight else replica.buffers_kept()
        with kept, replica.in_loss(), explain_single_rows(), autocast(replica.device, replica.config):
            result = self._run(lambda: self._stage.run(loss_of, one.batch, received or None, seed=one.seed))
        if not self._stage.is_last:
            return tuple(result)
        if self._looks is not None:
            self._looks.add(result, one.batch, counts=bool(one.weight))
            return ()
        loss, samples = loss_and_samples(result, one.batch)
        loss, samples = in_float32(loss), samples * one.weight
        if not samples:  # a mean over nothing is not a number, and weighs nothing
            return ()
        check_grad(loss)
        self.samples += samples
        told = loss.detach().reshape(()) * samples
        self.loss_sum = told if self.loss_sum is None else self.loss_sum + told
        return (loss * (samples / self._per),)

    def weights(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._stage.model.parameters() if parameter.requires_grad]


class StagedReplica(Replica):
    is_whole = False

    def __init__(
        self,
        *arguments: Any,
        cut: CutModel,
        grid: Grid,
        schedule: Schedule,
        writers: int,
        open_channel: Callable[[], Channel],
        **options: Any,
    ) -> None:
        """`writers`: how many ranks write the model between them, of which this is one or holds what one does."""
        self._grid, self._schedule = grid, schedule
        self._ties = Ties(cut.own, grid)
        super().__init__(*arguments, **options)
        self.tied_names = self._ties.names
        firsts = self._ties.is_first_of
        part = partial(StageShard, self.model, self.optimizer, self.sharded, cut.uncut, device=self.device)
        self.part: StageShard = part(firsts, rank=grid.link.rank % writers, world=writers)
        self.own_part = part(dict.fromkeys(firsts, True), rank=0, world=1)
        """As if nobody else had any of it."""
        self._parameter_count = cut.uncut.parameters
        self._micros: list[_Micro] = []
        self.passes = 0
        """Counts the times that micro-batches went through the stages: the names of what travels."""
        self._work = {stage.index: _Work(stage, self) for stage in cut.stages}
        widths = [cut.plan.layers[number - 1].sends for number in cut.plan.cuts]
        self._runner = PipelineRunner(self._work, widths, open_channel())

    @property
    def parameter_count(self) -> int:
        return self._parameter_count

    def forward(self, loss_of: LossFunction, batch: Any, at: MicroPass) -> None:
        if at.micro is None:
            raise ConfigError("train() takes the batches of the loader that prepare() gave.")
        self._micros.append(_Micro(batch, at.seed, float(at.micro.weighs)))
        if at.micro.last:
            self._compute(loss_of, at)

    def _compute(self, loss_of: LossFunction, at: MicroPass) -> None:
        micros, self._micros = self._micros, []
        for work in self._work.values():
            work.begin(loss_of, micros, per=at.per)
        orders = plan_orders(self._schedule, self._grid.workers, len(micros))
        self.passes += 1
        self._runner.run(
            self.passes,
            orders,
            self._grid.place,
            before_backward=lambda last: self.arm(last=last),
            after_backward=self.end_backward,
        )
        self.seal()
        for work in self._work.values():
            at.tally.samples += work.samples
            if work.loss_sum is not None:
                at.tally.loss_sum = at.tally.loss_sum + work.loss_sum

    def reduce(self, loss_sum: Tensor) -> tuple[float, float, float]:
        if self._grid.workers > 1:
            check_hooks(self.optimizer)  # one may have come after prepare()
        used = self.used if self._ties.shared else frozenset()  # before what is not gets zeros, to be added to
        wait_s = self.finish()
        started = time.perf_counter()
        self._ties.add_up(self.part, self._runner.channel, self.passes)
        own, loss = torch.stack([self.norm().to(self.device), loss_sum]).tolist()
        mine = [own, self._ties.counted_elsewhere(self.part), *(float(name in used) for name in self._ties.shared)]
        norms, counted, *uses = zip(*self._grid.stage_group.gather_rows(mine), strict=True)
        norm = norm_of_stages(norms, counted)
        # As in one process, a weight that no stage has used gets no gradient: an optimizer must not decay or move it.
        self.used_in_stages = {name for name, by in zip(self._ties.shared, uses, strict=True) if any(by)}
        return wait_s + time.perf_counter() - started, norm, loss

    def times(self, busy_s: float, optimizer_s: float) -> tuple[float, float]:
        return self._runner.times.busy_s + optimizer_s, self._runner.times.send_s

    def fingerprint(self) -> str:
        own = super().fingerprint().encode()
        return "/".join(data.decode() for data in self._grid.stage_group.gather_bytes(own))

    def evaluate(self, loss_of: LossFunction, loader: Loader) -> LookSums:
        total = LookSums()
        for micros in _in_groups(loader):
            for work in self._work.values():
                work.begin(loss_of, micros, looks=total)
            orders = forward_only(self._schedule, self._grid.workers, len(micros))
            self.passes += 1
            self._runner.run(self.passes, orders, self._grid.place)
        return total

    def close(self) -> None:
        super().close()
        self._runner.channel.close()


class StagedShardedReplica(StagedReplica, ShardedReplica):
    """Its stages are split over ranks, too."""


def _in_groups(loader: Loader) -> Iterator[list[_Micro]]:
    group: list[_Micro] = []
    for batch in loader.once():
        assert loader.current is not None
        group.append(_Micro(batch, 0, float(loader.current.weighs)))
        if len(group) == AT_ONCE:
            yield group
            group = []
    if group:
        yield group
