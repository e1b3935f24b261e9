"""Masters: a trained bf16 parameter is kept, stepped, sent and saved as float32, and computed with as bf16.

What an optimizer adds to a weight is mostly less than the last digit that bf16 has of it, so a step in bf16 loses most
of it. Each such parameter becomes float32 in place: for the optimizer, the names, the host and the checkpoint it is one
like any other. While a module's forward runs, bf16 copies stand in the places of its parameters and of those below it,
and autograd leads their gradients back to the masters, where they are added up in float32.

Knows nothing of who keeps the run, nor of how replicas agree.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.engine.run_state import RunState
from potluck.sharding.united_optimizers import each_of

HALF = torch.bfloat16
quiet: Any = torch.compiler.disable


class MasterPlace(NamedTuple):
    """Where a module has a master."""

    module: nn.Module
    name: str
    master: nn.Parameter


class Entered:
    """A module whose forward runs, and which was called by no other one that has copies for it."""

    def __init__(self, module: nn.Module, places: list[MasterPlace], caller: FrameType | None) -> None:
        self.module, self.places = module, places
        self.caller = caller
        """Where it was called; None: within what is compiled."""
        self.within = set(module.modules())
        self.depth = 1
        """How often its forward runs now: it may call itself."""


class Masters:
    def __init__(self, model: nn.Module, masters: list[nn.Parameter]) -> None:
        """`masters`: parameters of the model, which are float32 already."""
        self._masters = set(masters)
        self._entered: list[Entered] = []
        for module in model.modules():
            if next(self._places(module), None) is not None:  # methods, which a copy of the model has its own of
                module.register_forward_pre_hook(self._enter, prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    def _places(self, module: nn.Module) -> Iterator[MasterPlace]:
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter in self._masters:
                    yield MasterPlace(each, name, parameter)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._begin(module, sys._getframe(1))
        elif not self._entered:  # else a compiled block has its copies from the model around it
            quiet(self._begin)(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._end(module)
        elif self._entered and self._entered[-1].module is module:
            quiet(self._end)(module)

    def _begin(self, module: nn.Module, caller: FrameType | None = None) -> None:
        while self._entered and module is self._entered[-1].module and not _is_running(self._entered[-1].caller):
            self._entered[-1].depth = 1  # Ctrl-C in the middle of a forward, after which torch calls no hooks
            self._end(module)
        around = self._entered[-1] if self._entered else None
        if around is not None and module in around.within:
            around.depth += module is around.module
            return
        entered = Entered(module, list(self._places(module)), caller)
        self._entered.append(entered)
        copies: dict[int, Tensor] = {}  # one for all places of a tied weight, which adds up its gradients as plain bf16
        for place in entered.places:
            copy = copies.setdefault(id(place.master), place.master.to(HALF))
            place.module._parameters[place.name] = copy  # type: ignore[assignment]
        _refresh(entered)

    def _end(self, module: nn.Module) -> None:
        around = self._entered[-1] if self._entered else None
        if around is None or module is not around.module:
            return
        around.depth -= 1
        if around.depth == 0:
            self._entered.pop()
            for place in around.places:
                place.module._parameters[place.name] = place.master
            _refresh(around)


def _is_running(frame: FrameType | None) -> bool:
    """Whether what runs now was called from there."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return frame is None or at is not None


def _refresh(entered: Entered) -> None:
    """Recurrent layers have a list of their weights beside them."""
    for each in {place.module for place in entered.places}:
        if isinstance(each, nn.RNNBase):
            each._flat_weights = [each._parameters.get(name) for name in each._flat_weights_names]


@torch.no_grad()
def keep_masters(run: RunState, model: nn.Module, optimizer: Optimizer) -> None:
    """Where a host leads a run whose replicas are whole: what is trained travels as float32. Elsewhere bf16 parameters
    are stepped as they are, as by PyTorch alone."""
    if not run.wanted.has_host or run.composition.split is not None:
        return
    halves = [each for each in model.parameters() if each.requires_grad and each.dtype == HALF]
    if not halves:
        return
    for parameter in halves:
        parameter.grad = None
        parameter.data = parameter.data.float()
        for each in each_of(optimizer):
            for key, value in each.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dtype == HALF:
                    each.state[parameter][key] = value.float()
    Masters(model, halves)
    run.notice(
        "What is trained in bf16 is kept, stepped and sent as float32 under a host, and computed with in bf16."
        " What is saved is float32."
    )
