"""Lays flat the part of a model that one rank owns; every way to split a model uses these classes.

A Run is what the optimizer takes for a parameter: the numbers of one, or of a part of it. It has a state of its own,
and its own count of steps, so one that a step has not used is left alone as in plain PyTorch.
Saving, averaging and handing over need nothing else than a rank's runs and the optimizer's state of each.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from potluck.devices import wide
from potluck.errors import ConfigError
from potluck.sharding.optimizer_traits import COUNTERS, is_elementwise

SMALLEST = 1e-37
"""Smallest scale that float32 holds with all of its digits, as it does its inverse."""
_MARK = "_sharded_by"
"""Attribute of a parameter: what has split it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers of one parameter, as it would lie flat."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Exclusive."""

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(eq=False, slots=True)
class FlatRun:
    parameter: nn.Parameter
    """[the span's size], or of one whole parameter's shape; its memory is the model's own."""
    span: Span


def stays_whole(parameter: nn.Parameter) -> bool:
    """Whether every rank keeps all of it: a frozen one of a class of its own, which codes its numbers in its own way
    and cannot be cut, such as a quantised weight."""
    return not parameter.requires_grad and type(parameter) is not nn.Parameter


def sees_nothing(hook: Callable[..., None]) -> Callable[..., None]:
    """Marks a step_pre_hook of ours, which neither reads nor changes what is stepped."""
    hook.sees_nothing = True  # type: ignore[attr-defined]
    return hook


def has_own_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody else's step_pre_hook may read or change gradients before a step."""
    return any(not hasattr(hook, "sees_nothing") for hook in optimizer._optimizer_step_pre_hooks.values())


def _reads_gradients(optimizer: Optimizer) -> bool:
    """Whether it has to find gradients as they are to be applied, and not with a factor beside them."""
    return has_own_hooks(optimizer) or not is_elementwise(optimizer)


def can_skip(optimizer: Optimizer) -> bool:
    """Whether it can leave out a step by what stands in a tensor on the GPU, so that nobody has to look there first."""
    if _reads_gradients(optimizer):
        return False
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") and all(_is_small_on_gpu(p) for p in group["params"]) and _has_begun(optimizer, group)
        for group in optimizer.param_groups
    )


def _is_small_on_gpu(parameter: Tensor) -> bool:
    """Tell whether it is on a GPU and not in float64: the kernels' factor has 32 bits."""
    return parameter.is_cuda and parameter.dtype != torch.float64


def _has_begun(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """If SGD's first step is left out, its momentum stays what happened to be in memory."""
    return not group.get("momentum") or all(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is not None for parameter in group["params"]
    )


def step_unless(optimizer: Optimizer, is_bad: Tensor, factor: Tensor) -> None:
    """A step on the gradients times `factor`, but none if `is_bad`, which can_skip() says that it understands."""
    optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
    optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


@contextmanager
def laid_out(optimizer: Optimizer) -> Iterator[None]:
    """Within this context gradients lie in memory as their parameters do: fused kernels go through both alike. Workers
    add them up in the order of their elements, since one may have a model in channels_last and another not."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if not each.is_contiguous()]
    others = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.stride() != p.stride()]
    for parameter, gradient in others:
        parameter.grad = torch.empty_like(parameter.detach()).copy_(gradient)
    try:
        yield
    finally:
        for parameter, gradient in others:
            parameter.grad = gradient


@contextmanager
def scaling(optimizer: Optimizer, gradients: Sequence[Tensor], scale: float) -> Iterator[None]:
    """Step on the gradients times `scale` within this context; a fused optimizer does that in the same pass over
    them."""
    if scale == 1.0 or not gradients:
        yield
    elif _scales_by_itself(optimizer, gradients, scale):
        optimizer.grad_scale = torch.tensor(1 / scale, dtype=torch.float32)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_(list(gradients), scale)
        yield


def _scales_by_itself(optimizer: Optimizer, gradients: Sequence[Tensor], scale: float) -> bool:
    """Tell whether the optimizer scales by itself: it takes the scale in 32 bits, which is too few for gradients of
    64."""
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and not _reads_gradients(optimizer)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not any(gradient.dtype == torch.float64 for gradient in gradients)
        and SMALLEST < scale < 1 / SMALLEST
    )


def sparse_gradient(name: str) -> str:
    return (
        f"The gradient of {name} is sparse, and sparse gradients cannot be averaged between workers. Make its layer"
        " with sparse=False."
    )


def twice_in_one_backward(name: str) -> str:
    return (
        f"{name} got a gradient twice in one backward, as reentrant activation checkpointing does. Use"
        " use_reentrant=False."
    )


def claim(parameters: Mapping[str, nn.Parameter], owner: object) -> None:
    """Claim parameters for one optimizer alone: two that split one parameter would each step it."""
    for name, parameter in parameters.items():
        other = getattr(parameter, _MARK, None)
        if other is not None and other() is not None:
            raise ConfigError(
                f"Two optimizers hold {name}. Give each parameter to one of them, or use groups of one optimizer."
            )
    for parameter in parameters.values():
        setattr(parameter, _MARK, weakref.ref(owner))


def homes(optimizer: Optimizer) -> dict[int, int]:
    """Map each parameter's id to the number of its group."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def check_holds_some(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Check that the optimizer holds any of these that are trained, if there are any: of a stage, all may be frozen."""
    trained, home = [each for each in parameters if each.requires_grad], homes(optimizer)
    if trained and home and not any(id(each) in home for each in trained):
        raise ConfigError("The optimizer holds no parameter of the model that requires a gradient.")


def first_names(model: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the first one that it has in the model: another, where it is tied."""
    first: dict[int, str] = {}
    return {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of each group's parameters, in its order. `names`: by a parameter's id."""
    return [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]


def run_of(flat: Tensor, gradient: Tensor | None, at: int, span: Span) -> FlatRun:
    """Make a run of the numbers that begin at `at` in memory which holds several runs. Without `gradient` it is not
    stepped."""
    parameter = nn.Parameter(flat[at : at + span.size], requires_grad=gradient is not None)
    if gradient is not None:
        parameter.grad = gradient[at : at + span.size]
    return FlatRun(parameter, span)


def repoint(optimizer: Optimizer, runs: Sequence[tuple[int, FlatRun]], whole: Mapping[str, nn.Parameter]) -> None:
    """The optimizer's groups hold these runs instead of whole parameters. What it knows of those is kept, by spans."""
    before = dict(optimizer.state)
    optimizer.state.clear()
    groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for number, run in runs:
        groups[number].append(run.parameter)
        span = run.span
        if whole[span.name] in before:
            known = _part_of(run, whole[span.name], before[whole[span.name]])
            optimizer.state[run.parameter] = state_at(run.parameter.device, known, optimizer.param_groups[number])
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]  # gradients are not its own


def _part_of(run: FlatRun, whole: nn.Parameter, known: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a whole parameter's state that a run holds; what is not of the parameter's shape, all of it."""
    span = run.span
    part: dict[str, Any] = {}
    for key, value in known.items():
        if isinstance(value, Tensor) and value.shape == whole.shape and key not in COUNTERS:
            part[key] = value.reshape(-1)[span.start : span.end].clone().view_as(run.parameter)
        else:
            part[key] = value.clone() if isinstance(value, Tensor) else value
    return part


def state_at(device: torch.device, known: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Move a parameter's optimizer state to a device. Its counters stay in host memory, unless kernels count."""
    counts_there = group.get("fused") or group.get("capturable")
    return {
        key: value.to(device) if isinstance(value, Tensor) and (counts_there or key not in COUNTERS) else value
        for key, value in known.items()
    }


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors of numbers that make up one which codes its own, as torchao's do; else the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


def dense_gradient(parameter: nn.Parameter) -> Tensor:
    """A gradient's numbers: of a sparse one, those that it holds."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
        return parameter.grad._values()
    return parameter.grad


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy there; pinned, if it is to travel to a GPU and back."""
    copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


ROOM = (1e-15, 1e18)
"""Between these, squares of float32 neither overflow nor vanish, however many are added up."""
AT_ONCE = 1 << 22
"""Numbers that are in float64 at a time."""


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """In host memory. As torch.nn.utils.get_total_norm has it, at the same cost; and finite where every number is.

    Above 1.8e19 torch's own, and so clip_grad_norm_, is inf in float32, and a gradient of which each number is finite
    would count as one that is not. Of float64 it is what torch says: inf where squares have no room in float64.
    """
    norm = torch.nn.utils.get_total_norm(tensors).cpu()  # read off a GPU once: all who ask want it here
    if not tensors or ROOM[0] < norm.item() < ROOM[1]:
        return norm
    return torch.tensor(_norm_in_float64(tensors), dtype=torch.float64)


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, to the bit as total_norm() has it before it combines them."""
    is_foreach = tensors[0].is_cuda
    found = torch._foreach_norm(list(tensors)) if is_foreach else [torch.linalg.vector_norm(t) for t in tensors]
    return torch.stack(list(found))


def _norm_in_float64(tensors: Sequence[Tensor]) -> float:
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    pieces = [piece for tensor in real for piece in torch.split(tensor.detach().reshape(-1), AT_ONCE)]
    return math.sqrt(sum(float(wide(piece).square().sum()) for piece in pieces))
