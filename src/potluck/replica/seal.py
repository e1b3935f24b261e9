"""Between backward() and step(), a parameter's `.grad` stands for a gradient that is not there yet.

It is this worker's part of a sum that is still under way, weighed by samples; or it has left for the rank that owns it.
Whatever computed with it, such as clip_grad_norm_, would find numbers that mean nothing, and a worker that has no rows
of a step would not even run that line. So it is refused: docs/decisions/0038.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from potluck.errors import ConfigError

SEALED = (
    "A parameter's .grad was used or changed between fleet.backward() and fleet.step(). It is no gradient of the step"
    " there: it is not summed over all workers and micro-batches, or lies with another rank. To clip, leave out"
    " clip_grad_norm_, and ask for it with potluck.init(step=StepConfig(clip=1.0)), or step.clip in a recipe. The norm"
    " of each step is in what fleet.step() returns, as grad_norm."
)


class _Sealed(Tensor):
    """In the place of a gradient, without memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor) -> "_Sealed":
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        assert isinstance(made, _Sealed)
        return made

    @classmethod
    def __torch_dispatch__(cls, *asked: Any, **options: Any) -> NoReturn:
        raise ConfigError(SEALED)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return "a gradient that is not summed yet"


AS_TENSORS = torch._C.DisableTorchFunctionSubclass
"""Parameters that are split have classes that say what a loop may do with them, which takes time for each attribute."""


class Seal:
    """Over the gradients of a model, from each backward until the next one or the step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._places = [(parameter, _Sealed(parameter)) for parameter in parameters]
        self._kept: list[Tensor | None] = []
        """What is under it; empty: it is open."""

    def close(self) -> None:
        if not self._kept:
            with AS_TENSORS():
                self._kept = [parameter.grad for parameter, _ in self._places]
                for parameter, sealed in self._places:
                    parameter.grad = sealed

    def open(self, *, for_step: bool) -> None:
        """`for_step`: else for another backward, before which a model.zero_grad() out of habit does no harm."""
        kept, self._kept = self._kept, []
        for (parameter, sealed), gradient in zip(self._places, kept, strict=False):
            with AS_TENSORS():
                found = parameter.grad
                parameter.grad = gradient
            if found is not sealed and (for_step or found is not None):
                raise ConfigError(SEALED)

    def forget(self) -> None:
        """Drop the gradients under the seal: they are of no use."""
        self._kept = []
        for parameter, sealed in self._places:
            if parameter.grad is sealed:
                parameter.grad = None
