"""The whole model's state dict on one worker, whatever the model is split over: fetched block by block, on the CPU.

The first rank ends with the whole in host memory. No other holds more than what it has, and one block beside it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from potluck.errors import CheckpointError
from potluck.link.link import Link
from potluck.save import parts, state
from potluck.save.saves import saved_part
from potluck.sharding.sharded import Sharded
from potluck.sharding.stored import Piece, Stored
from potluck.tensor_bytes import raw

if TYPE_CHECKING:
    from potluck.engine.replica import Replica

BLOCK_BYTES = 64 << 20


def is_in_parts(replica: "Replica") -> bool:
    """Whether no worker has all of the model."""
    part = saved_part(replica)
    return part.is_split and not part.keeps_whole


def whole_state(link: Link, replica: "Replica", names: Sequence[str]) -> dict[str, Any]:
    """Return the whole state on rank 0, under `names` and in their order; empty on all others. All ranks call this
    alike, and where each has the whole model, none talks to another."""
    if is_in_parts(replica):
        tensors = _fetch_all(link, saved_part(replica))
    else:
        tensors = state.model_state(replica.model) if link.rank == 0 else {}
    order = [*(name for name in names if name in tensors), *(name for name in tensors if name not in names)]
    return {name: tensors[name] for name in order}


def _fetch_all(link: Link, sharded: Sharded) -> dict[str, Any]:
    # Also on ranks that hold what others hold too: see model_part.
    held = parts.model_part(sharded, copies=False)
    own = held.tensors if link.rank < sharded.writer.world else {}
    spans, tied = held.spans, held.notes.get("tied", {})
    mine = [_describe(key, tensor, spans) for key, tensor in own.items() if _has_bytes(tensor)]
    pieces: dict[str, list[tuple[int, str]]] = {}
    listed: dict[str, Stored] = {}
    for rank, data in enumerate(link.gather_bytes(json.dumps(mine).encode())):
        for key, name, shape, start, end, dtype in json.loads(data):
            stored = listed.setdefault(name, Stored(tuple(shape), dtype))
            stored.pieces.append(Piece(start, end, rank, 0))
            pieces.setdefault(name, []).append((rank, key))
    others = {key: value for key, value in own.items() if not _has_bytes(value)}
    tensors: dict[str, Any] = {key: state.to_host(v) if isinstance(v, Tensor) else v for key, v in others.items()}
    for name, stored in listed.items():
        _check_whole(name, stored)
        whole = _room_for(stored) if link.rank == 0 else None
        for piece, (rank, key) in zip(list(stored.pieces), pieces[name], strict=True):
            place = whole.view(-1)[piece.start : piece.end] if whole is not None else None
            _fetch(link, rank, own[key].reshape(-1) if rank == link.rank else None, place, piece, stored)
        if whole is not None:
            tensors[name] = whole
    if link.rank:
        return {}
    return tensors | {name: tensors[first] for name, first in tied.items()}


def _has_bytes(value: Any) -> bool:
    """Not so one that codes its numbers in its own way: each rank has all of it."""
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def _describe(key: str, tensor: Tensor, spans: dict[str, Any]) -> list[Any]:
    name, shape, start, end = spans.get(key) or (key, tuple(tensor.shape), 0, tensor.numel())
    return [key, name, list(shape), start, end, str(tensor.dtype).removeprefix("torch.")]


def _check_whole(name: str, stored: Stored) -> None:
    pieces = sorted(stored.pieces, key=lambda piece: piece.start)
    if (gap := Stored(stored.shape, stored.dtype, pieces).first_gap()) is not None:
        raise CheckpointError(f"No worker holds the numbers {gap[0]:,} to {gap[1]:,} of {name}.")


def _room_for(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))


def _fetch(link: Link, rank: int, own: Tensor | None, place: Tensor | None, piece: Piece, stored: Stored) -> None:
    """One rank's piece into rank 0's place for it."""
    if rank == 0:
        if place is not None and own is not None:
            place.copy_(own)
        return
    for start, end in _blocks(piece.end - piece.start, getattr(torch, stored.dtype).itemsize):
        link.gather_rows([0.0])  # no rank waits for its turn longer than for one block
        if place is not None:
            link.fetch(raw(place[start:end]), rank)
        else:
            block = own[start:end].to("cpu") if own is not None else torch.empty(0)
            link.fetch(raw(block), rank)


def _blocks(count: int, width: int) -> Iterator[tuple[int, int]]:
    step = BLOCK_BYTES // width
    return ((start, min(start + step, count)) for start in range(0, count, step))
