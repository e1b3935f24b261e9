"""What a worker holds of a model that is cut into stages: its parameters under the whole model's names.

Saving and loading see it as one of those who hold a model that is split (parts.py), so a checkpoint is the whole
model's, and loads with another cut, or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.shard.ranges import Spec
from potluck.shard.runs import Run, Span, group_names
from potluck.shard.sharded import Sharded
from potluck.train.replica import Replica


@dataclass(frozen=True, slots=True)
class Whole:
    """The model as it was before it was cut."""

    specs: dict[str, Spec]
    """All that its state_dict holds, by first names."""
    tied: dict[str, str]
    """Further names of parameters, and the first name of each."""
    group_names: list[list[str]]
    """Of the optimizer's groups, as they were given."""
    parameters: int


def hold(model: nn.Module, optimizer: Optimizer) -> Whole:
    """Before the model is cut."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {
        name: names[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if names[id(parameter)] != name
    }
    specs = {
        name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items() if name not in tied
    }
    return Whole(specs, tied, group_names(optimizer, names), sum(parameter.numel() for parameter in model.parameters()))


def held_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a part of the model holds of the whole one's state. A parameter has its first name in every part."""
    yield from model.named_parameters()
    saved = set(model.state_dict())
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def narrow(optimizer: Optimizer, own: nn.Module) -> None:
    """The optimizer keeps what this worker has."""
    kept = {id(parameter) for parameter in own.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in kept:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]


def empty(model: nn.Module, own: nn.Module) -> None:
    """What other workers have takes no memory here, even if somebody still has the whole model at hand."""
    kept = {id(parameter) for parameter in own.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)


class Held(nn.Module):
    """Several stages of one worker as one model, whose parameters have the whole model's names."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        object.__setattr__(self, "stages", tuple(stages))
        for stage in stages:
            for name, parameter in stage.named_parameters():
                place, last = self._place(name)
                if last not in place._parameters:
                    place.register_parameter(last, parameter)
            for name, module in stage.named_modules():
                place, _ = self._place(f"{name}." if name else "")
                if module._buffers and not place._buffers:  # the same table: a forward may replace what is in it
                    place._buffers = module._buffers
                    place._non_persistent_buffers_set = module._non_persistent_buffers_set

    def _place(self, name: str) -> tuple[nn.Module, str]:
        *steps, last = name.split(".")
        place: nn.Module = self
        for step in steps:
            if step not in place._modules:
                place.add_module(step, nn.Module())
            child = place._modules[step]
            assert child is not None
            place = child
        return place, last

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Those that compute."""
        yield self
        for stage in self.__dict__["stages"]:
            yield from stage.modules()

    def train(self, mode: bool = True) -> "Held":
        super().train(mode)
        for stage in self.__dict__["stages"]:
            stage.train(mode)
        return self

    def _apply(self, *arguments: Any, **options: Any) -> "Held":
        for stage in self.__dict__["stages"]:
            stage._apply(*arguments, **options)
        return self


@dataclass(frozen=True, slots=True)
class _Writer:
    """Which of those who write the model this one is."""

    rank: int
    world: int
    group: None = None


class BufferRun(Run):
    """A buffer, looked up each time: `self.average = ...` in a forward puts another tensor in its place."""

    def __init__(self, module: nn.Module, key: str, span: Span) -> None:
        self._seat = (module, key)
        self.spans = (span,)

    @property
    def parameter(self) -> Tensor:  # type: ignore[override]
        module, key = self._seat
        buffer = module._buffers[key]
        assert buffer is not None
        if not buffer.is_contiguous():
            buffer = module._buffers[key] = buffer.contiguous()
        return buffer


class HeldPart(Sharded):
    """A worker's stages as its part of a model that is split."""

    def __init__(
        self, replica: Replica, whole: Whole, is_first_of: Mapping[str, bool], *, rank: int, world: int
    ) -> None:
        """`is_first_of`: by name, whether this worker writes it, or another that has it too."""
        self.model, self.optimizer = replica.model, replica.optimizer
        self.collectives = _Writer(rank, world)  # type: ignore[assignment]
        self.split, self.group_names = whole.specs, whole.group_names
        self._tied = whole.tied
        self._inner: Sharded | None = getattr(replica, "sharded", None)
        self.runs, self.mirrors, self.rest = [], [], []
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for run in self._found():
            name = run.spans[0].name
            if not is_first_of[name]:
                self.mirrors.append(run)
            elif id(run.parameter) in stepped:
                self.runs.append(run)
            else:
                self.rest.append(run)
        self.by_name = {run.spans[0].name: run.parameter for run in (*self.runs, *self.mirrors, *self.rest)}

    def _found(self) -> Iterator[Run]:
        if self._inner is not None:
            yield from (*self._inner.runs, *self._inner.rest)
        split = self._inner.split if self._inner is not None else {}
        for name, tensor in held_in(self.model):
            if tensor.numel() and name not in split:
                span = Span(name, tuple(tensor.shape), 0, tensor.numel())
                path, _, key = name.rpartition(".")
                if isinstance(tensor, nn.Parameter):
                    yield Run(tensor, (span,))
                else:
                    yield BufferRun(self.model.get_submodule(path), key, span)

    def tied(self) -> dict[str, str]:
        return self._tied

    def share(self) -> None:
        if self._inner is not None:
            self._inner.share()

    def settle(self) -> None:
        if self._inner is not None:
            self._inner.settle()
