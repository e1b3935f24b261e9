"""A replica: one whole copy of the model, with its optimizer, whatever they are split over.

Knows how a step is computed, and nothing of data, schedules or files.
"""

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.turns import Turns
from potluck.coded_numbers import Coding
from potluck.data.loader import Loader
from potluck.data.plan import MicroBatch
from potluck.errors import ConfigError
from potluck.link.link import Link, Pending
from potluck.replica.buckets import GradBuckets
from potluck.replica.buffers import SavedBuffers
from potluck.replica.evaluate import LookSums, LossFunction, loss_and_samples
from potluck.replica.frozen_base import FrozenBase, glance_at
from potluck.replica.model_checks import check_optimizer, check_own_memory, check_same_model, explain_single_rows
from potluck.replica.optimizer_adapter import OptimizerAdapter
from potluck.replica.outer_state import OuterState
from potluck.replica.precision import StepConfig, autocast, switch_on
from potluck.replica.seal import Seal
from potluck.replica.weight_hash import digest_and_quick_digest, quick_digest
from potluck.sharding.absent import own_state
from potluck.sharding.blocks import find_blocks
from potluck.sharding.runs import (
    FlatRun,
    Span,
    can_skip,
    dense_gradient,
    scaling,
    state_at,
    step_unless,
    total_norm,
)

if TYPE_CHECKING:
    from potluck.sharding.sharded import Sharded


@dataclass(slots=True)
class GradientForm:
    """How gradients travel between the ranks that step as one."""

    coding: Coding | None = None
    """None: as they are."""
    is_measured: bool = False
    """Whether that may change."""

    @property
    def may_be_coded(self) -> bool:
        return self.coding is not None or self.is_measured


@dataclass(slots=True)
class StepTally:
    """This worker's part of the step that is under way."""

    loss_sum: Tensor
    started: float
    samples: float = 0.0
    rows: int = 0
    is_last: bool = False
    """Whether its last backward is done."""
    is_untouched: bool = False
    """Batches are the caller's own, and there was no backward yet."""
    only_samples: float | None = None
    """The samples of the step's only backward, where nobody else's gradient is added to it."""


@dataclass(frozen=True, slots=True)
class MicroPass:
    """A micro-batch on its way through a replica."""

    micro: MicroBatch | None
    """None: the batch is the caller's own."""
    seed: int
    """The seed of its random numbers, where stages compute it."""
    per: float
    """By how many samples a gradient is divided from its backward on."""
    tally: StepTally
    """To which stages add what they have computed."""


Agreed = Mapping[int, Tensor]
"""By a parameter's id: what all workers agreed on, where that is not what it holds."""


class Replica:
    """For each step: arm and backward for every micro-batch, then finish, and apply or drop."""

    is_whole = True
    """Whether this worker has all layers, if perhaps parts of their numbers."""
    tied_names: Set[str] = frozenset()
    """Parameters that other stages have too: where one of them has used it, all have its gradient."""
    used_in_stages: Set[str] = frozenset()
    """Tied parameters that any stage of this pipeline has used in this step."""
    sharded: "Sharded | None" = None
    """This rank's part of a model that is split over ranks."""
    part: "Sharded | None" = None
    """What this worker holds of one that is cut into stages; each of them may be split, too."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        link: Link,
        device: torch.device,
        config: StepConfig,
        *,
        within: Link | None = None,
        form: GradientForm | None = None,
        turns: Turns | None = None,
        base: FrozenBase | None = None,
    ) -> None:
        """`within`: the ranks that step as one, if they are not all ranks of the link. `form`: how their gradients
        travel. `turns`: of several optimizers, whose turn it is. `base`: what every rank has alike already."""
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"prepare() takes a torch.nn.Module and a torch.optim.Optimizer, not {type(model).__name__} and"
                f" {type(optimizer).__name__}."
            )
        self.model = model
        self.optimizer = optimizer
        self.link = link
        self.within = self._together = within or link
        self.device = device
        self.config = config
        self._form = form or GradientForm()
        self.base = base
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._turns = turns or Turns()
        check_own_memory(model)
        check_optimizer(optimizer, self.names)
        self._buffers = SavedBuffers(model)
        self._place()
        check_same_model(model, link)
        self._take_first_ranks()  # all start from the same values
        switch_on(model, device, config)
        model.zero_grad()  # what a backward before prepare() has left would have been dropped before the first step
        self.outer = OuterState(optimizer, self.names)
        self.adapter = OptimizerAdapter(optimizer, self._turns, self.names, self._takes_group)
        self.on_close = ExitStack()
        """Gives other people's objects back as they were: see patches.py."""
        self._buckets: GradBuckets | None = None
        self._prepare_sums()
        self._trained_ids = {id(parameter) for parameter in self.trained}
        self._frozen: list[nn.Parameter] | None = None if self.sharded is None else []
        """As the first backward finds them. Those of a split model are others while it computes."""
        self._seal = Seal(self.trained)
        self.remember_buffers()
        self._base_before = self._glance_at_base()
        self._is_armed_for_last = False

    @property
    def in_step(self) -> bool:
        """Whether every rank has to run as many backwards as the others."""
        return self.sharded is not None and self.sharded.in_step

    @property
    def gathers(self) -> bool:
        """Whether they wait for each other in every layer."""
        return self.sharded is not None and self.sharded.gathers

    @property
    def steps_whole(self) -> bool:
        """Whether what the optimizer keeps of some parameters lies with one of the ranks that split them."""
        return self.sharded is not None and self.sharded.whole_steps is not None

    def _place(self) -> None:
        """The model, and what its optimizer knows already: of its constructor, as Adagrad, or loaded."""
        self.model.to(self.device)
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state:
                    state[parameter] = state_at(parameter.device, state[parameter], group)

    def _takes_group(self, added: Sequence[nn.Parameter]) -> bool:
        return self.sharded is None and all(id(parameter) in self._trained_ids for parameter in added)

    def loss(self, loss_of: LossFunction, batch: Any) -> Any:
        """What the loss function gives; all of it is computed in the precision that was asked for."""
        with self.in_loss(), explain_single_rows(), autocast(self.device, self.config):
            return loss_of(self.model, batch)

    def forward(self, loss_of: LossFunction, batch: Any, at: MicroPass) -> tuple[Tensor, float] | None:
        """The mean loss of a batch, and its samples; None where its backward is the replica's own to do."""
        return loss_and_samples(self.loss(loss_of, batch), batch)

    def evaluate(self, loss_of: LossFunction, loader: Loader) -> LookSums:
        """Sums what this worker's rows come to. Nothing is trained."""
        total = LookSums()
        for batch in loader.once():
            found, micro = self.loss(loss_of, batch), loader.current
            total.add(found, batch, counts=micro is not None and micro.weighs)
        return total

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained, over all workers that hold parts of them."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def in_loss(self) -> AbstractContextManager[None]:
        """While a loss function runs."""
        return nullcontext()

    def _prepare_sums(self) -> None:
        if self.within.world > 1:
            self.prepare_sums()
        if self.config.offload_optimizer:
            self.adapter.offload(self.names)

    def prepare_sums(self) -> None:
        """Gradients will be summed over other ranks, if not in every step: see step_with()."""
        if self._buckets is not None:
            return
        is_fine = self._form.may_be_coded
        self._buckets = GradBuckets(self.model, find_blocks(self.model), self._start_sum, is_fine=is_fine)
        self.on_close.callback(self._buckets.close)

    def code(self, coding: Coding | None) -> None:
        """How gradients travel from the next step on; none: as they are."""
        self._form.coding = coding

    def _start_sum(self, flat: Tensor) -> Pending:
        if self._form.coding is None:
            return self._together.start_sum(flat)
        return self._together.start_coded_sum(flat, self._form.coding)

    def step_with(self, link: Link) -> None:
        """The next step is taken together with the ranks of this link, and no others."""
        self._together = link

    def held(self) -> dict[str, list[FlatRun]]:
        """By a parameter's name: what this rank holds of it, here all. Of which it holds none, an empty run."""
        return {
            name: [FlatRun(parameter, Span(name, tuple(parameter.shape), 0, parameter.numel()))]
            for name, parameter in self.model.named_parameters()
        }

    def owned(self) -> list[FlatRun]:
        """Runs of the trained parameters that this rank holds."""
        return [run for runs in self.held().values() for run in runs if run.parameter.requires_grad]

    def hash_weights(self, agreed: Agreed, buffers: Sequence[Tensor]) -> tuple[str, Tensor]:
        """The digest of what all workers agreed on last, as it is in memory here, and a glance at it."""
        return digest_and_quick_digest([*self._at(agreed), *buffers])

    def quick_digest(self, agreed: Agreed, buffers: Sequence[Tensor]) -> Tensor:
        return quick_digest([*self._at(agreed), *buffers])

    def _at(self, agreed: Agreed) -> Iterator[Tensor]:
        """The base is compared once, at the start."""
        named = self.model.named_parameters()
        return (agreed.get(id(parameter), parameter) for name, parameter in named if not self.is_base(name))

    def is_base(self, name: str) -> bool:
        return self.base is not None and name in self.base.hashes

    def moved_base(self) -> set[str]:
        """Parameters of the base that were changed since the start: by hand, as a mean of others' values is, or by a
        checkpoint that holds them. Of what this rank holds."""
        now = self._glance_at_base()
        return {name for name, before in self._base_before.items() if not torch.equal(before, now[name])}

    def _glance_at_base(self) -> dict[str, Tensor]:
        return glance_at(self.base, self.held()) if self.base is not None else {}

    def before_parts_are_used(self) -> None:
        """Call it before reading or changing what is held, where a loop may have written into parameters since the last
        step."""

    def on_parts_written(self) -> None:
        """Call it after writing into what is held."""

    @contextmanager
    def optimizer_writes(self) -> Iterator[None]:
        """Around anything but a step that changes what the optimizer steps."""
        self.before_parts_are_used()
        with self.adapter.writes():
            yield
        self.on_parts_written()

    def arm(self, *, last: bool) -> None:
        """Before each backward: only the step's last backward talks to the other ranks."""
        if self._is_armed_for_last:
            raise ConfigError(
                "backward() was called again after the backward that ended this step. Where several backwards make"
                " one step, pass last=False to all but the last of them."
            )
        self._is_armed_for_last = last
        self._seal.open(for_step=False)
        self._check_frozen()
        if self._buckets is not None:
            self._buckets.arm(communicate=last)

    def _check_frozen(self) -> None:
        """All of the model once, and then what was frozen: to walk through its modules takes longer than the rest."""
        if self._frozen is None:
            self._frozen = [p for p in self.model.parameters() if id(p) not in self._trained_ids]
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ConfigError(
                "A parameter that was frozen at prepare() requires a gradient now. Unfreeze it before prepare(); an"
                " optimizer that does not hold it will leave it as it is."
            )

    def disarm(self) -> None:
        """Another slice begins, whose backwards are its own."""
        self._is_armed_for_last = False
        self._seal.forget()

    def seal(self) -> None:
        """After each backward: until the next one or the step, gradients are nobody's to use."""
        self._seal.close()

    def unseal(self) -> None:
        """The step begins."""
        self._seal.open(for_step=True)

    def end_backward(self) -> None:
        """After each backward, and in place of one that has no samples: what the other ranks still wait for."""

    def start_sums(self) -> None:
        """After the step's last backward: begins what it has not begun of the sums over all ranks."""
        if self._buckets is not None:
            self._buckets.start_rest()

    def finish(self) -> float:
        """Ends the sums over all ranks. Returns the seconds spent waiting for them."""
        waited_s = self._buckets.finish() if self._buckets is not None else 0.0
        for parameter in self.trained if self._turns.count > 1 else ():
            if parameter.grad is not None and not self.adapter.steps_now(self.names[id(parameter)]):
                parameter.grad.zero_()  # where it lies in a bucket, the norm is of that
        return waited_s

    def reduce(self, loss_sum: Tensor) -> tuple[float, float, float]:
        """Ends the sums over all ranks: (seconds waited, the gradient's norm, this worker's loss sum)."""
        wait_s = self.finish()
        started = time.perf_counter()
        norm, loss = torch.stack([self.norm().to(self.device), loss_sum]).tolist()
        if self.device.type == "cuda" and self.link.world > 1:  # there, finish() only put the sums in line
            wait_s += time.perf_counter() - started
        return wait_s, norm, loss

    def times(self, busy_s: float, optimizer_s: float) -> tuple[float, float]:
        """Of a step: the seconds that this worker computed, and those that it sent to other stages."""
        return busy_s, 0.0

    def drop_unused(self) -> None:
        """Parameters that no rank used get no gradient, as in one process. A collective where there are several."""
        if self._buckets is None:
            for parameter in self.trained if self.tied_names else ():
                if self.names[id(parameter)] in self.tied_names - self.used_in_stages:
                    parameter.grad = None
            return
        names = self._buckets.parameter_names
        arrived = zip(self._buckets.arrivals(), names, strict=True)
        used = torch.tensor([here or name in self.used_in_stages for here, name in arrived], dtype=torch.int32)
        self._together.start_sum(used).wait()
        self._buckets.drop(used.bool().tolist())

    @property
    def has_unused(self) -> bool:
        if self._buckets is None:
            return not self.tied_names <= self.used
        return not all(self._buckets.arrivals())

    @property
    def used(self) -> Set[str]:
        """Parameters that got a gradient in this step: on this rank, or already known to on another."""
        if self._buckets is not None:
            arrived = zip(self._buckets.arrivals(), self._buckets.parameter_names, strict=True)
            return {name for here, name in arrived if here}
        return {self.names[id(parameter)] for parameter in self.trained if parameter.grad is not None}

    def norm(self) -> Tensor:
        """The norm of the whole gradient, as it stands."""
        return total_norm(self._gradients())

    def apply(self, scale: float) -> None:
        """Scales the gradient and steps the optimizer."""
        with scaling(self.optimizer, self._gradients(), scale):
            self.adapter.step()
        self.drop()

    @property
    def runs_ahead(self) -> bool:
        """Whether apply_unless_bad() can be used: one rank on a GPU, which then need not wait for our decision."""
        is_alone = self.link.world == 1 and self.device.type == "cuda"
        return is_alone and not self.adapter.is_offloaded and can_skip(self.optimizer)

    @torch.no_grad()
    def apply_unless_bad(self, loss_sum: Tensor, scale: float, clip: float | None) -> tuple[Tensor, Tensor]:
        """decide_mean() and apply() in one, on the GPU: steps only if both are finite. (norm, whether it was bad).

        The gradient stays until drop(): a norm that is not finite may only have had no room in float32.
        """
        norm = torch.nn.utils.get_total_norm(self._gradients())
        mean_norm = norm * scale
        is_bad = ~(torch.isfinite(mean_norm) & torch.isfinite(loss_sum))
        factor = mean_norm.new_full((), scale)
        if clip is not None:
            factor = factor * (clip / (mean_norm + 1e-6)).clamp(max=1.0)
        with self.adapter.stepping():
            step_unless(self.optimizer, is_bad, factor)
        return norm, is_bad

    def drop(self) -> None:
        """Forgets the gradient."""
        self._seal.forget()
        if self._buckets is not None:
            self._buckets.reset()
        for parameter in self.trained:
            parameter.grad = None
        self._is_armed_for_last = False

    # Buffers that are saved with the model: running statistics and the like

    def remember_buffers(self) -> None:
        """At the start of a step."""
        self._buffers_before = self._buffers.copy()

    def restore_buffers(self) -> None:
        """A step that is skipped leaves no trace in them either."""
        self._buffers.put(self._buffers_before)

    def buffers_kept(self) -> AbstractContextManager[None]:
        """A forward of rows that do not count leaves no trace in them."""
        return self._buffers.aside()

    def nonfinite_hint(self) -> str:
        """A sentence to add where something is not finite: the cause may be a buffer, not the data."""
        name = self._buffers.with_nan()
        return f" First of all: the model's buffer {name} holds NaN; if forward() uses it, that is why." if name else ""

    def average_buffers(self, weight: float) -> None:
        """What the step changed becomes the mean of the ranks that took it together, by weight, where it has one."""
        self._buffers.average(self._together, weight, self._buffers_before)

    @property
    def is_summed_alone(self) -> bool:
        """Whether the gradient of the step under way is added to nobody else's."""
        return self._together.world == 1

    def align(self) -> None:
        """Every rank takes rank 0's values."""
        self._take_first_ranks()

    def _take_first_ranks(self) -> None:
        for name, tensor in own_state(self.model).items():
            if not self.is_base(name):
                self.link.broadcast(tensor)

    def fingerprint(self) -> str:
        """The hash of every parameter but the base's: equal exactly when replicas are."""
        return self.hash_weights({}, ())[0]

    def close(self) -> None:
        """This worker leaves the run. Model and optimizer are their owner's again, if they are whole here."""
        if self.sharded is None and self.is_whole:
            self.drop()
            self.adapter.release()
        self.on_close.close()

    def _gradients(self) -> list[Tensor]:
        # A flat bucket holds zeros for what nobody used, so the norm over buckets is the norm over gradients.
        if self._buckets is not None:
            return self._buckets.flats
        return [dense_gradient(parameter) for parameter in self.trained if parameter.grad is not None]
