"""Whether an optimizer that Potluck does not know steps each parameter by itself: found by trying, on small copies.

Such an optimizer may be split over ranks, each of which steps some parameters whole (whole_steps.py). One that looks at
all of them at once, as for a norm over the whole model, would find only those that its rank has.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

TRIALS = 3
"""Steps of a trial: what is kept from one step to the next counts from the second on."""
LARGEST = 4
"""Largest size of each dimension of a copy."""
OUR_OWN = {"step", "zero_grad", "add_param_group"}
"""Methods that prepare() has put over those of the class."""
COMMON = {"defaults", "param_groups", "state"}
Probes = list[list[nn.Parameter]]
"""Small parameters, by group."""


def why_not_one_by_one(optimizer: Optimizer) -> str | None:
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
