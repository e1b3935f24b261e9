"""Moments: what an optimizer keeps of each parameter, as numbers that replicas can average. Knows nothing of windows.

Replicas that average their parameters alone keep moments of their own noise; Sync has one of each, of all rows. What a
replica has no state of yet counts as zeros, and is begun with the mean.
"""

import copy
import inspect
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.coded_numbers import Coding
from potluck.fleet.description import COUNTS, DIVISORS, MOMENTS, OTHER_MOMENTS, Part, coding_of_block
from potluck.link.link import Link, Pending
from potluck.replica.buckets import Allocate, split_like
from potluck.sharding.optimizer_traits import COUNTERS, FIRST, SECOND, is_coded
from potluck.sharding.runs import FlatRun
from potluck.sharding.united_optimizers import each_of


def look_at_state(optimizer: Optimizer, shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """Return the state that an optimizer keeps of a parameter once it has stepped it: a copy of it steps a small one of
    this shape."""
    group = optimizer.param_groups[0]
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    probe = nn.Parameter(torch.zeros(shape, device=device))
    probe.grad = torch.ones_like(probe)
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [probe]}]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with torch.enable_grad():
        try:
            twin.step()
        except KeyError:  # its constructor begins the state, as Adagrad's does in older versions of torch
            takes = inspect.signature(type(optimizer)).parameters  # not all that torch adds to the defaults itself
            own = {key: value for key, value in optimizer.defaults.items() if key in takes}
            twin = type(optimizer)([probe], **own)
            twin.step()
    return dict(twin.state[probe])


def can_average(optimizer: Optimizer) -> bool:
    """Whether it keeps the same of every parameter, a number for each of its numbers, or one for all that is counted.

    Adafactor does not: of a matrix it keeps rows and columns. What fails of itself, as Muon does with vectors, says
    nothing of the others.
    """
    if any(map(is_coded, each_of(optimizer))):
        return False
    keys_of_states = []
    for each, shape in itertools.product(each_of(optimizer), ((2,), (2, 3))):
        try:
            state = look_at_state(each, shape)
        except Exception:
            continue
        kept = {key: value for key, value in state.items() if key not in COUNTERS}
        if not all(isinstance(value, Tensor) and value.shape == shape for value in kept.values()):
            return False
        keys_of_states.append(state.keys())
    return bool(keys_of_states) and all(keys == keys_of_states[0] for keys in keys_of_states)


def are_averaged(
    wanted: bool, optimizer: Optimizer, notice: Callable[[str], None], *, steps_whole: bool = False
) -> bool:
    """Whether they are, where that is wanted; a person hears if they cannot be. `steps_whole`: what is kept of some
    parameters lies with one rank of those that split them."""
    if not wanted:
        return False
    have_mean = can_average(optimizer)
    if have_mean and not steps_whole:
        return True
    why = "lies with one of the ranks that split it" if have_mean else "has no mean"
    notice(f"What {type(optimizer).__name__} keeps of a parameter {why}, so policy.moments has no effect here.")
    return False


class Moments:
    """Holds the optimizer's state of some parameters in flat tensors: one for each thing that is kept, and one for what
    is counted."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[int, str],
        groups: Sequence[Sequence[FlatRun]],
        allocate: Allocate | None = None,
    ) -> None:
        """`names`: by the id of what the optimizer steps, which may be a copy. `groups`: each becomes a flat tensor."""
        self._optimizer = optimizer
        self._like = look_at_state(each_of(optimizer)[0])
        self._keys = sorted(self._like.keys() - COUNTERS)
        self._counters = sorted(key for key in self._like.keys() & COUNTERS)
        stepped = {names[id(each)]: each for group in optimizer.param_groups for each in group["params"]}
        self._parameters = [
            [(stepped.get(names.get(id(run.parameter), ""), run.parameter), run.parameter) for run in runs]
            for runs in groups
        ]
        self.are_divided_by = not SECOND.isdisjoint(self._like)
        """Whether a gradient that is noisier makes a shorter step."""
        self.flats = [_flat(each, allocate) for each in self._parameters for _ in self._keys]
        self.counts = torch.zeros((1 + len(self._counters)) * sum(map(len, self._parameters)), dtype=torch.float64)
        """Of each parameter: the weight of those who have a state of it, and what they count."""

    @property
    def _state(self) -> Any:
        """Loading a state gives an optimizer another."""
        return self._optimizer.state

    @property
    def blocks(self) -> list[int]:
        """The kind of each thing that is kept of a number, as the first block of a description that carries it."""
        return [MOMENTS if key in FIRST else DIVISORS if key in SECOND else OTHER_MOMENTS for key in self._keys]

    def _pieces(self) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """Each parameter, what is kept of it, and where that lies in a flat tensor."""
        flats = iter(self.flats)
        for parameters in self._parameters:
            own = [each for _, each in parameters]
            for key in self._keys:
                for (stepped, _), piece in zip(parameters, split_like(next(flats), own), strict=True):
                    yield stepped, key, piece

    def start(self, link: Link, weight: float, coding: Coding | None = None) -> list[Pending]:
        """Begins to add them up over a link, by weights that add up to 1. Then take().

        `coding`: how means of gradients travel; what steps are divided by has its own coding beside, and all else does
        as bf16.
        """
        self.fill(weight)
        counts = link.start_sum(self.counts)
        if coding is None:
            return [counts, *map(link.start_sum, self.flats)]
        codings = [coding_of_block(block, coding) for block in self.blocks] * len(self._parameters)
        return [counts, *map(link.start_coded_sum, self.flats, codings)]

    @torch.no_grad()
    def fill(self, weight: float) -> None:
        """With this replica's, by its weight."""
        for parameter, key, piece in self._pieces():
            kept = self._state.get(parameter, {}).get(key)
            if kept is None or not weight:
                piece.zero_()
            else:
                piece.copy_(kept.view_as(piece)).mul_(weight)
        self.counts.copy_(weight * torch.tensor(self._count(), dtype=torch.float64).reshape(-1))

    def _count(self) -> list[list[float]]:
        """One row for each parameter of `counts`."""
        return [self._counts_of(parameter) for parameter in self._stepped()]

    def _counts_of(self, parameter: nn.Parameter) -> list[float]:
        kept = self._state.get(parameter, {})
        return [float(bool(kept)), *(float(kept.get(key, 0.0)) for key in self._counters)]

    def _counted(self) -> Iterator[tuple[nn.Parameter, list[float]]]:
        """Yield what is stepped, each with its row."""
        return zip(self._stepped(), self.counts.view(-1, 1 + len(self._counters)).tolist(), strict=True)

    @torch.no_grad()
    def take(self) -> None:
        """Take what now lies in the flat tensors: it is every replica's."""
        counted: dict[int, dict[str, float]] = {}
        for parameter, (having, *counts) in self._counted():
            if having:
                means = (count / having for count in counts)
                counted[id(parameter)] = dict(zip(self._counters, means, strict=True))
        begun: dict[int, dict[str, Any]] = {}
        for parameter, key, piece in self._pieces():
            kept = self._state.get(parameter)
            if key in SECOND:  # a codec that rounds may have made a small one negative, and steps divide by its root
                (torch.view_as_real(piece) if piece.is_complex() else piece).clamp_(min=0.0)
            if kept:
                kept[key].view_as(piece).copy_(piece)
            elif id(parameter) in counted:
                own = torch.empty_like(parameter.detach()).copy_(piece.view_as(parameter))  # it lies as that does
                begun.setdefault(id(parameter), {})[key] = own
        for parameter in self._stepped():
            kept = self._state.get(parameter) or begun.get(id(parameter), {})
            for key, value in counted.get(id(parameter), {}).items():
                kept[key] = _like(kept.get(key, self._like[key]), _rounded(value) if key == "step" else value)
            if kept:
                self._state[parameter] = kept

    def _stepped(self) -> Iterator[nn.Parameter]:
        return (stepped for parameters in self._parameters for stepped, _ in parameters)


class HostMoments(Moments):
    """Moments in the parts in which they travel to a host.

    One part for each of the parameters' parts and each thing that is kept of a number, and one for what is counted once
    for a parameter. Values travel, by samples; their mean is every worker's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[int, str],
        groups: Sequence[Sequence[Sequence[FlatRun]]],
        within: Link,
        allocate: Allocate,
    ) -> None:
        """`groups`: of each part, and each parameter in it, what this rank holds. `within`: the ranks that hold the
        rest of it."""
        super().__init__(optimizer, names, [[run for own in group for run in own] for group in groups], allocate)
        stepped = self._stepped()
        self._owners = [[next(stepped) for _ in runs] for group in groups for runs in group]
        """Of each parameter, what the optimizer steps of it here."""
        self._within = within
        self.counts = torch.zeros((1 + len(self._counters)) * len(self._owners), dtype=torch.float64)
        self._sent = torch.zeros(len(self.counts))

    def describe(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """`parts`: the parameters'."""
        each = [(first, part.sizes) for part in parts for first in self.blocks]
        of_numbers = tuple(Part(first + number, None, sizes) for number, (first, sizes) in enumerate(each))
        return (*of_numbers, Part(None, COUNTS, (len(self.counts),)))

    def send(self, weight: float, start: Callable[[int, Tensor], None]) -> None:
        """`start(number, numbers)`: of each part, in order."""
        self.fill(weight)
        self._sent.copy_(self.counts)
        for number, numbers in enumerate([*self.flats, self._sent]):
            start(number, numbers)

    def receive(self, means: Sequence[Tensor]) -> None:
        """The mean of each part becomes what this worker keeps."""
        for flat, mean in zip(self.flats, means, strict=False):
            flat.copy_(mean[: len(flat)])
        self.counts.copy_(means[len(self.flats)])
        self.take()

    def _count(self) -> list[list[float]]:
        """Count the steps of each parameter, on any rank that holds some of it."""
        nothing = [0.0] * (1 + len(self._counters))
        rows = [
            [max(column) for column in zip(nothing, *map(self._counts_of, own), strict=True)] for own in self._owners
        ]
        told = self._within.gather_rows([number for row in rows for number in row])
        found = [max(column) for column in zip(*told, strict=True)]
        return [found[at : at + len(nothing)] for at in range(0, len(found), len(nothing))]

    def _counted(self) -> Iterator[tuple[nn.Parameter, list[float]]]:
        rows = self.counts.view(-1, 1 + len(self._counters)).tolist()
        return ((each, row) for own, row in zip(self._owners, rows, strict=True) for each in own)


def _flat(parameters: Sequence[tuple[nn.Parameter, nn.Parameter]], allocate: Allocate | None) -> Tensor:
    first = parameters[0][1]
    if allocate is not None:
        return allocate(sum(own.numel() for _, own in parameters), first)
    dtype = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
    return torch.zeros(sum(own.numel() for _, own in parameters), dtype=dtype, device=first.device)


def _rounded(mean: float) -> float:
    """Rounds a mean of steps. Ranks that hold parts of one parameter may add up in another order: the last digit of a
    sum, which is that order's, must not decide where a half goes."""
    return round(round(mean, 4))


def _like(kept: Any, value: float) -> Any:
    return kept.clone().fill_(value) if isinstance(kept, Tensor) else type(kept)(value)
