"""Sharded: a model whose bytes are split over ranks, with its optimizer. What every way to split it has in common.

For each step: arm and backward, once or many times; then finish, and step or drop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.coded_numbers import Coding
from potluck.sharding.collectives import Collectives
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import FlatRun, first_names, group_names, repoint, scaling, total_norm
from potluck.sharding.whole_steps import WholeSteps, check_can_split, check_hooks, names_stepped_whole


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A model and its optimizer that are to be split, and how, and over whom."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    blocks: Sequence[nn.Module] = ()
    """Modules that are whole only while they compute, one at a time."""
    mean: bool = True
    """Gradients are averaged over the ranks, and not summed."""
    bf16: bool = False
    """Compute in bf16."""
    offload: bool = False
    """Each rank steps its part in host memory, and has its optimizer's state there."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold it between them; none: all there are."""
    nodes: dist.ProcessGroup | None = None
    """If `group` is one node of several: the ranks of our place in each."""
    sum_over: Callable[[dist.ProcessGroup], Callable[[Tensor], None]] | None = None
    """Makes the function that sums a gradient over the ranks of our place in each node; none: torch's own."""
    own_units: bool = False
    """FullShard and HybridShard use units.py, since torch's fully_shard would not train this model right."""


class Writer(NamedTuple):
    """The place of a rank among those that write the model between them."""

    rank: int
    world: int


class Sharded:
    is_split: bool = True
    """Whether other ranks hold other parts of the model."""
    model: nn.Module
    optimizer: Optimizer
    """Holds the runs of this rank that are trained, and steps those."""
    runs: list[FlatRun]
    """All that this rank owns of the trained parameters; the runs of all ranks of `collectives` are the whole model."""
    rest: list[FlatRun]
    """Runs of parameters that are split too and that the optimizer does not have, such as frozen ones."""
    mirrors: Sequence[FlatRun] = ()
    """Runs that other ranks own too, and write: this one only reads them, such as a weight that two stages have."""
    split: dict[str, Spec]
    """Every parameter that is split over ranks, by name, whichever rank owns it; every rank has all else whole."""
    whole_steps: WholeSteps | None = None
    """Steps parameters that are each stepped whole, by one rank."""
    group_names: list[list[str]]
    """The names of the whole parameters of each of the optimizer's groups, as they were given."""
    collectives: Collectives
    """The ranks over which the model is split."""
    writer: Writer
    in_step: bool = False
    """Whether every rank has to run as many backwards as the others, since they talk in each."""
    asks: bool = True
    """Whether step() asks the other ranks what they have used; an engine knows when nobody need ask."""
    tied_names: Set[str] = frozenset()
    """Parameters that other stages have too: where one of them has used it, all have its gradient."""
    used_in_stages: Set[str] = frozenset()
    """Tied parameters that any stage of this pipeline has used in this step."""
    _idle: Set[str] = frozenset()
    """Parameters that no rank has used in this step."""
    _in_loss: bool = False
    gathers: bool = False
    """Whether they also wait for each other in every layer, so that no rank's own speed can be seen."""

    keeps_whole: bool = False
    """Whether every rank has all parameters whole, whoever owns them."""
    cuts_alike: bool = False
    """Whether a parameter is split the same way whatever else the model has, as two stages that have it need it."""

    used: set[str]
    """Parameters that got a gradient in this step: on this rank, or already known to on another. After finish()."""
    _trained: Sequence[str] = ()
    """Parameters that may be left unused; none where that is known without asking."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        check_can_split(optimizer)
        self.model, self.optimizer, self.collectives = model, optimizer, Collectives(group)
        self.group_names = group_names(optimizer, {id(each): name for name, each in model.named_parameters()})
        self.writer = Writer(self.collectives.rank, self.collectives.world)
        self.used = set()

    @property
    def state_runs(self) -> list[FlatRun]:
        """List what the optimizer steps as parameters on this rank and has state for."""
        return [*self.runs, *(self.whole_steps.owned if self.whole_steps is not None else ())]

    def _point(self, numbered: Sequence[tuple[int, FlatRun]], whole: Mapping[str, nn.Parameter]) -> None:
        """Let the optimizer's groups hold these runs, each with the number of its group; or, of parameters that are
        stepped whole, those that this rank owns. `whole`: by name, as they were."""
        self._check_hooks()
        names = names_stepped_whole(self.optimizer, self.group_names)
        if not names:
            repoint(self.optimizer, numbered, whole)
            return
        group_of = {name: number for number, own in enumerate(self.group_names) for name in own}
        runs = [run for _, run in numbered if run.span.name in names]
        names &= whole.keys()  # a frozen one may be in the optimizer's groups, and is not stepped
        specs = {name: spec for name, spec in self.split.items() if name in names and 0 not in spec.shape}
        device = next(iter(whole.values())).device
        steps = self.whole_steps = WholeSteps(specs, runs, self.collectives, device)
        others = [(number, run) for number, run in numbered if run.span.name not in names]
        repoint(self.optimizer, [*others, *((group_of[run.span.name], run) for run in steps.owned)], whole)

    def tied(self) -> dict[str, str]:
        """Further names of split parameters, and the first name of each."""
        return {name: first for name, first in first_names(self.model).items() if first != name and first in self.split}

    def code(self, coding: Coding | None) -> None:
        """Set how gradients travel to their owners from the next backward on; none: as they are."""
        self.collectives.coding = coding

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """While a loss function runs: it may use what is in no block beside the model's forward, also without a
        gradient, where a forward by itself leaves nothing gathered."""
        self._in_loss = True
        try:
            yield
        finally:
            self._in_loss = False
        if self.gathers and not torch.is_grad_enabled():
            self.share()

    def arm(self, *, last: bool) -> None:
        """Prepare for a backward. `last`: the step comes after it."""

    def end_backward(self) -> None:
        """Finish a backward, or stand in for one that has no samples: do what the other ranks still wait for."""

    def start_sums(self) -> None:
        """Begin the sums that the step's last backward has not begun."""

    def finish(self) -> None:
        """Wait until this rank's runs have their whole gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Compute the norm of the whole gradient; every rank gets the same."""
        norm = total_norm([*self.gradients(), *self.unstepped()])
        if self.collectives.world == 1:
            return norm
        square = norm.double().square()
        self.collectives.start_sum(square).wait()
        return square.sqrt()

    def gradients(self) -> list[Tensor]:
        return [run.parameter.grad for run in self.runs if run.parameter.grad is not None]

    def unstepped(self) -> list[Tensor]:
        """The gradients of trained parameters that no optimizer holds. They count in the norm."""
        return [run.parameter.grad for run in self.rest if run.parameter.grad is not None]

    def run_gradients(self) -> list[Tensor | None]:
        """The whole gradient of each of this rank's runs. After finish()."""
        return [run.parameter.grad for run in self.runs]

    @torch.no_grad()
    def load(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradient of each of this rank's runs, from elsewhere: step() steps on it. None: nobody has used it."""
        self.drop()
        for place, gradient in zip(self.run_gradients(), gradients, strict=True):
            assert place is not None
            place.zero_() if gradient is None else place.copy_(gradient.view_as(place))
        pairs = zip(self.runs, gradients, strict=True)
        self._idle = {run.span.name for run, gradient in pairs if gradient is None}

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Steps this rank's runs, on their gradients times `scale`."""
        self.finish()
        with scaling(self.optimizer, self.gradients(), scale):
            self._step_used()
        self._forget()

    @torch.no_grad()
    def drop(self) -> None:
        """Forgets the gradient: this step is skipped."""
        self.finish()
        self._forget()

    def _forget(self) -> None:
        """The next step begins."""
        raise NotImplementedError

    def take_in(self) -> None:
        """Copy into this rank's runs what a loop has written into the model's parameters: before they are read or
        written other than by step()."""

    def share(self) -> None:
        """Send new parameters to where they are kept whole, after step() or when this rank's runs were written; returns
        when they are there."""

    @property
    def has_unused(self) -> bool:
        """Whether some parameter got no gradient on this rank."""
        return len(self.used) < len(self._trained)

    def drop_unused(self) -> None:
        """Parameters that no rank used get no gradient, as in one process. A collective."""
        used = self.used | self.used_in_stages
        told = torch.tensor([name in used for name in self._trained], dtype=torch.int32)
        self._agree(told)
        self._idle = {name for name, is_used in zip(self._trained, told.tolist(), strict=True) if not is_used}

    def _agree(self, told: Tensor) -> None:
        """Each number becomes the largest of all ranks that sum gradients with each other."""
        self.collectives.maximum(told)

    def _step_used(self) -> None:
        """The optimizer's step, which sees no gradient of what no rank has used: no state of it, no count of steps."""
        self._check_hooks()
        if self.asks:
            self.drop_unused()
        idle = [run.parameter for run in self.runs if run.span.name in self._idle] if self._idle else []
        kept = [parameter.grad for parameter in idle]
        for parameter in idle:
            parameter.grad = None
        try:
            if self.whole_steps is not None:
                self.whole_steps.gather()
            self.optimizer.step()
            if self.whole_steps is not None:
                self.whole_steps.scatter()
        finally:
            for parameter, gradient in zip(idle, kept, strict=True):
                parameter.grad = gradient

    def _check_hooks(self) -> None:
        if self.collectives.world > 1:
            check_hooks(self.optimizer)
