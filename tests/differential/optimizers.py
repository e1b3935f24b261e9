"""Optimizers and schedulers from a word: torch's, and ones of one's own. Knows nothing of potluck."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

OPTIMIZERS = (
    "SGD(lr=0.1)",
    "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)",
    "SGD(lr=0.05, momentum=0.9, nesterov=True)",
    "Adam(lr=0.01)",
    "Adam(lr=0.01, amsgrad=True)",
    "AdamW(lr=0.01, weight_decay=0.1)",
    "AdamW(lr=0.01, fused=True)",
    "AdamW(lr=0.01, maximize=True)",
    "Adagrad(lr=0.05)",
    "Adadelta(lr=1.0)",
    "Adamax(lr=0.01)",
    "NAdam(lr=0.01)",
    "RAdam(lr=0.01)",
    "RMSprop(lr=0.003, momentum=0.5)",
    "ASGD(lr=0.05)",
    "Adafactor(lr=0.01)",
)
ODD_OPTIMIZERS = (
    "SGD(lr=0.05, momentum=0.9, dampening=0.5)",
    "SGD(lr=0.1, foreach=True)",
    "AdamW(lr=0.01, foreach=True, amsgrad=True)",
    "Adam(lr=torch.tensor(0.01, dtype=torch.float64), foreach=False)",
    "RMSprop(lr=0.003, centered=True)",
    "Rprop(lr=0.01)",
    "NAdam(lr=0.01, decoupled_weight_decay=True, weight_decay=0.1)",
    "Adagrad(lr=0.05, lr_decay=0.1)",
    "Signs(lr=0.01)",
    "Centred(lr=0.05, momentum=0.9)",
    "Layered(lr=0.5)",
    "Lookahead(lr=0.01)",
    "Halved(lr=0.05)",
)
"""The last ones are of one's own: as Lion; as SGD with centred gradients; as LARS; as AdamW with slow weights."""
SCHEDULERS = ("StepLR(step_size=2, gamma=0.5)", "CosineAnnealingLR(T_max=5)", "LinearLR(total_iters=4)")
"""Stepped once per step. Where replicas step by themselves each follows it at its own pace, which is not judged."""
ODD_SCHEDULERS = (
    "OneCycleLR(max_lr=0.05, total_steps=40, cycle_momentum=False)",
    "CyclicLR(base_lr=0.001, max_lr=0.05, step_size_up=3, cycle_momentum=False)",
    "CosineAnnealingWarmRestarts(T_0=3)",
    "ExponentialLR(gamma=0.8)",
    "MultiStepLR(milestones=[1, 3])",
    "PolynomialLR(total_iters=6)",
    "ConstantLR(factor=0.5, total_iters=2)",
    "LambdaLR(lr_lambda=lambda step: 1 / (1 + step))",
    "MultiplicativeLR(lr_lambda=lambda step: 0.9)",
    "Warmed()",
    "Chained()",
)
STEADY = ("SGD(lr=0.1)", "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)", "Adam(lr=0.01, eps=0.01)")
"""Of which the last digit of a gradient stays the last digit of a weight: for float32."""
SHARP = ("Adafactor", "Adagrad", "Rprop")
"""Of which the last digit of a gradient that should be 0 is a step."""


class Signs(Optimizer):
    """Steps by signs, as Lion does; here smoothly, so that a last digit does not decide."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                mixed = state["mean"].lerp(parameter.grad, 0.1)
                parameter.mul_(1 - 0.01 * group["lr"]).sub_(group["lr"] * _soft_sign(mixed))
                state["mean"].lerp_(parameter.grad, 0.01)


class Centred(SGD):
    """A subclass of a known one, with another step: each row's gradient has a mean of 0."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() > 1 and parameter.numel():
                    parameter.grad -= parameter.grad.mean(tuple(range(1, parameter.dim())), keepdim=True)
        return super().step(closure)


class Layered(Optimizer):
    """Each parameter's step is as long as its own norm says, as LARS and LAMB have it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    trust = 0.1 * (1 + parameter.norm()) / (1 + parameter.grad.norm())
                    parameter.sub_(group["lr"] * trust * parameter.grad)


class Lookahead(AdamW):
    """A subclass that keeps more of each parameter than its parent does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None:
                    continue
                slow = state.setdefault("slow", parameter.detach().clone())
                slow.lerp_(parameter, 0.3)
                parameter.lerp_(slow, 0.1)
        return result


class Halved(SGD):
    """A subclass that changes only its settings."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr / 2, momentum=0.5)


def _soft_sign(numbers: Tensor) -> Tensor:
    return torch.tanh(100 * numbers)


STEPPED_WHOLE = (Signs, Centred, Layered, Lookahead)
"""Of which nobody can know whether they step each number by itself."""
OWN: dict[str, Any] = {kind.__name__: kind for kind in (*STEPPED_WHOLE, Halved)}


def parameters_of(model: nn.Module, lr: float) -> list[Any]:
    """What an optimizer is given: all parameters, or two groups of them, of which one learns at half the rate."""
    if "groups" not in model.traits:
        return list(model.parameters())
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": lr / 2}]


def make_optimizer(model: nn.Module, word: str) -> Optimizer:
    """`word`: AdamW(lr=0.01, weight_decay=0.1)"""
    name, settings = _read(word)
    return _kind(name)(parameters_of(model, settings["lr"]), **settings)  # type: ignore[no-any-return]


def make_two(model: nn.Module, word: str) -> list[Optimizer]:
    """One of the layers and one of all else, which take turns."""
    name, settings = _read(word)
    layers = list(model.blocks.parameters())
    known = {id(each) for each in layers}
    rest = [each for each in model.parameters() if id(each) not in known]
    return [_kind(name)(part, **settings) for part in (layers, rest)]


def _kind(name: str) -> Any:
    return OWN.get(name) or getattr(torch.optim, name)


def make_scheduler(optimizer: Optimizer, word: str) -> LRScheduler | None:
    if not word:
        return None
    known = torch.optim.lr_scheduler
    if word == "Warmed()":
        parts = [known.LinearLR(optimizer, total_iters=2), known.CosineAnnealingLR(optimizer, T_max=4)]
        return known.SequentialLR(optimizer, parts, milestones=[2])
    if word == "Chained()":
        return known.ChainedScheduler(
            [known.ConstantLR(optimizer, factor=0.5, total_iters=2), known.ExponentialLR(optimizer, gamma=0.9)]
        )
    name, settings = _read(word)
    return getattr(known, name)(optimizer, **settings)  # type: ignore[no-any-return]


def _read(word: str) -> tuple[str, dict[str, Any]]:
    name, _, options = word.removesuffix(")").partition("(")
    return name, eval(f"dict({options})")
