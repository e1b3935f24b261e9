"""Models as a run takes them: described, checked, and compared between workers. What is refused is refused in words.

A model's numbers are its own, and its shapes the same on every worker.
"""

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from potluck.errors import ConfigError
from potluck.link.link import Link
from potluck.replica.buffers import is_expanded
from potluck.sharding.absent import own_state
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import sparse_gradient
from potluck.sharding.united_optimizers import each_of


def describe_model(model: nn.Module, split: Mapping[str, Spec] | None = None) -> str:
    """A hash of every parameter's and buffer's name, shape and type."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    lines = [
        f"{name} {tuple(spec.shape)} {spec.dtype}{' frozen' if name in frozen else ''}"
        for name, spec in state_specs(model, split).items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def state_specs(model: nn.Module, split: Mapping[str, Spec] | None = None) -> dict[str, Spec]:
    """Describe all that a model's state holds. `split`: the dtype of these is known, and they may be gathered in
    another."""
    named = dict(model.named_parameters())
    types = {id(named[name]): spec.dtype for name, spec in (split or {}).items()}
    return {
        name: Spec(tuple(tensor.shape), types.get(id(tensor), tensor.dtype))
        for name, tensor in own_state(model, keep_vars=True).items()
    }


def check_model(model: nn.Module) -> None:
    """Check a whole model: a stage of it may have nothing that is trained."""
    check_own_memory(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("The model has no parameter that requires a gradient, so there is nothing to train.")


def check_no_writes(model: nn.Module) -> None:
    """Refuses layers that write their weight in forward, where several workers hold it or parts of it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'The model'} is an embedding with max_norm, which scales rows of its weight in each forward:"
                " on each worker those of its own rows. Leave max_norm out, and scale what it gives in the model's own"
                " forward(), such as by x * (limit / x.norm(dim=-1, keepdim=True)).clamp(max=1); or train on one worker"
                " with NoShard."
            )


def check_dense(model: nn.Module) -> None:
    """Refuses layers whose gradients are sparse, where those are to be added to others'."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(sparse_gradient(f"{name}.weight".lstrip(".")))


def check_optimizer(optimizer: Optimizer, names: Container[int]) -> None:
    """Refuses an optimizer of another model's parameters, and one that a step cannot step. `names`: ids of ours."""
    if any(id(parameter) not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "The optimizer holds a parameter that is not one of the model's. Make the optimizer from"
            " model.parameters() of the model that you pass here. If it is a loss function's, such as a learned"
            " temperature, pass both: model, criterion = prepare([model, criterion], optimizer, ...)[0]; a bare"
            " nn.Parameter as nn.ParameterList([parameter])."
        )
    if any(isinstance(each, LBFGS) for each in each_of(optimizer)):
        raise ConfigError("LBFGS evaluates the loss many times within one step, which step() cannot do.")


def check_own_memory(model: nn.Module) -> None:
    """Refuses parameters whose elements share memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} has no shape yet: its layer is a lazy one, such as nn.LazyLinear, which takes its shape from"
                " the first batch. Run a batch through the model before prepare()."
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{name} has a shape and no numbers: it is on the device meta. Make it real before prepare(), with"
                " model.to_empty(device=...), and initialise it or load its weights."
            )
    for name, parameter in model.named_parameters():
        if is_expanded(parameter):
            raise ConfigError(
                f"The parameter {name} is expanded: several of its numbers share one place in memory, and no optimizer"
                " can step them. Give it memory of its own with nn.Parameter(tensor.expand(...).clone()), or keep the"
                " small tensor as the parameter and expand it in forward()."
            )


def check_same_model(model: nn.Module, link: Link) -> None:
    """A collective."""
    state = own_state(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    mine = [
        [name, list(tensor.shape), str(tensor.dtype) + (", frozen" if name in frozen else "")]
        for name, tensor in state.items()
    ]
    for rank, theirs in enumerate(map(json.loads, link.gather_bytes(json.dumps(mine).encode()))):
        if theirs != mine:
            first = next((a, b) for a, b in _padded(mine, theirs) if a != b)
            raise ConfigError(
                f"The model differs between workers: on worker {link.rank} it has {_tell(first[0])}"
                f" where worker {rank} has {_tell(first[1])}. Build the same model on every worker."
            )


def _padded(a: list[Any], b: list[Any]) -> list[tuple[Any, Any]]:
    longest = max(len(a), len(b))
    return list(zip(a + [None] * (longest - len(a)), b + [None] * (longest - len(b)), strict=True))


def _tell(entry: list[Any] | None) -> str:
    return f"{entry[0]} {tuple(entry[1])} {entry[2]}" if entry else "nothing more"


def find_batch_norm(model: nn.Module) -> str | None:
    """The name and kind of a layer that cannot be trained by a single value of each channel; none: there is no such."""
    found = (each for each in model.named_modules() if isinstance(each[1], nn.modules.batchnorm._BatchNorm))
    return next((f"{name} ({type(module).__name__})" for name, module in found), None)


@contextmanager
def explain_single_rows() -> Iterator[None]:
    """Turns torch's error about a batch of one row into a sentence that says what to do."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        raise ConfigError(
            f"BatchNorm was to be trained by a single row, of which it can take no mean ({error}). Choose batches and"
            " micro-batches of at least two rows for each worker, and one size that does not leave a single row at the"
            " end of the data; or use LayerNorm or GroupNorm."
        ) from None
