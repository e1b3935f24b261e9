"""StagedLayers: replicas are cut into stages; each worker has some layers, and micro-batches go through all.

train(loss_of, batch) takes one micro-batch of the loader, and
with the last of a step all of them go forward and backward, in the order of the schedule. A step's figures are the last
stage's to tell. Several replicas, cut alike, stand side by side: under Sync each stage sums its gradients with its
peers, under Cadence and Async each averages its own part with them.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.step_report import StepReport, norm_of_stages, worker_steps
from potluck.data.loader import Loader
from potluck.data.rows import mix
from potluck.engine.fingerprint import training_settings
from potluck.engine.layers import make_replica
from potluck.engine.look_sums import LookSums
from potluck.engine.losses import LossFunction, check_grad, loss_and_samples
from potluck.engine.replica import Replica
from potluck.engine.run_state import RunState
from potluck.engine.saved_position import check_position, position_as_json, restore_position
from potluck.engine.single_rows import explain_single_rows
from potluck.engine.slices import describe_model
from potluck.engine.switches import autocast, in_float32
from potluck.errors import ConfigError
from potluck.events import WorkerStep
from potluck.fleet.ledger import Ledger
from potluck.link.grid import make_places
from potluck.save.left_out import leave_out
from potluck.save.store_run import StoreRun, StoreSaves
from potluck.sharding.whole_steps import check_can_cut, check_hooks
from potluck.stages.channel import Channel
from potluck.stages.cut import CutStage, cut, give_up_foreign
from potluck.stages.direct import GroupChannel
from potluck.stages.pipeline import PipelineRunner
from potluck.stages.plan import Plan
from potluck.stages.protocol import Stages
from potluck.stages.schedule import forward_only, plan_orders
from potluck.stages.stage_modules import StageModules, StageShard, describe_uncut, free_params_outside, keep_params_of
from potluck.stages.stage_planner import StagePlanner
from potluck.stages.ties import Ties
from potluck.store.sessions import Tenant

if TYPE_CHECKING:
    from potluck.engine.rounds import Rounds

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

    def __init__(self, stage: CutStage, replica: Replica, per: Callable[[], float]) -> None:
        self._stage = stage
        self._replica = replica
        self._per = per
        held = replica.model
        self._run: Callable[[Callable[[], Any]], Any] = held if isinstance(held, StageModules) else lambda run: run()
        self.micros: list[_Micro] = []
        self.loss_of: LossFunction | None = None
        self.samples = 0.0
        self.loss_sum: Tensor | None = None
        self._looks: LookSums | None = None

    def begin(self, loss_of: LossFunction, micros: list[_Micro], looks: LookSums | None = None) -> None:
        """`looks`: nothing is trained, and what the last stage finds is added to it."""
        self.loss_of, self.micros, self._looks = loss_of, micros, looks
        self.samples, self.loss_sum = 0.0, None

    def forward(self, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        one, loss_of, replica = self.micros[micro], self.loss_of, self._replica
        assert loss_of is not None
        kept = nullcontext() if one.weight else replica.buffers_kept()
        with kept, replica.in_loss(), explain_single_rows(), autocast(replica.device, replica.config):
            found = self._run(lambda: self._stage.run(loss_of, one.batch, received or None, seed=one.seed))
        if not self._stage.is_last:
            return tuple(found)
        if self._looks is not None:
            self._looks.add(found, one.batch, counts=bool(one.weight))
            return ()
        loss, samples = loss_and_samples(found, one.batch)
        loss, samples = in_float32(loss), samples * one.weight
        if not samples:  # a mean over nothing is not a number, and weighs nothing
            return ()
        check_grad(loss)
        self.samples += samples
        told = loss.detach().reshape(()) * samples
        self.loss_sum = told if self.loss_sum is None else self.loss_sum + told
        return (loss * (samples / self._per()),)

    def weights(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._stage.model.parameters() if parameter.requires_grad]


class StagedLayers:
    """Of the layers of its replica, this worker has those of its stages."""

    is_whole = False

    def __init__(self, run: RunState, stages: Stages, store_run: StoreRun | None = None) -> None:
        """`store_run`: where workers meet who have no connection to each other; the link is its."""
        self._run = run
        self._stages = stages
        self._store_run = store_run
        self._has_saved = False
        self._has_met = False
        if store_run is not None:
            run.saves = StoreSaves(run.link, run.events, store_run)
        run.kept.add("plan", lambda tensors: self._plan_as_json())
        composed = run.composition
        places = self.places = make_places(run.link, composed.stages, composed.node_size)
        self.pipelines, self.pipeline, self.place = places.pipelines, places.pipeline, places.place
        self.replica_group, self.shards = places.replica_group, places.shards
        self.parameters = 0
        self._plan: Plan | None = None
        self._micros: list[_Micro] = []
        self._work: dict[int, _Work] = {}
        self._pass = 0
        """Counts the times that micro-batches went through the stages: the names of what travels."""

    # Preparing

    def introduce(self, model: nn.Module, optimizer: Optimizer, dataset: Any, about: dict[str, Any]) -> None:
        """What this worker brings, before it says anything to the others: a store may be another run's."""
        if self._store_run is None or self._has_met:
            return
        run = self._run
        settings = training_settings(optimizer, run.config.clip) | {
            "model": describe_model(model) if isinstance(model, nn.Module) else "",
            "rows": len(dataset),
            "batch": about["batch_size"],
            "seed": about["seed"],
            "policy": run.wanted.policy.kind,
            "step.precision": run.config.precision,
            "workers": run.link.world,
        }
        name = about.get("name") or Path(sys.argv[0]).name or "a script"
        data = run.look_at_data(dataset)
        self._store_run.meet(Tenant(name=name, settings=settings, data=data, out=about.get("out")))
        self._has_met = True
        run.is_restored = self._store_run.kept is not None

    def make_replica(
        self, model: nn.Module, optimizer: Optimizer, rounds: "Rounds", options: dict[str, Any]
    ) -> Replica:
        run, places = self._run, self.places
        if places.workers > 1:
            check_can_cut(optimizer)
            check_hooks(optimizer)
        source = options["source"]
        planner = StagePlanner(self._stages, places, run.device, source.batch_size)
        plan = self._plan = planner.agree(model, options["loss"], source.dataset, source.collate)
        held = describe_uncut(model, optimizer)
        self.parameters = held.parameters
        stages = [cut(model, plan, number) for number in range(places.place, len(plan.stages), places.workers)]
        own = stages[0].model if len(stages) == 1 else StageModules([stage.model for stage in stages])
        keep_params_of(optimizer, own)
        free_params_outside(model, own)
        give_up_foreign(stages)
        self._ties = Ties(own, places)
        replica = make_replica(run, self, rounds.nodes, own, optimizer)
        replica.tied_names = self._ties.names
        firsts, rank = self._ties.is_first_of, run.link.rank
        together = run.link.world if run.composition.splits_all else places.size
        own_part = partial(StageShard, own, optimizer, replica.sharded, held, device=run.device)
        self._part = replica.part = own_part(firsts, rank=rank % together, world=together)
        self._own = own_part(dict.fromkeys(firsts, True), rank=0, world=1)
        self._work = {stage.index: _Work(stage, replica, lambda: run.samples_per_gradient) for stage in stages}
        widths = [plan.layers[cut - 1].sends for cut in plan.cuts]
        self._runner = PipelineRunner(self._work, widths, self._make_channel())
        run.layout = planner.describe(plan)
        return replica

    def _make_channel(self) -> Channel:
        places, device = self.places, self._run.device
        if self._store_run is not None:
            return self._store_run.open_channel(self.pipeline, places.place, device)
        return GroupChannel(places.stage_group.group, device, rank=places.place, workers=places.workers)

    # A step

    def train(self, loss_of: LossFunction, batch: Any) -> tuple[Tensor, float] | None:
        run = self._run
        micro = run.loader.current if run.loader is not None else None
        if micro is None:
            raise ConfigError("train() takes the batches of the loader that prepare() gave.")
        assert run.loader is not None
        turn = [run.turns.now] if run.turns.now else []
        seed = mix(run.loader.seed, run.loader.position.epoch, micro.start, *turn)
        self._micros.append(_Micro(batch, seed, float(micro.weighs)))
        if self.places.is_last and micro.counts:
            run.tally.rows += micro.end - micro.start
            if run.turns.is_last:
                run.ledger.record(micro.start, micro.end)
        run.trained = micro
        run.stand_in.close()
        if micro.last:
            self._compute(loss_of)
            run.tally.is_last = True
        return None

    def check_backward(self) -> None:
        raise ConfigError(
            "Stages go forward and backward by themselves: call fleet.train(loss_of, batch) instead of the loss"
            " function and backward()."
        )

    def _compute(self, loss_of: LossFunction) -> None:
        run, micros = self._run, self._micros
        replica = run.prepared()
        self._micros = []
        for work in self._work.values():
            work.begin(loss_of, micros)
        orders = plan_orders(self._stages.schedule, self.places.workers, len(micros))
        self._pass += 1
        self._runner.run(
            self._pass,
            orders,
            self.places.place,
            before_backward=lambda last: replica.arm(last=last),
            after_backward=replica.end_backward,
        )
        replica.seal()
        for work in self._work.values():
            run.tally.samples += work.samples
            if work.loss_sum is not None:
                run.tally.loss_sum = run.tally.loss_sum + work.loss_sum

    def reduce(self, replica: Replica) -> tuple[float, float, float]:
        run = self._run
        if self.places.workers > 1:
            check_hooks(replica.optimizer)  # one may have come after prepare()
        used = replica.used if self._ties.shared else frozenset()  # before what is not gets zeros, to be added to
        wait_s = replica.finish()
        started = time.perf_counter()
        self._ties.add_up(self._part, self._runner.channel, self._pass)
        own, loss_sum = torch.stack([replica.norm().to(run.device), run.tally.loss_sum]).tolist()
        mine = [own, self._ties.counted_elsewhere(self._part), *(float(name in used) for name in self._ties.shared)]
        norms, counted, *uses = zip(*self.places.stage_group.gather_rows(mine), strict=True)
        norm = norm_of_stages(norms, counted)
        # As in one process, a weight that no stage has used gets no gradient: an optimizer must not decay or move it.
        replica.used_in_stages = {name for name, by in zip(self._ties.shared, uses, strict=True) if any(by)}
        return wait_s + time.perf_counter() - started, norm, loss_sum

    def times(self, busy_s: float, optimizer_s: float) -> tuple[float, float]:
        return self._runner.times.busy_s + optimizer_s, self._runner.times.send_s

    def pipeline_reports(self, reports: list[StepReport]) -> list[StepReport]:
        """The last stage's figures, and the time of its busiest stage."""
        found = []
        for pipeline in range(self.pipelines):
            own = [reports[rank] for rank in self.places.ranks_of(pipeline)]
            found.append(own[-1]._replace(busy_s=max(report.busy_s for report in own)))
        return found

    def samples_of_pipeline(self, reports: list[StepReport]) -> float:
        return self.pipeline_reports(reports)[self.pipeline].samples

    def samples_in_node(self, samples: Sequence[float]) -> float:
        """What the last stage of our pipeline tells."""
        return samples[-self.places.each + self._run.link.rank % self.places.each]

    def worker_steps(self, reports: list[StepReport], took_s: float) -> tuple[WorkerStep, ...]:
        pipelines = self.pipeline_reports(reports)
        found = []
        for step in worker_steps(reports, took_s):
            pipeline = self.places.pipeline_of(step.rank)
            name = f"stage {self.places.place_of(step.rank)}" + (f" of {pipeline}" if self.pipelines > 1 else "")
            found.append(
                replace(step, name=name, rows=int(pipelines[pipeline].rows), samples=pipelines[pipeline].samples)
            )
        return tuple(found)

    def fingerprint(self, replica: Replica) -> str:
        return "/".join(data.decode() for data in self.places.stage_group.gather_bytes(replica.fingerprint().encode()))

    def look(self, loss_of: LossFunction, loader: Loader) -> LookSums:
        total = LookSums()
        for micros in _in_groups(loader):
            for work in self._work.values():
                work.begin(loss_of, micros, total)
            orders = forward_only(self._stages.schedule, self.places.workers, len(micros))
            self._pass += 1
            self._runner.run(self._pass, orders, self.places.place)
        return total

    def _plan_as_json(self) -> str:
        assert self._plan is not None
        return self._plan.to_json()

    def close(self, *, has_failed: bool) -> None:
        if self._store_run is not None:
            (self._store_run.close if has_failed else self._store_run.end)()
        elif self._work:
            self._runner.channel.close()

    # Workers that meet in a store

    def settle_in(self) -> None:
        """Goes on from what this worker had kept before it was killed; or keeps itself for the first time."""
        store_run, run = self._store_run, self._run
        if store_run is None:
            return
        if store_run.kept is None:
            if store_run.every is not None:
                self._keep(store_run)
            return
        notes = store_run.kept.notes
        store_run.kept.load_into(self._own, self._run.base)
        run.prepared().remember_buffers()
        check_position(run, Path(f"What worker {run.link.rank} kept of itself"), notes["standing"])
        restore_position(run, notes["standing"])
        run.ledger = Ledger([(start, end) for start, end in notes["ledger"]])
        self._pass, run.caller.memo = notes["passes"], notes["memo"]
        store_run.link.log.seal()
        store_run.kept = None
        run.start_of_step()

    def _keep(self, store_run: StoreRun) -> None:
        run = self._run
        notes = {
            "standing": position_as_json(run),
            "ledger": run.ledger.ranges,
            "memo": run.caller.memo,
            "passes": self._pass,
        }
        without, told = leave_out(run.prepared())
        store_run.keep(self._own, notes | told, self._pass, without)

    def on_saved(self) -> None:
        self._has_saved = True  # after a restart this must not run again: it would find the step done

    def end_of_step(self) -> None:
        store_run, run = self._store_run, self._run
        if store_run is None or store_run.every is None:
            return
        if self._has_saved or run.step_number % store_run.every == 0:
            self._keep(store_run)
            run.start_of_step()
        self._has_saved = False

    def end_of_window(self) -> None:
        if self._store_run is not None:
            self._store_run.forget(self._pass)


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
