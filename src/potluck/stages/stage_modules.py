"""CutModel: the part of a model cut into stages that a worker holds, with parameters under the whole model's names.

Saving and loading see it as one of those who hold a model that is split (parts.py), so a checkpoint is the whole
model's, and loads with another cut, or none.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.link.grid import Grid
from potluck.sharding.absent import own_state
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import FlatRun, Span, first_names, group_names
from potluck.sharding.sharded import Sharded, Writer
from potluck.stages.chain import BufferSlot, seats_of_buffers
from potluck.stages.cut import CutStage, cut, give_up_foreign
from potluck.stages.pipeline import Channel, Label
from potluck.stages.plan import Plan


@dataclass(frozen=True, slots=True)
class UncutModel:
    """The model as it was before it was cut."""

    specs: dict[str, Spec]
    """Every entry of its state_dict, by first names."""
    tied: dict[str, str]
    """Further names of parameters, and the first name of each."""
    group_names: list[list[str]]
    """The names of the parameters in each of the optimizer's groups, as they were given."""
    parameters: int


def describe_uncut(model: nn.Module, optimizer: Optimizer) -> UncutModel:
    """Describes a model before it is cut."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {name: first for name, first in first_names(model).items() if first != name}
    specs = {
        name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in own_state(model).items() if name not in tied
    }
    return UncutModel(
        specs,
        tied,
        group_names(optimizer, names),
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    )


def state_held_by(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state that a part of the model holds, by name. A parameter has its first name in every part."""
    yield from model.named_parameters()
    # Where several stages are one model, one that does not use a parameter has zeros by its name.
    saved = set(own_state(model)) - {name for name, _ in model.named_parameters()}
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def let_go(model: nn.Module, optimizer: Optimizer, own: nn.Module) -> None:
    """Removes from the optimizer the parameters that this worker does not have, and frees their memory, even if the
    caller still holds the whole model."""
    kept = {id(parameter) for parameter in own.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in kept:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]

    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)


@dataclass(frozen=True, slots=True)
class CutModel:
    """The part that a worker holds of a model that is cut into stages."""

    plan: Plan
    stages: list[CutStage]
    own: nn.Module
    """All of them as one model."""
    uncut: UncutModel

    @staticmethod
    def take(model: nn.Module, optimizer: Optimizer, plan: Plan, places: Grid) -> "CutModel":
        """Cuts the model: what other workers have of it leaves the optimizer and the memory."""
        uncut = describe_uncut(model, optimizer)
        stages = [cut(model, plan, number) for number in range(places.place, len(plan.stages), places.workers)]
        own = stages[0].model if len(stages) == 1 else StageModules([stage.model for stage in stages])
        let_go(model, optimizer, own)
        give_up_foreign(stages)
        return CutModel(plan, stages, own, uncut)


class StageModules(nn.Module):
    """Several stages of one worker as one model, whose parameters have the whole model's names.

    It is what computes: run() calls it around the run of any of its stages, so that hooks on it hear of each forward.
    """

    holds_stages = True

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, stage in enumerate(stages):
            self.add_module(str(number), stage)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Each stage's under the names that they have in the whole model."""
        memo = set() if memo is None else memo
        yield prefix, self
        for stage in self.children():
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Likewise. What several stages have comes from the first of them."""
        found: dict[str, Any] = {}
        for name, tensor in super().state_dict(*args, **options).items():
            found.setdefault(name.partition(".")[2], tensor)
        return found


class BufferRun(FlatRun):
    """A buffer, looked up each time: `self.average = ...` in a forward puts another tensor in its place."""

    def __init__(self, module: nn.Module, key: str, span: Span) -> None:
        self._seat = (module, key)
        self.span = span

    @property
    def parameter(self) -> Tensor:  # type: ignore[override]
        module, key = self._seat
        buffer = module._buffers[key]
        assert buffer is not None
        if not buffer.is_contiguous():
            buffer = module._buffers[key] = buffer.contiguous()
        return buffer


class StageShard(Sharded):
    """A worker's stages as its part of a model that is split."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        inner: Sharded | None,
        whole: UncutModel,
        is_first_of: Mapping[str, bool],
        *,
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        """`inner`: what this rank holds of the stages, where they are split too. `is_first_of`: by name, whether this
        worker writes it, or another that has it too."""
        self.model, self.optimizer = model, optimizer
        self.writer = Writer(rank, world)
        self.split, self.group_names = whole.specs, whole.group_names
        self._tied = whole.tied
        self._device, self._inner = device, inner
        self.whole_steps = inner.whole_steps if inner is not None else None
        self.runs, self.mirrors, self.rest = [], [], []
        self._having: dict[str, list[FlatRun]] = {}
        """By name: the runs that hold numbers of it."""
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for run, is_ours in self._found():
            if not is_ours or not is_first_of[run.span.name]:
                self.mirrors.append(run)
            elif id(run.parameter) in stepped:
                self.runs.append(run)
            else:
                self.rest.append(run)
            self._having.setdefault(run.span.name, []).append(run)

    def _found(self) -> Iterator[tuple[FlatRun, bool]]:
        """Yield the runs that are here, and whether each is this rank's to write: what is not split, each rank of the
        stage has."""
        inner = self._inner
        if inner is not None:
            yield from ((run, True) for run in (*inner.runs, *inner.rest))
        split = inner.split if inner is not None else {}
        is_ours = inner is None or inner.collectives.rank == 0
        seats: dict[str, BufferSlot] = {}
        for name, seat in seats_of_buffers(self.model):
            seats.setdefault(name, seat)  # of several stages, the first one's
        for name, tensor in state_held_by(self.model):
            if tensor.numel() and name not in split:
                span = Span(name, tuple(tensor.shape), 0, tensor.numel())
                found = FlatRun(tensor, span) if isinstance(tensor, nn.Parameter) else BufferRun(*seats[name], span)
                yield found, is_ours

    # Of a weight that other stages have too

    def gradient_of(self, name: str) -> Tensor:
        """Flat, and of those numbers that the same rank of another stage has too: where each splits its parameters
        elsewhere, of all of them, which is a collective. Zeros, where there is none."""
        pieces = self._pieces_of(name)
        if self._cuts_alike:
            return pieces[0][1] if pieces else torch.empty(0, dtype=self.split[name].dtype, device=self._device)
        assert self._inner is not None
        spec = self.split[name]
        whole = torch.zeros(math.prod(spec.shape), dtype=spec.dtype, device=self._device)
        for span, numbers in pieces:
            whole[span.start : span.end] = numbers
        self._inner.collectives.start_sum(whole).wait()
        return whole

    def put_gradient(self, name: str, gradient: Tensor) -> None:
        """Puts back a gradient in the form that gradient_of() gave."""
        for span, numbers in self._pieces_of(name):
            numbers.copy_(gradient if self._cuts_alike else gradient[span.start : span.end])

    def norm_of(self, names: Sequence[str]) -> float:
        """The norm of these parameters' gradients, over all ranks that hold this stage."""
        if not names:
            return 0.0
        pieces = [numbers.double() for name in names for _, numbers in self._pieces_of(name)]
        norm = torch.nn.utils.get_total_norm(pieces)
        if self._inner is None:
            return float(norm)
        square = norm.double().square().to(self._device)
        self._inner.collectives.start_sum(square).wait()
        return math.sqrt(float(square))

    @property
    def _cuts_alike(self) -> bool:
        return self._inner is None or self._inner.cuts_alike

    def _pieces_of(self, name: str) -> list[tuple[Span, Tensor]]:
        pieces = []
        for run in self._having.get(name, ()):
            if run.parameter.grad is None:
                run.parameter.grad = torch.zeros_like(run.parameter)
            run.parameter.grad = run.parameter.grad.contiguous()  # of a model in channels_last it is not
            pieces.append((run.span, run.parameter.grad.view(-1)))
        return pieces

    def tied(self) -> dict[str, str]:
        return self._tied

    def share(self) -> None:
        if self._inner is not None:
            self._inner.share()


class Ties:
    """Weights that several stages of a model have, such as an embedding that is also the head.

    Each stage steps its own copy, on the sum of all stages' gradients; so all copies stay equal, to the last bit.
    """

    def __init__(self, own: nn.Module, places: Grid) -> None:
        """`own`: this worker's part of the model. Called on every worker of a pipeline alike."""
        self._place = places.place
        self.is_first_of: dict[str, bool] = {}
        """By name: whether this worker saves it and counts it, or another that has it too."""
        self._holders: dict[str, list[int]] = {}
        """Places of the stages that hold each tied and trained parameter."""
        names = [name for name, _ in state_held_by(own)]
        trained = {name for name, parameter in own.named_parameters() if parameter.requires_grad}
        own_names = json.dumps([names, sorted(trained)]).encode()
        every = [json.loads(data) for data in places.stage_group.gather_bytes(own_names)]
        names_of_stages = [set(held) for held, _ in every]
        counts = Counter(name for _, held in every for name in held)
        self.shared = sorted(name for name, count in counts.items() if count > 1)
        """Parameters that any two stages train, the same list on each of them."""
        for name in names:
            holders = [place for place, held in enumerate(names_of_stages) if name in held]
            self.is_first_of[name] = holders[0] == self._place
            if len(holders) > 1 and name in trained:
                self._holders[name] = holders

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that are tied and trained. Where one stage has used one in a step, all of them step
        it."""
        return frozenset(self._holders)

    def add_up(self, part: StageShard, channel: Channel, step: int) -> None:
        """The sum of all stages' gradients becomes each one's."""
        if not self._holders:
            return
        order = sorted(self._holders)
        labels = {
            (name, source, target): Label(step, "tied", source, target, number)
            for number, name in enumerate(self.shared)  # by which all of them know it: one may have others too
            if name in self._holders
            for source in self._holders[name]
            for target in self._holders[name]
        }
        channel.expect([label for (_, source, to), label in labels.items() if to == self._place != source])
        own = {name: part.gradient_of(name) for name in order}
        for (name, source, to), label in labels.items():
            if source == self._place != to:
                channel.send(label, own[name])
        sums = {name: self._sum(name, own[name], channel, labels) for name in order}
        channel.flush()  # until then what is sent must stay as it is
        for name, total in sums.items():
            part.put_gradient(name, total)

    def counted_elsewhere(self, part: StageShard) -> float:
        """The norm of what another stage has too, and counts."""
        return part.norm_of([name for name in self._holders if not self.is_first_of[name]])

    def _sum(self, name: str, own: Tensor, channel: Channel, labels: dict[tuple[str, int, int], Label]) -> Tensor:
        """Sum in the order of stages, on every one of them."""
        total: Tensor | None = None
        for other in self._holders[name]:
            term = own if other == self._place else channel.receive(labels[name, other, self._place])
            total = term.clone() if total is None else total.add_(term)
        assert total is not None
        return total
