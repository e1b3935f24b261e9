"""WholeLayers: how rows go through a replica of which this worker has all layers, if perhaps parts of their numbers.

StagedLayers (staged.py) answers the same calls where a replica is cut; what each is for is said here.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.step_report import StepReport, worker_steps
from potluck.coded_numbers import coding_of
from potluck.data.loader import Loader
from potluck.engine.look_sums import LookSums
from potluck.engine.losses import LossFunction, loss_and_samples
from potluck.engine.replica import GradientForm, Replica
from potluck.engine.run_state import RunState
from potluck.events import WorkerStep
from potluck.link.grid import Nodes, make_nodes
from potluck.link.link import Alone, Link
from potluck.sharding.blocks import find_blocks, fits_fully_shard

if TYPE_CHECKING:
    from potluck.engine.rounds import Rounds
    from potluck.engine.staged import StagedLayers

Layers = Union["WholeLayers", "StagedLayers"]


class WholeLayers:
    is_whole = True
    place = 0
    """Which of a replica's stages are here."""
    shards: Link = Alone()
    """Those who hold the same stages of our replica: each some part."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.pipelines, self.pipeline = run.link.world, run.link.rank
        """Among how many each batch is shared out, and which of them this worker is."""
        self.replica_group = run.link
        """All who hold the same layers as this worker, of any replica."""

    @property
    def parameters(self) -> int:
        """How many numbers are trained, over all workers that hold parts of them."""
        return sum(
            parameter.numel() for parameter in self._run.prepared().model.parameters() if parameter.requires_grad
        )

    def introduce(self, model: nn.Module, optimizer: Optimizer, dataset: Any, about: dict[str, Any]) -> None:
        """Before anything is said to the others. `about`: batch_size, seed, and perhaps the run's name and folder."""

    def make_replica(
        self, model: nn.Module, optimizer: Optimizer, rounds: "Rounds", options: dict[str, Any]
    ) -> Replica:
        """Called once. `options`: what prepare() was given of the data: source and loss."""
        return make_replica(self._run, self, rounds.nodes, model, optimizer)

    def settle_in(self) -> None:
        """prepare() is done."""

    def train(self, loss_of: LossFunction, batch: Any) -> tuple[Tensor, float] | None:
        """The forward of a batch: its mean loss, and its samples; none where the backward is done with it."""
        return loss_and_samples(self._run.prepared().loss(loss_of, batch), batch)

    def check_backward(self) -> None:
        """Whether a loop may call backward() by itself."""

    def reduce(self, replica: Replica) -> tuple[float, float, float]:
        """Finishes the sums over all ranks: (seconds waited, the gradient's norm, this worker's loss sum)."""
        run = self._run
        wait_s = replica.finish()
        started = time.perf_counter()
        norm, loss_sum = torch.stack([replica.norm().to(run.device), run.tally.loss_sum]).tolist()
        if run.device.type == "cuda" and run.link.world > 1:  # there, finish() only put the sums in line
            wait_s += time.perf_counter() - started
        return wait_s, norm, loss_sum

    def times(self, busy_s: float, optimizer_s: float) -> tuple[float, float]:
        """Of a step: the seconds that this worker computed, and those that it sent to other stages."""
        return busy_s, 0.0

    def pipeline_reports(self, reports: list[StepReport]) -> list[StepReport]:
        """One for each pipeline."""
        return reports

    def worker_steps(self, reports: list[StepReport], took_s: float) -> tuple[WorkerStep, ...]:
        return worker_steps(reports, took_s)

    def samples_of_pipeline(self, reports: list[StepReport]) -> float:
        """How many samples this worker's gradient covers, from the reports of all workers."""
        return self._run.tally.samples

    def samples_in_node(self, samples: Sequence[float]) -> float:
        """The same, from the samples of each rank of this worker's replica."""
        return self._run.tally.samples

    def fingerprint(self, replica: Replica) -> str:
        return replica.fingerprint()

    def look(self, loss_of: LossFunction, loader: Loader) -> LookSums:
        """What this worker's rows come to. Nothing is trained."""
        total = LookSums()
        for batch in loader.once():
            found, micro = self._run.prepared().loss(loss_of, batch), loader.current
            total.add(found, batch, counts=micro is not None and micro.weighs)
        return total

    def on_saved(self) -> None:
        """A checkpoint is in host memory."""

    def end_of_step(self) -> None:
        """Called after each step that all workers took together."""

    def end_of_window(self) -> None:
        """Called when all replicas have agreed."""

    def close(self, *, has_failed: bool) -> None:
        """This worker leaves the run."""


def make_replica(run: RunState, layers: Layers, nodes: Nodes | None, model: nn.Module, optimizer: Optimizer) -> Replica:
    """Of what this worker holds of the model. `nodes`: where replicas step by themselves."""
    composed, split = run.composition, run.composition.split_of(layers.place)
    link, within = layers.replica_group, None
    others: dict[str, Any] = {}
    if nodes is not None:
        link, within = (run.link, nodes.within) if layers.is_whole else (nodes.across, layers.shards)
        others = {"across": nodes.across}
    elif split is not None and not (layers.is_whole or composed.splits_all):
        within = layers.shards
        if composed.replicas > 1:
            others = {"nodes": make_nodes(run.link, composed.stages * composed.node_size).across}
    arguments = (model, optimizer, link, run.device, run.config)
    form = GradientForm(coding_of(composed.wire), composed.wire_is_measured)
    if split is None:
        return Replica(*arguments, within=within, form=form, turns=run.turns, base=run.base)
    from potluck.engine.sharded import ShardedReplica

    # All decide alike: stages that have a weight in common must cut it in the same way.
    told = run.link.gather_bytes(b"" if fits_fully_shard(model, find_blocks(model)) else b"does not")
    return ShardedReplica(
        *arguments,
        strategy=split,
        own_units=any(told),
        within=within,
        form=form,
        turns=run.turns,
        base=run.base,
        codes_within=nodes is None and composed.replicas == 1 and not run.wanted.has_host,
        **others,
    )
