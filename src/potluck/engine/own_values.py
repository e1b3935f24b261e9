"""Values of one's own, from all workers: numbers and tensors as bytes, joined in order of rank, or averaged.

Every worker gets the same bytes and computes the same from them, so that all have the same bits. Nothing is pickled.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from potluck.errors import CheckpointError, ConfigError, PotluckError
from potluck.fleet.coordinator_state import exact_sum
from potluck.save.state import flatten, unflatten

Exchange = Callable[[bytes], list[bytes]]
"""This worker's bytes to those of all workers, in order of rank."""


def broadcast(exchange: Exchange, value: Any, src: int) -> Any:
    """Worker `src`'s value on every worker, of what JSON can hold."""
    return json.loads(exchange(json.dumps(value).encode())[src])


def gather(exchange: Exchange, value: Any) -> Any:
    """Tensors one after the other, numbers as a list."""
    return _join([found for _, found in _tell_all(exchange, "gather", value)], value)


def all_gather(exchange: Exchange, own: Tensor, rank: int, *, counts: bool) -> Tensor:
    """The rows of all workers, with a gradient for our own. `counts`: whether our rows have a part in the step."""
    if not (torch.is_grad_enabled() and isinstance(own, Tensor) and own.dim()):
        raise ConfigError(
            "fleet.all_gather() takes a tensor of rows, with gradients enabled: it is for the loss of a training step."
            " For figures there is fleet.gather()."
        )
    rows = len(own) if counts else 0
    told = gather(exchange, {"rows": rows, "values": own[:rows]})
    every: Tensor = _AllRows.apply(own, told["values"], sum(told["rows"][:rank]), rows)  # type: ignore[no-untyped-call]
    return every


class _AllRows(torch.autograd.Function):
    """Each worker computes the same loss from all rows, and takes the gradient of its own ones. A step weighs that by
    their share of all rows, since it is made for losses that are means over a worker's own; so it is divided by it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, every: Tensor, first: int, rows: int) -> Tensor:
        ctx.shape, ctx.first, ctx.rows, ctx.total = own.shape, first, rows, len(every)
        return every

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        if not ctx.rows:  # they stand in for rows that this worker does not have
            return gradient.new_zeros(ctx.shape), None, None, None
        return gradient[ctx.first : ctx.first + ctx.rows] * (ctx.total / ctx.rows), None, None, None


def mean(exchange: Exchange, value: Any, weight: float) -> Any:
    """Values that weigh nothing are left out, whatever they are; if none are left, it is not a number."""
    weight = float(weight)
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigError(f"fleet.mean() takes a weight of at least 0, not {weight}.")
    return _average([(weighs, found) for weighs, found in _tell_all(exchange, "mean", value, weight) if weighs], value)


def _tell_all(exchange: Exchange, call: str, value: Any, weight: float = 1.0) -> list[tuple[float, Any]]:
    tensors: dict[str, Tensor] = {}
    head = json.dumps([weight, flatten(_plain(value, call), "value", tensors, "")]).encode()
    found = exchange(struct.pack("<I", len(head)) + head + save(tensors))
    values = [_read(data, rank) for rank, data in enumerate(found)]
    first = _form(values[0][1])
    for rank, (_, theirs) in enumerate(values):
        if _form(theirs) != first:
            raise ConfigError(
                f"fleet.{call}() was given {first} on one worker and {_form(theirs)} on another (the first and number"
                f" {rank + 1} of {len(values)}). Give it values of the same kind on every worker."
            )
    return values


def _plain(value: Any, call: str) -> Any:
    match value:
        case Tensor():
            return value.detach()
        case bool() | int() | float():
            return value
        case dict() if value and all(isinstance(name, str) for name in value):
            return {name: _plain(item, call) for name, item in value.items()}
        case _ if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's
            return value.item()
    raise ConfigError(
        f"fleet.{call}() takes a number, a tensor, or a dictionary of them by name, not a {type(value).__name__}."
    )


def _read(data: bytes, rank: int) -> tuple[float, Any]:
    """From outside: a count is checked against the bytes that there are before anything is allocated."""
    try:
        (length,) = struct.unpack_from("<I", data)
        weight, told = json.loads(data[4 : 4 + length])
        return float(weight), unflatten(told, load(data[4 + length :]))
    except (struct.error, ValueError, TypeError, KeyError, SafetensorError, CheckpointError) as error:
        raise PotluckError(f"What worker {rank + 1} gave to all cannot be read: {error}") from None


def _form(value: Any) -> str:
    match value:
        case Tensor():
            return "a tensor"
        case dict():
            return f"{{{', '.join(f'{name}: {_form(item)}' for name, item in sorted(value.items()))}}}"
    return "a number"


def _join(values: Sequence[Any], own: Any) -> Any:
    match own:
        case dict():
            return {name: _join([value[name] for value in values], item) for name, item in own.items()}
        case Tensor():
            rows = [value if value.dim() else value.reshape(1) for value in values]
            some = [value for value in rows if value.numel()] or rows[:1]  # one that has nothing need not know the rest
            kinds = {(tuple(value.shape[1:]), str(value.dtype)) for value in some}
            if len(kinds) > 1:
                told = " and ".join(f"rows of shape {shape} of {dtype}" for shape, dtype in sorted(kinds))
                raise ConfigError(f"fleet.gather() was given {told}; only the first dimension may differ.")
            return torch.cat(some).to(own.device)
    return list(values)


def _average(values: Sequence[tuple[float, Any]], own: Any) -> Any:
    match own:
        case dict():
            return {name: _average([(w, value[name]) for w, value in values], item) for name, item in own.items()}
        case Tensor():
            shapes = sorted({tuple(value.shape) for _, value in values})
            if len(shapes) > 1:
                raise ConfigError(
                    f"fleet.mean() was given tensors of shapes {' and '.join(map(str, shapes))}: they must be alike."
                )
            total = torch.full(own.shape, 0.0 if values else math.nan, dtype=torch.float64)
            for weight, value in values:
                total += weight * value.double()
            dtype = own.dtype if own.dtype.is_floating_point else torch.get_default_dtype()
            return (total / math.fsum(weight for weight, _ in values) if values else total).to(own.device, dtype)
    if not values:
        return math.nan
    return exact_sum(weight * value for weight, value in values) / math.fsum(weight for weight, _ in values)
