"""Layers that a model's own forward runs within torch.utils.checkpoint.

A stage enters and leaves in the middle of such a call: at work the layer has other arguments than the call knows, and
random numbers of its own, so that the call could not compute it again. Therefore the layer is checkpointed by itself,
and the call around it keeps nothing of it.
"""

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from potluck.errors import ConfigError

_hooks = torch._C._autograd

OWN_GRADIENTS = (
    "Cut into stages, a gradient that it takes by itself, with torch.autograd.grad, reaches what the last stage has,"
    " and no further. Train such a model whole: without stages, or split by ShardGradOp."
)
THROUGH_LAYERS = f"The loss function takes a gradient through several layers. {OWN_GRADIENTS}"


def checkpointed(layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the layer; within a checkpoint of the model's own, as one of its own."""
    outer = _around()
    if outer is None:
        return layer(*args, **kwargs)
    _hooks._pop_saved_tensors_default_hooks()  # what the layer keeps is not the outer one's
    try:
        return checkpoint(functools.partial(layer, **kwargs), *args, use_reentrant=False)
    finally:
        _hooks._push_saved_tensors_default_hooks(*outer)


def _around() -> Any:
    """The hooks of the checkpoint that runs."""
    outer = _hooks._top_saved_tensors_default_hooks(True) if torch.is_grad_enabled() else None
    return outer if outer is not None and outer[0].__qualname__.startswith("_checkpoint_hook.") else None


def close_checkpoints(error: BaseException) -> None:
    """End each checkpoint that this error has left in the middle. Its hooks on saved tensors go with its generator,
    which a frame of the traceback holds, for as long as a collector of garbage likes: until then they would keep, and
    later compute again, whatever this process does next."""
    traceback.clear_frames(error.__traceback__)


def check_keeps_buffers(name: str) -> None:
    """Refuses a layer that has changed its buffers within a checkpoint: computed again, it changes them once more."""
    if _around() is not None:
        raise ConfigError(
            f"Layer {name} runs within torch.utils.checkpoint and changes its buffers, such as a BatchNorm's running"
            " statistics. They change once more when it is computed again, which in stages comes after the forwards of"
            " other micro-batches, and so would not be those of one process. Run this layer without checkpoint()."
        )


def check_not_for_gradient() -> None:
    """Refuse a layer that runs again before the loss is there: a gradient that the loss function takes asks for it."""
    if _is_recomputing():
        raise ConfigError(THROUGH_LAYERS)


def _is_recomputing() -> bool:
    """Whether a checkpoint computes again what it did not keep."""
    hooks = _hooks._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook.")


def check_not_again(name: str) -> None:
    """Refuses to compute a layer again for operations around it, which are in the same checkpoint."""
    if _is_recomputing():
        raise ConfigError(
            f"Layer {name} runs within torch.utils.checkpoint together with operations that follow it, and cut into"
            " stages it cannot be computed again for those. Checkpoint the layer alone, as in checkpoint(block, x,"
            " use_reentrant=False), or take checkpoint() out and switch on StepConfig(checkpoint_activations=True)."
        )


def check_not_reentrant(name: str) -> None:
    """Refuses a layer within the older kind of checkpoint, in which there is no graph that says what uses what."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint" and frame.f_code.co_name == "forward":
            raise ConfigError(
                f"Layer {name} runs within torch.utils.checkpoint with use_reentrant=True, which hides its gradients"
                " from what is around it. To be cut into stages, use use_reentrant=False, or take checkpoint() out"
                " and switch on StepConfig(checkpoint_activations=True)."
            )
