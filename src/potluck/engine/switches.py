"""StepConfig: how one step is computed, and the switches of it that change how a model's forward runs."""

import functools
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from potluck.engine.compiling import AnyRows
from potluck.errors import ConfigError
from potluck.sharding.blocks import find_blocks, is_staged
from potluck.stages.forms import map_tensors

Precision = Literal["fp32", "bf16", "fp16"]
HALVES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
