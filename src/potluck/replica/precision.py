"""StepConfig, precision and the other switches of a step: how a model's forward runs, and Masters, float32 behind bf16.

Knows nothing of who keeps the run, nor of how replicas agree.
"""

import functools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.replica.compiling import AnyRows
from potluck.sharding.blocks import find_blocks, is_staged
from potluck.sharding.united_optimizers import each_of
from potluck.stages.forms import map_tensors

Precision = Literal["fp32", "bf16", "fp16"]
HALVES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

HALF = torch.bfloat16
quiet: Any = torch.compiler.disable


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How one step is computed."""

    clip: float | None = None
    """The largest norm that the whole gradient may have; None: no limit."""
    precision: Precision = "fp32"
    """bf16 and fp16 run the model and the loss function under autocast; parameters, gradients and optimizer stay as
    they are. A loop that computes its own loss gets the model's output in float32, unless it uses autocast itself. With
    fp16 the loss is scaled before its backward, and a step that overflows is skipped (agree/loss_scale.py)."""
    compile: bool = False
    """torch.compile for the model's repeated blocks, or for the whole model if it has none."""
    checkpoint_activations: bool = False
    """Keep only the input of each repeated block and compute the rest again in the backward: less memory, more time."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and step there: less of a GPU's memory, more time."""
    nonfinite_limit: int = 10
    """Stop after this many steps in a row whose loss or gradient is not finite."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, not {self.clip}; leave it out for no limit")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, not {self.precision!r}")
        if self.nonfinite_limit < 1:
            raise ValueError(f"nonfinite_limit must be at least 1, not {self.nonfinite_limit}")


def autocast(device: torch.device, config: StepConfig) -> AbstractContextManager[Any]:
    """Goes around the whole loss: matrix products are computed in bf16 or fp16, and losses, norms and the like in
    float32."""
    half = HALVES.get(config.precision)
    return torch.autocast(device.type, half) if half is not None else nullcontext()


def in_float32(loss: Tensor) -> Tensor:
    """A loss that was computed in less, such as by a model of bf16 parameters: its weight has more digits than that."""
    return loss.float() if loss.dtype.itemsize < 4 else loss


def check_precision(model: nn.Module, config: StepConfig) -> None:
    """Gradients have the type of their parameters, and must have room for what they were scaled by."""
    if config.precision != "fp16":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(
                f"{name} is float16. step.precision = fp16 computes in fp16 by autocast, and its steps need parameters"
                " in float32: build the model without .half()."
            )


def switch_on(model: nn.Module, device: torch.device, config: StepConfig) -> None:
    """The switches change how forward runs, in place: the model keeps its class and its parameters' names."""
    check_precision(model, config)
    blocks = find_blocks(model)
    if config.checkpoint_activations:
        if not blocks and not is_staged(model):
            raise ConfigError(
                "checkpoint_activations found no repeated blocks in the model: a ModuleList or Sequential of at least"
                " two modules of one class. Switch it off, or arrange the model's layers so."
            )
        for block in blocks:
            again = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
            _replace_forward(block, again if config.compile else _checkpointed_forward(block))
    if config.precision in HALVES:
        _replace_forward(model, _autocast_forward(model.forward, device, config))
    if config.compile:
        if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            raise ConfigError(
                "step.compile needs a C++ compiler on a CPU, and none is on the PATH. Install g++, or switch it off."
            )
        # Never a whole stage: which of its layers are there is decided as it runs, and a compiler would freeze it.
        for module in blocks or ([] if is_staged(model) else [model]):
            module.compile()
            AnyRows(module)


def _checkpointed_forward(block: nn.Module) -> Callable[..., Any]:
    """In the backward it is computed again with the same tensors, also those that functional_call put there for a
    while. What is compiled has its tensors as inputs, and needs none of this."""
    forward = block.forward
    places = [(each._parameters, name) for each in block.modules() for name in each._parameters]

    def run(held: list[Tensor | None], *args: Any, **kwargs: Any) -> Any:
        now = [parameters[name] for parameters, name in places]
        if all(a is b for a, b in zip(now, held, strict=True)):
            return forward(*args, **kwargs)
        try:
            _put(places, held)
            return forward(*args, **kwargs)
        finally:
            _put(places, now)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        held = [parameters[name] for parameters, name in places]
        return torch.utils.checkpoint.checkpoint(run, held, *args, use_reentrant=False, **kwargs)

    return checkpointed


def _put(places: list[tuple[dict[str, Any], str]], tensors: Sequence[Tensor | None]) -> None:
    for (parameters, name), tensor in zip(places, tensors, strict=True):
        parameters[name] = tensor


def _autocast_forward(forward: Callable[..., Any], device: torch.device, config: StepConfig) -> Callable[..., Any]:
    """For a loop that calls the model by itself: the output is float32, so that the loss is computed in float32.

    Where autocast is on already, around the whole loss, the output is as it would be without us.
    """

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_around = torch.is_autocast_enabled(device.type)
        with autocast(device, config):
            output = forward(*args, **kwargs)
        return output if is_around else map_tensors(_widen, output)

    return run


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES.values() else tensor


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = forward


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
    """Trained bf16 parameters, kept, stepped, sent and saved as float32, and computed with as bf16.

    What an optimizer adds to a weight is mostly less than the last digit that bf16 has of it, so a step in bf16 loses
    most of it. Each such parameter becomes float32 in place: for the optimizer, the names, the host and the checkpoint
    it is one like any other. While a module's forward runs, bf16 copies stand in the places of its parameters and of
    those below it, and autograd leads their gradients back to the masters, where they are added up in float32.
    """

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
def keep_masters(model: nn.Module, optimizer: Optimizer, notice: Callable[[str], None]) -> None:
    """Where a host leads a run whose replicas are whole: what is trained travels as float32. Elsewhere bf16 parameters
    are stepped as they are, as by PyTorch alone."""
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
    notice(
        "What is trained in bf16 is kept, stepped and sent as float32 under a host, and computed with in bf16."
        " What is saved is float32."
    )
