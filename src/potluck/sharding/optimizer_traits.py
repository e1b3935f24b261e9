"""OptimizerTraits: what is known of each kind of optimizer, in one table. A kind that is added is a row of it.

Of an optimizer that is in no row, what it keeps is known by the names that these have for it, and whether it steps each
parameter by itself is tried (whole_steps.py).
"""

import inspect
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    steps: Literal["numbers", "parameters", "nothing apart"]
    """Tells what the optimizer treats by itself: each number of a parameter, each parameter, or neither."""
    why: str = ""
    """Why neither, as part of a sentence."""
    first: frozenset[str] = frozenset()
    """State that is a mean of gradients."""
    second: frozenset[str] = frozenset()
    """State that a step is divided by: with it, a gradient that is noisier makes a shorter step."""
    counters: frozenset[str] = frozenset()
    """State that it keeps once per parameter. For a parameter of one number it has the shape of all other state."""
    is_coded: bool = False
    """Whether state is coded in blocks, which have no mean."""


def _numbers(first: str = "", second: str = "", counters: str = "step") -> OptimizerTraits:
    sets = [frozenset(names.split()) for names in (first, second, counters)]
    return OptimizerTraits(steps="numbers", first=sets[0], second=sets[1], counters=sets[2])


TRAITS: dict[type[Optimizer] | str, OptimizerTraits] = {
    torch.optim.SGD: _numbers("momentum_buffer", counters=""),
    torch.optim.Adam: _numbers("exp_avg", "exp_avg_sq max_exp_avg_sq"),
    torch.optim.AdamW: _numbers("exp_avg", "exp_avg_sq max_exp_avg_sq"),
    torch.optim.Adagrad: _numbers(second="sum"),
    torch.optim.Adadelta: _numbers(second="square_avg"),
    torch.optim.Adamax: _numbers("exp_avg", "exp_inf"),
    torch.optim.NAdam: _numbers("exp_avg", "exp_avg_sq", "step mu_product"),
    torch.optim.RAdam: _numbers("exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: _numbers("momentum_buffer", "square_avg"),
    torch.optim.Rprop: _numbers(),
    torch.optim.ASGD: _numbers(counters="step eta mu"),
    torch.optim.Adafactor: OptimizerTraits(steps="parameters"),
    torch.optim.Muon: OptimizerTraits(steps="parameters"),
    "schedulefree": _numbers(second="exp_avg_sq"),
    "lion_pytorch.lion_pytorch.Lion": _numbers("exp_avg", counters=""),
    "bitsandbytes": OptimizerTraits(steps="parameters", is_coded=True),
    "torchao": OptimizerTraits(steps="parameters", is_coded=True),
    torch.optim.LBFGS: OptimizerTraits(
        steps="nothing apart", why="it searches along one direction for all parameters together"
    ),
    torch.optim.SparseAdam: OptimizerTraits(steps="nothing apart", why="its gradients are sparse"),
}
"""By class; or by name, since a library that nobody uses is not imported: a package's, or a class's with its module."""
FIRST = frozenset(name for row in TRAITS.values() for name in row.first)
SECOND = frozenset(name for row in TRAITS.values() for name in row.second)
COUNTERS = frozenset(name for row in TRAITS.values() for name in row.counters)
KNOWN = [kind.__name__ for kind, row in TRAITS.items() if isinstance(kind, type) and row.steps != "nothing apart"]
TRAIN_MODE = "train_mode"
"""In the groups of optimizers that train some weights and have others, a mean of them, for evaluation."""


def traits_of(kind: type) -> OptimizerTraits | None:
    """Look up a class, and not those that it is derived from."""
    names = f"{kind.__module__}.{kind.__qualname__}", kind.__module__.partition(".")[0]
    return next((TRAITS[key] for key in (kind, *names) if key in TRAITS), None)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is known to treat each number by itself. A class that is derived from one that does may do anything
    else, unless it only has a constructor of its own."""
    kinds = type(optimizer).__mro__
    base = next((index for index, kind in enumerate(kinds) if traits_of(kind) is not None), None)
    if base is None or traits_of(kinds[base]).steps != "numbers":  # type: ignore[union-attr]
        return False
    known = kinds[base]
    own = [(name, value) for kind in kinds[:base] for name, value in vars(kind).items() if callable(value)]
    # torch puts its hooks around a class's step(), also around one that is inherited.
    return all(
        name == "__init__" or (hasattr(known, name) and inspect.unwrap(value) is inspect.unwrap(getattr(known, name)))
        for name, value in own
    )


def is_known_to_step_whole(optimizer: Optimizer) -> bool:
    """Whether it is known to treat each parameter by itself, and not each number of it."""
    row = traits_of(type(optimizer))
    return row is not None and row.steps == "parameters"


def why_nothing_apart(optimizer: Optimizer) -> str | None:
    """Why it, or a class that it is derived from, is known to treat neither numbers nor parameters by themselves.

    None: that is not known.
    """
    rows = map(traits_of, type(optimizer).__mro__)
    return next((row.why for row in rows if row is not None and row.why), None)


def is_coded(optimizer: Optimizer) -> bool:
    row = traits_of(type(optimizer))
    return row is not None and row.is_coded


def has_eval_weights(optimizer: Optimizer) -> bool:
    """Whether it has other weights for evaluation, as schedule-free ones do. By what it has: there are many copies."""
    return all(TRAIN_MODE in group for group in optimizer.param_groups) and callable(getattr(optimizer, "eval", None))
