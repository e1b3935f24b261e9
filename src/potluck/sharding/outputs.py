"""Finds the tensors that a block leaves behind for its backward: those in its output, whatever holds them.

A split block is gathered again when the gradient of something that it gave arrives. So each of these tensors gets a
hook. torch looks for them in tuples, lists, dicts and, in newer versions, dataclasses; models return any object.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_leaves, tree_map

from potluck.batch_shapes import rebuilt

PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
MOST_OBJECTS = 10_000
"""The most objects that are looked into: one that leads to all of a program is as good as closed."""
NOT_OURS = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def tensors_of(value: Any) -> tuple[list[Tensor], bool]:
    """List the tensors in containers and in attributes of objects, however deep; and whether there may be others, as in
    a function or an iterator, where nobody can look."""
    tensors: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    hides, left = False, deque([value])
    while left:
        one = left.popleft()
        if isinstance(one, Tensor):
            tensors[id(one)] = one
        elif not isinstance(one, PLAIN) and id(one) not in seen:
            seen[id(one)] = one
            parts = None if isinstance(one, nn.Module) or len(seen) > MOST_OBJECTS else _parts(one)
            hides |= parts is None
            left.extend(parts or ())
    return list(tensors.values()), hides


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors that a block is given, those of a dataclass too, where torch does not look."""

    def cast(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.to(dtype) if one.is_floating_point() else one
        if not is_dataclass(one) or isinstance(one, type | Mapping):
            return one
        return rebuilt(one, lambda part: cast_floats(part, dtype))

    return tree_map(cast, value)


def kept_by(block: nn.Module) -> list[Tensor]:
    """List the tensors that a block's forward has put on its modules beside its output, such as a part of the loss."""
    values: list[Any] = []
    for module in block.modules():
        for name, value in vars(module).items():
            if name not in NOT_OURS:
                near = list(value.values()) if isinstance(value, dict) else value
                values += near if isinstance(near, list | tuple) else [near]
    return [each for each in values if isinstance(each, Tensor)]


def later(tensors: Iterable[Tensor], began: int) -> list[Tensor]:
    """Select the tensors that were computed since autograd's count of operations was `began`."""
    return [each for each in tensors if each.grad_fn is not None and each.grad_fn._sequence_nr() >= began]


def hook_fully_sharded(module: nn.Module, state: Any, groups: Sequence[FSDPParamGroup]) -> None:
    """Makes a unit of fully_shard whole in the backward of whatever it gives: by hooks on tensors that torch does not
    find, and from its forward on where nobody can find them."""
    began = 0
    own_register, own_posts = state._register_pre_backward_hook, [group.post_forward for group in groups]
    own_pres = [group.pre_forward for group in groups]

    def pre_forward(number: int, *args: Any) -> Any:
        nonlocal began
        began = torch._C._autograd._get_sequence_nr()
        given, dtype = own_pres[number](*args), groups[number].mp_policy.param_dtype
        return given if dtype is None else cast_floats(given, dtype)

    def post_forward(number: int, *args: Any) -> Any:
        group, after = groups[number], groups[number].post_forward_mesh_info
        if (
            after is None
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1
            or not tensors_of(args[-1])[1]
        ):
            return own_posts[number](*args)
        group.post_forward_mesh_info = None
        output = own_posts[number](*args)
        group.post_forward_mesh_info, group._training_state = after, TrainingState.FORWARD
        return output

    def register(output: Any) -> Any:
        registered = own_register(output)
        if torch.is_grad_enabled():
            known = {id(each) for each in tree_leaves(output)}
            for each in later((*tensors_of(output)[0], *kept_by(module)), began):
                if each.requires_grad and id(each) not in known:
                    each.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
        return registered

    state._register_pre_backward_hook = register
    for number, group in enumerate(groups):
        group.pre_forward, group.post_forward = partial(pre_forward, number), partial(post_forward, number)  # type: ignore[method-assign]


def _parts(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return [*value.values(), *vars(value).values()] if hasattr(value, "__dict__") else list(value.values())
    if isinstance(value, tuple | list | set | frozenset | deque):
        return [*value, *getattr(value, "__dict__", {}).values()]
    slots = list(_slots(type(value)))
    if callable(value) or not (slots or hasattr(value, "__dict__")):
        return None
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        yield from [names] if isinstance(names, str) else names
