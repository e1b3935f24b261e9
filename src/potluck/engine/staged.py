"""The engine of replicas that are cut into stages: each worker has some layers, and micro-batches go through all.

The same two doors, Trainer and your own loop, run on it: train(loss_of, batch) takes one micro-batch of the loader, and
with the last of a step all of them go forward and backward, in the order of the schedule. A step's figures are the last
stage's to tell. Several replicas, cut alike, stand side by side: under Sync each stage sums its gradients with its
peers, under Cadence and Async each averages its own part with them.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.policy import ApplyPolicy
from potluck.agree.pulse import Pulse, norm_of_stages, worker_steps
from potluck.composition import Composition
from potluck.engine.drafts import Draft
from potluck.engine.engine import Engine
from potluck.engine.fingerprint import training_settings
from potluck.engine.held import Held, HeldPart, empty, hold, narrow
from potluck.engine.loader import BatchConfig, Loader, MicroBatch, SliceLoader, plan_step
from potluck.engine.losses import LossFunction, insist_on_grad, loss_and_samples
from potluck.engine.replica import Replica, StepConfig, autocast, in_float32, naming_single_rows
from potluck.engine.rows import as_dataset, mix
from potluck.engine.slices import describe_model
from potluck.engine.ties import Ties
from potluck.engine.windows import NodePulse, WindowEngine
from potluck.errors import ConfigError, Interrupted
from potluck.events import StepDone, StepSkipped, WorkerStep
from potluck.fleet.ledger import Ledger
from potluck.link.link import Link
from potluck.link.nodes import Nodes, make_nodes
from potluck.link.places import make_places
from potluck.save.saves import Standing
from potluck.save.store_run import StoreRun
from potluck.save.store_saves import StoreSaves
from potluck.shard.strategy import ShardingStrategy
from potluck.stages.channel import Channel
from potluck.stages.cut import Stage, cut, give_up_foreign
from potluck.stages.direct import GroupChannel
from potluck.stages.pipeline import Line
from potluck.stages.plan import Plan, count_sent
from potluck.stages.protocol import Stages
from potluck.stages.schedule import forward_only, plan_orders
from potluck.store.tenancy import Tenant
from potluck.words import plural

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
    """What one stage computes of the micro-batches at hand."""

    def __init__(self, stage: Stage, replica: Replica, unit: Callable[[], float]) -> None:
        self._stage = stage
        self._replica = replica
        self._unit = unit
        held = replica.model
        self._run: Callable[[Callable[[], Any]], Any] = held if isinstance(held, Held) else lambda run: run()
        self.micros: list[_Micro] = []
        self.loss_of: LossFunction | None = None
        self.samples = 0.0
        self.loss_sum: Tensor | None = None

    def begin(self, loss_of: LossFunction, micros: list[_Micro]) -> None:
        self.loss_of, self.micros = loss_of, micros
        self.samples, self.loss_sum = 0.0, None

    def forward(self, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        one, loss_of, replica = self.micros[micro], self.loss_of, self._replica
        assert loss_of is not None
        kept = nullcontext() if one.weight else replica.buffers_kept()
        with kept, naming_single_rows(), autocast(replica.device, replica.config):
            found = self._run(lambda: self._stage.run(loss_of, one.batch, received or None, seed=one.seed))
        if not self._stage.is_last:
            return tuple(found)
        loss, samples = loss_and_samples(found, one.batch)
        loss, samples = in_float32(loss), samples * one.weight
        if not samples:  # a mean over nothing is not a number, and weighs nothing
            return ()
        if torch.is_grad_enabled():
            insist_on_grad(loss)
        self.samples += samples
        told = loss.detach().reshape(()) * samples
        self.loss_sum = told if self.loss_sum is None else self.loss_sum + told
        return (loss * (samples * self._unit()),)

    def weights(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._stage.model.parameters() if parameter.requires_grad]


class Staged(Engine):
    """What every policy has in common where replicas are cut into stages."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        *,
        policy: ApplyPolicy,
        strategy: ShardingStrategy,
        step: StepConfig,
        composition: Composition,
        stages: Stages,
        depot: StoreRun | None = None,
    ) -> None:
        """`depot`: where workers meet who have no connection to each other; the link is its."""
        self.stages = stages
        self._depot = depot
        self._has_failed = False
        self._has_saved = False
        self.places = make_places(link, composition.stages, composition.node_size)
        super().__init__(link, device, policy=policy, strategy=strategy, step=step, composition=composition)
        if depot is not None:
            self._saves = StoreSaves(link, self.events, depot)
        self._has_met = False
        self.plan: Plan | None = None
        self._options: dict[str, Any] = {}
        self._parameters = 0
        self._micros: list[_Micro] = []
        self._work: dict[int, _Work] = {}
        self._pass = 0
        """Counts the times that micro-batches went through the stages: the names of what travels."""

    @property
    def lanes(self) -> int:
        return self.places.lanes

    @property
    def lane(self) -> int:
        return self.places.lane

    @property
    def parameters(self) -> int:
        return self._parameters

    # Preparing

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any = None,
        *,
        loss: LossFunction | None = None,
        micro_batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        if dataset is None or loss is None:
            raise ConfigError(
                "A model that is cut into stages is prepared with its data and its loss function: prepare(model,"
                " optimizer, dataset, batch_size=..., loss=loss_of), where loss_of(model, batch) gives the mean loss."
            )
        wanted = self.stages.micro_batch_size
        if micro_batch_size is not None and micro_batch_size != wanted:
            told = "whole batches" if wanted is None else f"micro-batches of {plural(wanted, 'row')}"
            raise ConfigError(
                f"stages.protocol asks for {told}, and batch.micro_size for {plural(micro_batch_size, 'row')}. Leave"
                " out the latter: stages.protocol.micro_batch_size says how a batch is cut."
            )
        self._options = options | {"dataset": as_dataset(dataset), "loss": loss}
        self.introduce(model, optimizer, as_dataset(dataset), **{"batch_size": 0, "seed": 0} | options)
        ready = super().prepare(model, optimizer, dataset, loss=loss, micro_batch_size=wanted, **options)
        if self._depot is not None:
            self._settle_in(self._depot)
        return ready

    def introduce(
        self, model: nn.Module, optimizer: Optimizer, dataset: Any, *, batch_size: int, seed: int, **about: Any
    ) -> None:
        if self._depot is None or self._has_met:
            return
        settings = training_settings(optimizer, self.config.clip) | {
            "model": describe_model(model) if isinstance(model, nn.Module) else "",
            "rows": len(dataset),
            "batch": batch_size,
            "seed": seed,
            "policy": type(self.policy).kind,
            "step.precision": self.config.precision,
            "workers": self.world,
        }
        name = about.get("name") or Path(sys.argv[0]).name or "a script"
        self._depot.meet(Tenant(name=name, settings=settings, data=self._look_at_data(dataset), out=about.get("out")))
        self._has_met = True
        self.is_restored = self._depot.kept is not None

    def _make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        options = self._options
        draft = Draft(self.stages, self.places, self.device, options["batch_size"])
        plan = self.plan = draft.agree(model, options["loss"], options["dataset"], options.get("collate"))
        held = hold(model, optimizer)
        self._parameters = held.parameters
        places, count = self.places, len(plan.stages)
        stages = [cut(model, plan, number) for number in range(places.place, count, places.workers)]
        own = stages[0].model if len(stages) == 1 else Held([stage.model for stage in stages])
        narrow(optimizer, own)
        empty(model, own)
        give_up_foreign(stages)
        self._ties = Ties(own, places)
        replica = self._new_replica(own, optimizer)
        replica.always_used = self._ties.names
        firsts = self._ties.is_first_of
        together = self.world if self.composition.splits_all else places.size
        self._part = replica.part = HeldPart(replica, held, firsts, rank=self.rank % together, world=together)
        self._own = HeldPart(replica, held, dict.fromkeys(firsts, True), rank=0, world=1)
        self._work = {stage.index: _Work(stage, replica, lambda: self._unit) for stage in stages}
        widths = [count_sent(plan.layers[cut - 1].output or {"value": None}) for cut in plan.cuts]
        self._line = Line(self._work, widths, self._make_channel())
        self.layout = draft.describe(plan)
        return replica

    def _new_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        raise NotImplementedError

    def _make_channel(self) -> Channel:
        if self._depot is not None:
            return self._depot.open_channel(self.lane, self.places.place, self.device)
        return GroupChannel(self.places.line.group, self.device, rank=self.places.place, workers=self.places.workers)

    # A step

    def train(self, loss_of: LossFunction, batch: Any) -> None:
        micro = self.loader.current if self.loader is not None else None
        if micro is None:
            raise ConfigError("train() takes the batches of the loader that prepare() gave.")
        assert self.loader is not None
        seed = mix(self.loader.seed, self.loader.position.epoch, micro.start)
        self._micros.append(_Micro(batch, seed, float(micro.counts)))
        if self.places.is_last and micro.counts:
            self._rows += micro.end - micro.start
            self._ledger.record(micro.start, micro.end)
        self._trained = micro
        self._stand_in.close()
        if micro.last:
            self._run(loss_of)
            self._is_last = True

    def backward(self, loss: Tensor, *, samples: float, last: bool | None = None) -> None:
        raise ConfigError(
            "Stages go forward and backward by themselves: call fleet.train(loss_of, batch) instead of the loss"
            " function and backward()."
        )

    def _run(self, loss_of: LossFunction) -> None:
        replica, micros = self._prepared(), self._micros
        self._micros = []
        for work in self._work.values():
            work.begin(loss_of, micros)
        orders = plan_orders(self.stages.schedule, self.places.workers, len(micros))
        self._pass += 1
        self._line.run(
            self._pass,
            orders,
            self.places.place,
            before_backward=lambda last: replica.arm(last=last),
            after_backward=replica.end_backward,
        )
        replica.seal()
        for work in self._work.values():
            self._samples += work.samples
            if work.loss_sum is not None:
                self._loss_sum = self._loss_sum + work.loss_sum

    def _reduce(self, replica: Replica) -> tuple[float, float, float]:
        wait_s = replica.finish()
        started = time.perf_counter()
        self._ties.add_up(self._part, self._line.channel, self._pass)
        own, loss_sum = torch.stack([replica.norm().to(self.device), self._loss_sum]).tolist()
        told = self.places.line.gather_rows([own, self._ties.counted_elsewhere(self._part)])
        norm = norm_of_stages(*zip(*told, strict=True))
        return wait_s + time.perf_counter() - started, norm, loss_sum

    def _tell(self, busy_s: float, loss_sum: float | None = None) -> Any:
        times = self._line.times
        mine = Pulse(
            samples=self._samples,
            loss_sum=self._loss_sum.item() if loss_sum is None else loss_sum,
            rows=self._rows,
            busy_s=times.busy_s + self._optimizer_s,
            has_unused=self._prepared().has_unused,
            wants_stop=self._wants_stop,
            send_s=times.send_s,
        )
        return self.link.start_gather(mine)

    def _lane_pulses(self, pulses: list[Pulse]) -> list[Pulse]:
        """One for each lane: the last stage's figures, and the time of its busiest stage."""
        found = []
        for lane in range(self.lanes):
            own = [pulses[rank] for rank in self.places.ranks_of(lane)]
            found.append(own[-1]._replace(busy_s=max(pulse.busy_s for pulse in own)))
        return found

    def _samples_of(self, pulses: list[Pulse]) -> float:
        return self._lane_pulses(pulses)[self.lane].samples

    def _share_anew(self, pulses: list[Pulse]) -> None:
        super()._share_anew(self._lane_pulses(pulses))

    def _worker_steps(self, pulses: list[Pulse], took_s: float) -> tuple[WorkerStep, ...]:
        lanes = self._lane_pulses(pulses)
        found = []
        for step in worker_steps(pulses, took_s):
            lane = self.places.lane_of(step.rank)
            name = f"stage {self.places.place_of(step.rank)}" + (f" of {lane}" if self.lanes > 1 else "")
            found.append(replace(step, name=name, rows=int(lanes[lane].rows), samples=lanes[lane].samples))
        return tuple(found)

    def _fingerprint(self) -> str:
        return "/".join(data.decode() for data in self.places.line.gather_bytes(super()._fingerprint().encode()))

    def _look(self, loss_of: LossFunction, loader: Loader) -> tuple[float, float]:
        total = count = 0.0
        for micros in _in_groups(loader):
            for work in self._work.values():
                work.begin(loss_of, micros)
            orders = forward_only(self.stages.schedule, self.places.workers, len(micros))
            self._pass += 1
            self._line.run(self._pass, orders, self.places.place)
            for work in self._work.values():
                count += work.samples
                total += work.loss_sum.item() if work.loss_sum is not None else 0.0
        return total, count

    def close(self) -> None:
        if self._depot is not None:
            (self._depot.close if self._has_failed else self._depot.end)()
        elif self.replica is not None:
            self._line.channel.close()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_failed = error is not None and not isinstance(error, Interrupted)
        super().__exit__(kind, error, trace)

    # Workers that meet in a store

    def _settle_in(self, depot: StoreRun) -> None:
        """Goes on from what this worker had kept before it was killed; or keeps itself for the first time."""
        self._balance = None  # what it has measured would be lost
        if depot.kept is None:
            if depot.every is not None:
                self._keep()
            return
        notes = depot.kept.notes
        depot.kept.load_into(self._own)
        self._prepared().remember_buffers()
        self._check_standing(Path(f"What worker {self.rank} kept of itself"), notes["standing"])
        self._stand_at(notes["standing"])
        self._ledger = Ledger([(start, end) for start, end in notes["ledger"]])
        self._pass, self.memo = notes["passes"], notes["memo"]
        depot.link.log.seal()
        depot.kept = None
        self.start()

    def _keep(self) -> None:
        assert self._depot is not None
        notes = {
            "standing": self._standing_as_json(),
            "ledger": self._ledger.ranges,
            "memo": self.memo,
            "passes": self._pass,
        }
        self._depot.keep(self._own, notes, self._pass)

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        super().save(folder, keep_last=keep_last)
        self._has_saved = True  # whoever starts again must not come by here again: it would find it done

    def _end_of_step(self, event: StepDone | StepSkipped, pulses: list[Pulse]) -> StepDone | StepSkipped:
        event = super()._end_of_step(event, pulses)
        if self._depot is not None and self._depot.every is not None:
            if self._has_saved or self.step_number % self._depot.every == 0:
                self._keep()
                self.start()
            self._has_saved = False
        return event

    def _standing(self) -> Standing:
        assert self.plan is not None
        return super()._standing() | {"plan": self.plan.to_json()}


class StagedEngine(Staged):
    """All replicas step together."""

    def _new_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        places, arguments = self.places, (model, optimizer, self.places.peers, self.device, self.config)
        split = self.composition.split_of(places.place)
        if split is None:
            return Replica(*arguments)
        from potluck.engine.sharded import ShardedReplica

        if self.composition.splits_all:
            return ShardedReplica(*arguments, strategy=split)
        nodes = make_nodes(self.link, places.size).across if self.composition.replicas > 1 else None
        return ShardedReplica(*arguments, strategy=split, within=places.shards, nodes=nodes)


class StagedWindowEngine(Staged, WindowEngine):
    """Each replica steps by itself."""

    def _make_nodes(self) -> Nodes:
        return make_nodes(self.link, self.places.size)

    def _make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        replica = Staged._make_replica(self, model, optimizer)
        self._average_with(replica)
        return replica

    def _new_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        shards = self.places.shards
        arguments = (model, optimizer, self._nodes.across, self.device, self.config)
        if self.composition.split is None:
            return Replica(*arguments, within=shards)
        from potluck.engine.sharded import ShardedReplica

        return ShardedReplica(*arguments, strategy=self.composition.split, within=shards, across=self._nodes.across)

    def _samples_among(self, pulses: list[NodePulse]) -> float:
        """What the last stage of our lane tells."""
        return pulses[-self.places.each + self.rank % self.places.each].samples

    def _close_window(self, loader: SliceLoader) -> None:
        super()._close_window(loader)
        if self._depot is not None:
            self._depot.forget(self._pass)

    def _plan_batch(self, start: int, end: int, batch: BatchConfig) -> list[MicroBatch]:
        each = self.places.each
        together = {"in_step": each > 1, "in_pairs": self._batch_norm is not None}
        return plan_step(start, end, batch, (1.0,) * each, self.rank % each, **together)


def _in_groups(loader: Loader) -> Iterator[list[_Micro]]:
    group: list[_Micro] = []
    for batch in loader.once():
        assert loader.current is not None
        group.append(_Micro(batch, 0, float(loader.current.counts)))
        if len(group) == AT_ONCE:
            yield group
            group = []
    if group:
        yield group
