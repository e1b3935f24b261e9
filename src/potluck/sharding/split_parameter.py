"""SplitParameter: a parameter of fully_shard between forwards, which can be computed with but not differentiated.

Beside absent.py, since DTensor takes long to load, and only fully_shard needs it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from potluck.errors import ConfigError
from potluck.sharding.absent import name_of, name_parameter, outside, refuse_hook


class SplitParameter(DTensor):
    """The class of fully_shard's parameters between forwards: this rank's part, as a DTensor.

    DTensor computes with it right, but for what is differentiated: no rank would sum such a gradient with the others'.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook or func is Tensor.register_post_accumulate_grad_hook:
            refuse_hook(args[0])
        if func in RANDOM:
            raise ConfigError(outside(_first(args, kwargs)))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            result = error
        if result is not None and _is_computed(result):
            raise ConfigError(outside(_first(args, kwargs)))
        return _for_apply(func, args[0], result) if func in CONVERSIONS else result


RANDOM = {
    *(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.random_),
    *(nn.init.normal_, nn.init.trunc_normal_, nn.init.uniform_, nn.init.orthogonal_, nn.init.sparse_),
    *(nn.init.kaiming_normal_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.xavier_uniform_),
}
"""Functions that draw other numbers for a part than for the whole."""
CONVERSIONS = {
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.cpu,
    Tensor.cuda,
    Tensor.detach,
}


def _first(args: Any, kwargs: Any) -> Tensor:
    return next(each for each in tree_leaves((args, kwargs or {})) if isinstance(each, SplitParameter))


def _for_apply(func: Any, parameter: Tensor, result: Tensor) -> Tensor:
    """Let model.to() keep a model where it is: it makes a parameter of each result, which takes a tensor whose detach()
    is of its class. Any other detach() is torch's own, which others can load."""
    is_again = func is Tensor.detach
    if (is_again and not hasattr(parameter, "_for_apply")) or (
        not is_again and (result is not parameter or torch.is_grad_enabled())
    ):
        return result
    with torch._C.DisableTorchFunctionSubclass():
        result = result if is_again else result.detach()
    mark_split(result, name_of(parameter))
    if not is_again:
        result._for_apply = True  # type: ignore[attr-defined]
    return result


def _is_computed(found: Any) -> bool:
    """Whether a gradient would come back through it, which nobody sums over the ranks."""
    if isinstance(found, Tensor):
        return found.grad_fn is not None
    return isinstance(found, RuntimeError) or (
        isinstance(found, tuple | list) and any(isinstance(each, Tensor) and each.grad_fn is not None for each in found)
    )


def mark_split(parameter: Tensor, name: str) -> None:
    name_parameter(parameter, name)
    parameter.__class__ = SplitParameter
