"""Habits: what people's loops do beside forward, backward and step. A run and its judge do the same with these.

A habit is a word, some with a step: `freeze@2` freezes the first block after the second step. Knows nothing of potluck.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.differential.models import LOSSES, build

HOOKS = ("hook-half", "hook-late", "hook-mask", "hook-output", "hook-module", "clamp-after")
"""On parameters, on activations, on modules and on the optimizer; all of them linear, or done to what was stepped."""
STARTS = ("init", "scaled", "load")
"""Done to the model after prepare()."""
LOOPS = ("clamp", "clamp-data", "clip-between", "eval", "average", "zero-grad", "halves", "uneven", "pre-clip")
TIMED = ("freeze", "lr", "decay")
"""Once, after a step."""
NONLINEAR = ("hook-clamp", "hook-output-clamp", "hook-sign")
"""Right only where one worker computes the whole batch at once; elsewhere a hook sees a part, as it does under DDP."""
WHOLE = ("turns", "ema")
"""Two optimizers in turns; an average of the weights that the run keeps, and evaluates with."""
HABITS = (*WHOLE, *LOSSES, *HOOKS, *STARTS, *LOOPS, *TIMED, *NONLINEAR)
BOUND = 0.25
KEPT = 0.7
"""Of an average, at each step."""


class Loop:
    """The habits of one loop, with the model and the optimizer that it has."""

    def __init__(self, habits: tuple[str, ...], model: Any, optimizer: Optimizer) -> None:
        self.habits, self.model, self.optimizer = habits, model, optimizer
        self.timed = {int(word.partition("@")[2]): word.partition("@")[0] for word in habits if "@" in word}
        self.average: dict[str, Tensor] = {}
        """That the loop keeps by itself."""
        self.ema: dict[str, Tensor] = {}
        self._has_acted = False

    def begins_after(self, number: int) -> bool:
        """Whether a habit acts for the first time after this step."""
        return number in self.timed or not self._has_acted

    def before_prepare(self) -> None:
        first = self.model.blocks[0]
        for habit in self.habits:
            if habit == "hook-half":
                _hook(first, lambda gradient: 0.5 * gradient)
            elif habit == "hook-clamp":
                _hook(self.model, lambda gradient: gradient.clamp(-0.02, 0.02))
            elif habit == "hook-mask":
                self.model.head.weight.register_post_accumulate_grad_hook(_mask)
            elif habit == "hook-output":
                first.register_forward_hook(_hooked_output(lambda gradient: 0.5 * gradient))
            elif habit == "hook-output-clamp":
                first.register_forward_hook(_hooked_output(lambda gradient: gradient.clamp(-0.002, 0.002)))
            elif habit == "hook-sign":
                first.register_forward_hook(_hooked_output(lambda gradient: torch.tanh(300 * gradient) / 300))
            elif habit == "hook-module":
                first.register_full_backward_hook(_halved)
            elif habit == "clamp-after":
                self.optimizer.register_step_post_hook(_clamp_stepped)
            elif habit == "pre-clip":
                self.optimizer.register_step_pre_hook(_clip_stepped)

    def after_prepare(self, model: Any, make: Callable[[], nn.Module]) -> None:
        """`make`: another model of the same kind."""
        self.model = model
        for habit in self.habits:
            if habit == "hook-late":
                _hook(model.blocks[0], lambda gradient: 0.5 * gradient)
            elif habit == "init":
                nn.init.constant_(model.head.weight, 0.1)
            elif habit == "scaled":
                with torch.no_grad():
                    model.head.weight.mul_(0.5)
            elif habit == "load":
                model.load_state_dict(make().state_dict())
            elif habit == "average":
                self.average = {name: each.detach().clone() for name, each in model.named_parameters()}
            elif habit == "ema":  # of what is trained: frozen weights are evaluated as they are
                self.ema = {
                    name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad
                }

    def before_step(self) -> None:
        """After the last backward of the step."""
        if "clip-between" in self.habits:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)

    def begin_step(self) -> None:
        if "zero-grad" in self.habits:
            self.optimizer.zero_grad()

    @torch.no_grad()
    def after_step(self, number: int, rows: Any) -> None:
        """`number`: of steps done. `rows`: some inputs."""
        if "ema" in self.habits:  # which is a part of the run's step, so what a loop does after it comes later
            self._follow(self.ema)
        for habit in self.habits:
            if habit == "clamp":
                for parameter in self.model.parameters():
                    if not parameter.is_complex():
                        parameter.clamp_(-BOUND, BOUND)
            elif habit == "clamp-data":
                for parameter in self.model.parameters():
                    if not parameter.is_complex():
                        parameter.data.clamp_(-BOUND, BOUND)
            elif habit == "eval":
                self.model.eval()
                self.model(rows)
                self.model.train()
            elif habit == "average":
                self._follow(self.average)
        self._in_time(self.timed.get(number, ""))
        self._has_acted = True

    def _follow(self, average: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, kept in average.items():
            kept.lerp_(parameters[name].detach(), 1 - KEPT)

    def _in_time(self, habit: str) -> None:
        if habit == "freeze":
            self.model.blocks[0].requires_grad_(False)
        elif habit == "lr":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        elif habit == "decay":
            for group in self.optimizer.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.05


def other_model(word: str, dtype: torch.dtype, seed: int) -> nn.Module:
    return build(word, dtype, seed + 1000)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies, of which those that torch has split are put together."""
    joined = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in tensors.items()}
    return {name: each.detach().clone() for name, each in joined.items()}


def _hook(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad and not parameter.is_complex():
            parameter.register_hook(change)


def _mask(parameter: Tensor) -> None:
    """Keeps the first row as it is, as people do with the words that a model knew before."""
    assert parameter.grad is not None
    parameter.grad[0] = 0


def _hooked_output(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(change)

    return hook


def _halved(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(each * 0.5 if each is not None else None for each in before)


@torch.no_grad()
def _clamp_stepped(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.is_complex():
                parameter.clamp_(-BOUND, BOUND)


def _clip_stepped(optimizer: Optimizer, *_: Any) -> None:
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    torch.nn.utils.clip_grad_norm_(every, 0.05)
