"""WholeSteps: parameters whose optimizer looks at many of their numbers at once, each stepped whole by one rank.

Muon makes a whole matrix orthogonal, Adafactor keeps means of its rows, 8-bit optimizers code blocks of it, and of most
others nobody knows more than that they step each parameter by itself. So each such parameter has one owner among the
ranks that hold it between them. Before a step all send the owner what they have of it and of its gradient; it steps all
that it owns, by the optimizer as it is; and all take their parts back. What the optimizer keeps of it is the owner's,
so that is split over the ranks too, parameter by parameter.

Whether an optimizer that Potluck does not know steps each parameter by itself is found by trying, on small copies. One
that looks at all of them at once, as for a norm over the whole model, would find only those that its rank has.
"""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.sharding.collectives import Collectives
from potluck.sharding.optimizer_traits import KNOWN, is_elementwise, is_known_to_step_whole, why_nothing_apart
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import FlatRun, Span, has_own_hooks
from potluck.sharding.united_optimizers import each_of

TRIALS = 3
"""Steps of a trial: what is kept from one step to the next counts from the second on."""
LARGEST = 4
"""Largest size of each dimension of a copy."""
OUR_OWN = {"step", "zero_grad", "add_param_group"}
"""Methods that prepare() has put over those of the class."""
COMMON = {"defaults", "param_groups", "state"}
Probes = list[list[nn.Parameter]]
"""Small parameters, by group."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Parameters of one dtype that one rank owns: they travel end to end."""

    owner: int
    names: list[str]
    starts: dict[str, int]
    size: int
    dtype: torch.dtype


class WholeSteps:
    def __init__(self, specs: Mapping[str, Spec], runs: Sequence[FlatRun], over: Collectives, device: torch.device):
        """`specs`: of the parameters that are stepped so, alike on all ranks. `runs`: what this rank has of them."""
        self._over = Collectives(over.group)  # which codes nothing
        self._device = next((run.parameter.device for run in runs), device)
        self._runs: dict[str, list[FlatRun]] = {name: [] for name in specs}
        for run in runs:
            self._runs[run.span.name].append(run)
        self._bundles = _share_out(specs, self._over.world)
        self.owned: list[FlatRun] = []
        """Whole parameters, of which there are numbers only while they are stepped."""
        for bundle in self._bundles:
            for name in bundle.names if bundle.owner == self._over.rank else ():
                shape = specs[name].shape
                parameter = nn.Parameter(_hollow(shape, bundle.dtype, self._device))
                self.owned.append(FlatRun(parameter, Span(name, shape, 0, math.prod(shape))))
        self._whole = {run.span.name: run.parameter for run in self.owned}
        self._flats: dict[int, Tensor] = {}

    @torch.no_grad()
    def gather(self) -> None:
        """Gather gradients before the optimizer's step. A parameter for which no rank has one is left alone."""
        has_gradient = self._look()
        for index, bundle in enumerate(self._bundles):
            gradients = self._collect(bundle, is_gradient=True)
            numbers = self._collect(bundle, is_gradient=False)
            if bundle.owner != self._over.rank:
                continue
            self._flats[index] = numbers
            for name in bundle.names:
                whole = self._whole[name]
                place = slice(bundle.starts[name], bundle.starts[name] + whole.numel())
                whole.data = numbers[place].view(whole.shape)
                whole.grad = gradients[place].view(whole.shape) if has_gradient[name] else None

    @torch.no_grad()
    def scatter(self) -> None:
        """Take back each rank's part after the optimizer's step."""
        for index, bundle in enumerate(self._bundles):
            numbers = self._flats.pop(index, None)
            if numbers is None:
                numbers = torch.empty(bundle.size, dtype=bundle.dtype, device=self._device)
            self._over.start_broadcast(numbers, bundle.owner).wait()
            for run, place in self._places(bundle):
                run.parameter.detach().view(-1).copy_(numbers[place])
        for whole in self._whole.values():
            whole.data, whole.grad = _hollow(tuple(whole.shape), whole.dtype, self._device), None

    def _look(self) -> dict[str, bool]:
        """Whether any rank has a gradient, by name."""
        found = [any(run.parameter.grad is not None for run in runs) for runs in self._runs.values()]
        told = torch.tensor(found, dtype=torch.int32)
        self._over.start_sum(told).wait()
        return dict(zip(self._runs, told.bool().tolist(), strict=True))

    def _collect(self, bundle: _Bundle, *, is_gradient: bool) -> Tensor:
        """Collect all ranks' parts on their owner: each number is one rank's, and the others add zeros."""
        flat = torch.zeros(bundle.size, dtype=bundle.dtype, device=self._device)
        for run, place in self._places(bundle):
            numbers = run.parameter.grad if is_gradient else run.parameter.detach()
            if numbers is not None:
                flat[place] = numbers.view(-1)
        self._over.start_reduce(flat, bundle.owner).wait()
        return flat

    def _places(self, bundle: _Bundle) -> list[tuple[FlatRun, slice]]:
        return [
            (run, slice(bundle.starts[name] + run.span.start, bundle.starts[name] + run.span.end))
            for name in bundle.names
            for run in self._runs[name]
        ]


def check_can_split(optimizer: Optimizer) -> None:
    """Refuses an optimizer that is neither elementwise nor treats each parameter by itself."""
    for each in each_of(optimizer):
        name = type(each).__name__
        if any(group.get("differentiable") for group in each.param_groups):
            raise ConfigError(f"{name} with differentiable=True cannot be sharded.")
        why = why_nothing_apart(each) or _why_not(each)
        if why is not None:
            raise ConfigError(
                f"{name} cannot be sharded over ranges of the flattened parameters, nor parameter by parameter:"
                f" {why}. Use one of {', '.join(KNOWN)}, another that steps each parameter by itself, or NoShard"
                " without stages."
            )


def check_can_cut(optimizer: Optimizer) -> None:
    """Refuses an optimizer that looks at several parameters at once, of which stages have some each."""
    for each in each_of(optimizer):
        why = None if isinstance(each, torch.optim.SparseAdam) else _why_not(each)
        if why is not None:
            raise ConfigError(
                f"{type(each).__name__} cannot step a model that is cut into stages, where each worker has some of the"
                f" parameters: {why}. Use one that steps each parameter by itself, or train without stages."
            )


def _why_not(optimizer: Optimizer) -> str | None:
    if is_elementwise(optimizer) or is_known_to_step_whole(optimizer):
        return None
    why = _why_not_one_by_one(optimizer)
    return why and f"Potluck does not know that it treats each parameter by itself: {why}"


def check_hooks(optimizer: Optimizer) -> None:
    """Refuse hooks on an optimizer whose parameters are on several ranks."""
    if any(map(has_own_hooks, (optimizer, *each_of(optimizer)))):
        raise ConfigError(
            f"{type(optimizer).__name__} has a step_pre_hook, which would see this rank's part of the gradient"
            " alone, where its parameters are on several ranks: a norm would be each rank's own. To clip by norm, use"
            " StepConfig(clip=...). For anything else, derive a class from the optimizer and do it in its step(),"
            " which then has whole parameters; or use NoShard, without stages."
        )


def names_stepped_whole(optimizer: Optimizer, group_names: Sequence[Sequence[str]]) -> set[str]:
    """Name the parameters that it treats each by itself, and not each number of them. After check_can_split().
    `group_names`: of the parameters in each of its groups."""
    names = iter(group_names)
    stepped: set[str] = set()
    for each in each_of(optimizer):
        own = [name for _ in each.param_groups for name in next(names)]
        stepped |= set() if is_elementwise(each) else set(own)
    return stepped


def _hollow(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a shape without memory for it."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _share_out(specs: Mapping[str, Spec], world: int) -> list[_Bundle]:
    """The largest first, each to the one who has least."""
    loads, owners = [0] * world, {}
    for name in sorted(specs, key=lambda name: (-math.prod(specs[name].shape), name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += math.prod(specs[name].shape)
    grouped: dict[tuple[int, torch.dtype], list[str]] = {}
    for name, spec in specs.items():
        grouped.setdefault((owners[name], spec.dtype), []).append(name)
    bundles = []
    for (owner, dtype), names in sorted(grouped.items(), key=lambda pair: (pair[0][0], str(pair[0][1]))):
        starts, at = {}, 0
        for name in names:
            starts[name], at = at, at + math.prod(specs[name].shape)
        bundles.append(_Bundle(owner, names, starts, at, dtype))
    return bundles


# Trying


def _why_not_one_by_one(optimizer: Optimizer) -> str | None:
    """Part of a sentence; None: on small copies, each parameter came out the same whoever else was there."""
    for name, value in vars(optimizer).items():
        if name not in COMMON and any(isinstance(each, Tensor | nn.Module | Optimizer) for each in _inside(value)):
            return f"it has tensors, modules or optimizers in self.{name}, outside of its groups and its state"
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            together = _try(optimizer, _probes(optimizer))
            _try(optimizer, [[] for _ in optimizer.param_groups])  # some rank may have no parameter of it at all
            for group, members in enumerate(together):
                for index, whole in enumerate(members):
                    alone = _probes(optimizer)
                    alone = [[each[index]] if number == group else [] for number, each in enumerate(alone)]
                    if not torch.allclose(_try(optimizer, alone)[group][0], whole, rtol=1e-4, atol=1e-7):
                        return "what it does to a parameter depends on the other parameters, or on chance"
    except Exception as error:
        return f"a trial on small copies of its parameters ended with {type(error).__name__}: {error}"
    return None


def _inside(value: Any, depth: int = 2) -> Iterator[Any]:
    yield value
    if depth and isinstance(value, list | tuple | set | Mapping):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _inside(each, depth - 1)


def _probes(optimizer: Optimizer) -> Probes:
    """Make two small parameters for each group, with as many dimensions as its first and its last. Their gradients are
    large, so that anything that limits a norm shows."""
    draw = torch.Generator().manual_seed(0)
    probes: Probes = []
    for group in optimizer.param_groups:
        probes.append([])
        for like in (group["params"][0], group["params"][-1]) if group["params"] else ():
            shape = tuple(min(LARGEST, size) for size in like.shape)
            dtype = like.dtype if like.is_floating_point() else torch.float32
            probe = nn.Parameter(torch.randn(shape, generator=draw).to(like.device, dtype))
            probe.grad = (100 * torch.randn(shape, generator=draw)).to(like.device, dtype)
            probes[-1].append(probe)
    return probes


def _try(optimizer: Optimizer, probes: Probes) -> Probes:
    """Steps these parameters with a twin of the optimizer, which knows nothing yet."""
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in OUR_OWN | COMMON:
            twin.__dict__[name] = copy.copy(value)
    twin.defaults, twin.state = optimizer.defaults, defaultdict(dict)
    twin.param_groups = [
        {**group, "params": members} | ({"lr": _rate(group["lr"])} if "lr" in group else {})
        for group, members in zip(optimizer.param_groups, probes, strict=True)
    ]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    torch.manual_seed(0)
    for _ in range(TRIALS):
        twin.step()
    return probes


def _rate(rate: Any) -> Any:
    """A warm-up begins with 0, at which nothing would be seen to happen."""
    return torch.full_like(rate, 0.1) if isinstance(rate, Tensor) else 0.1
