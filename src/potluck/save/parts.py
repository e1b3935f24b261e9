"""A rank's own part of a model, as tensors for a file, and back from any files that hold the whole.

What is split is written by its owners, in pieces; what every rank has whole, such as buffers, by the first of them. Of
a model that is not split this is all of it. Optimizer state is described by parameters' names as if nothing were split
(state.py), so any strategy can load it. The whole model's state dict is fetched from those who hold parts of it, piece
by piece: the first rank ends with all of it in host memory, and no other holds more than what it has and one block.
"""

import json
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from potluck.errors import CheckpointError
from potluck.link.link import Alone, Link
from potluck.save import state
from potluck.save.checkpoint_folder import BASE
from potluck.sharding.absent import own_state
from potluck.sharding.optimizer_traits import COUNTERS
from potluck.sharding.ranges import Ranges
from potluck.sharding.runs import FlatRun, Span, group_names
from potluck.sharding.sharded import Sharded, Writer
from potluck.sharding.stored import Piece, Spans, Stored, piece_key
from potluck.tensor_bytes import raw
from potluck.words import plural, size

if TYPE_CHECKING:
    from potluck.replica.frozen_base import FrozenBase
    from potluck.replica.replica import Replica

BLOCK_BYTES = 64 << 20
"""Bytes of the whole model's state that travel at once."""


class WholeModel(Sharded):
    """A model that every rank has whole, as a part that is all of it: nothing is split, and one rank writes."""

    is_split = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """`names`: of the parameters that the optimizer holds, by their ids."""
        self.model, self.optimizer = model, optimizer
        self.runs, self.rest, self.split = [], [], {}
        self.group_names = group_names(optimizer, names)
        self.writer = Writer(0, 1)

    @property
    def state_runs(self) -> list[FlatRun]:
        names = [name for names in self.group_names for name in names]
        if not all(names):
            raise CheckpointError(
                "The optimizer holds a parameter that the model did not have at prepare(), so it cannot be saved. Give"
                " the model and the optimizer all their parameters before prepare()."
            )
        held = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [
            FlatRun(parameter, Span(name, tuple(parameter.shape), 0, parameter.numel()))
            for name, parameter in zip(names, held, strict=True)
        ]


def saved_part(replica: "Replica") -> Sharded:
    """Return this worker's part of a model that is split; where it is not, all of it."""
    return replica.part or replica.sharded or WholeModel(replica.model, replica.optimizer, replica.names)


def is_in_parts(replica: "Replica") -> bool:
    """Whether no worker has all of the model."""
    part = saved_part(replica)
    return part.is_split and not part.keeps_whole


# Out of the model


class Pieces:
    """Tensors for one file, and its notes."""

    def __init__(self, *, copies: bool = True) -> None:
        """`copies`: in host memory; else they are the model's own, wherever they are."""
        self._copies = copies
        self.tensors: dict[str, Tensor] = {}
        self.notes: dict[str, Any] = {}
        self.spans: Spans = {}

    def add(self, name: str, span: Span, numbers: Tensor) -> None:
        """Some numbers of a tensor that is as large as the span's parameter."""
        key = piece_key(name, span.start, span.end)
        self.tensors[key] = self._of(numbers)
        self.spans[key] = (name, span.shape, span.start, span.end)
        self.notes["spans"] = self.spans

    def add_whole(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = self._of(tensor)

    def _of(self, tensor: Tensor) -> Tensor:
        return state.to_host(tensor) if self._copies else tensor


def model_part(sharded: Sharded, *, copies: bool = True, without: Container[str] = ()) -> Pieces:
    """`without`: entries of the model's state_dict that are left out."""
    pieces = Pieces(copies=copies)
    sharded.take_in()
    for run in (*sharded.runs, *sharded.rest):
        if run.span.name in without:
            continue
        pieces.add(run.span.name, run.span, run.parameter.detach().reshape(-1))
    # On every rank: fully_shard's state_dict() also lets go of what is gathered. A rank that kept it, after a forward
    # without a backward, would not gather it again together with the others.
    whole = whole_tensors(sharded)
    if sharded.writer.rank == 0:
        for name, tensor in whole.items():
            if name not in without:
                pieces.add_whole(name, tensor)
        for name, spec in sharded.split.items():
            if 0 in spec.shape and name not in without:  # nobody owns any of it
                pieces.add_whole(name, torch.empty(spec.shape, dtype=spec.dtype))
        tied = sharded.tied().items()
        pieces.notes["tied"] = {name: first for name, first in tied if name not in without}
    return pieces


def optimizer_part(sharded: Sharded) -> Pieces:
    """Any optimizer's state, keyed by the parameters' names. The notes of all ranks together describe the whole."""
    pieces = Pieces()
    saved = sharded.optimizer.state_dict()
    if sharded.writer.rank == 0:
        pieces.notes["class"] = type(sharded.optimizer).__name__
        groups = zip(saved["param_groups"], sharded.group_names, strict=True)
        named = [{**group, "params": names} for group, names in groups]
        pieces.notes["groups"] = state.flatten(named, "groups", pieces.tensors)
    told: dict[str, Any] = {}
    pieces.notes["state"] = told
    place = {id(p): i for i, p in enumerate(p for group in sharded.optimizer.param_groups for p in group["params"])}
    for run in sharded.state_runs:
        known = saved["state"].get(place.get(id(run.parameter)))
        if known is not None and sharded.is_split:
            _add_state(pieces, told, run, known)
        elif known is not None:
            told[run.span.name] = state.flatten(known, run.span.name, pieces.tensors)
    return pieces


def whole_tensors(sharded: Sharded) -> dict[str, Tensor]:
    """Return the tensors of the model's state_dict that each rank has whole."""
    elsewhere = {*sharded.split, *sharded.tied()}
    return {name: tensor for name, tensor in own_state(sharded.model).items() if name not in elsewhere}


def _add_state(pieces: Pieces, told: dict[str, Any], run: FlatRun, known: dict[str, Any]) -> None:
    span, flat = run.span, {key: value for key, value in known.items() if _is_flat(value, run)}
    for key, value in flat.items():
        pieces.add(f"{span.name}/{key}", span, value.reshape(-1))
    if span.start == 0:  # once for each parameter
        rest = {str(key): value for key, value in known.items() if key not in flat}
        of_all = state.flatten(rest, span.name, pieces.tensors)["dict"]
        told[span.name] = {"dict": of_all | {key: {"tensor": f"{span.name}/{key}"} for key in flat}}


def _is_flat(value: Any, run: FlatRun) -> bool:
    """Whether it holds a number for each of the run's."""
    return _is_plain(value) and value.dim() > 0 and value.shape == run.parameter.shape


# All of it, on the first rank


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
    held = model_part(sharded, copies=False)
    own: dict[str, Any] = held.tensors if link.rank < sharded.writer.world else {}
    mine = [_describe(key, tensor, held.spans) for key, tensor in own.items() if _is_plain(tensor)]
    listed: dict[str, Stored] = {}
    keys: dict[str, list[str]] = {}
    for rank, data in enumerate(link.gather_bytes(json.dumps(mine).encode())):
        for key, name, shape, start, end, dtype in json.loads(data):
            listed.setdefault(name, Stored(tuple(shape), dtype)).pieces.append(Piece(start, end, rank, 0))
            keys.setdefault(name, []).append(key)
    others = {key: value for key, value in own.items() if not _is_plain(value)}
    tensors: dict[str, Any] = {key: state.to_host(v) if isinstance(v, Tensor) else v for key, v in others.items()}
    for name, stored in listed.items():
        in_order = Stored(stored.shape, stored.dtype, sorted(stored.pieces, key=lambda piece: piece.start))
        if (gap := in_order.first_gap()) is not None:
            raise CheckpointError(f"No worker holds the numbers {gap[0]:,} to {gap[1]:,} of {name}.")
        dtype = getattr(torch, stored.dtype)
        whole = torch.empty(stored.shape, dtype=dtype) if link.rank == 0 else None
        for piece, key in zip(stored.pieces, keys[name], strict=True):
            place = whole.view(-1)[piece.start : piece.end] if whole is not None else None
            _fetch(link, piece, own[key].reshape(-1) if piece.file == link.rank else None, place, dtype)
        if whole is not None:
            tensors[name] = whole
    if link.rank:
        return {}
    return tensors | {name: tensors[first] for name, first in held.notes.get("tied", {}).items()}


def _is_plain(value: Any) -> bool:
    """Tell whether it is a tensor of numbers; one that codes its numbers in its own way is not, and each rank has all
    of it."""
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def _describe(key: str, tensor: Tensor, spans: Spans) -> list[Any]:
    name, shape, start, end = spans.get(key) or (key, tuple(tensor.shape), 0, tensor.numel())
    return [key, name, list(shape), start, end, str(tensor.dtype).removeprefix("torch.")]


def _fetch(link: Link, piece: Piece, own: Tensor | None, place: Tensor | None, dtype: torch.dtype) -> None:
    """One rank's piece into rank 0's place for it."""
    if piece.file == 0:
        if place is not None and own is not None:
            place.copy_(own)
        return
    count, step = piece.end - piece.start, BLOCK_BYTES // dtype.itemsize
    for start in range(0, count, step):
        end = min(start + step, count)
        link.gather_rows([0.0])  # no rank waits for its turn longer than for one block
        if place is not None:
            link.fetch(raw(place[start:end]), piece.file)
        else:
            block = own[start:end].to("cpu") if own is not None else torch.empty(0)
            link.fetch(raw(block), piece.file)


# Into the model


def check_part(
    sharded: Sharded,
    model: Ranges,
    optimizer: Ranges,
    skeleton: dict[str, Any],
    source: str,
    without: Container[str] = (),
) -> None:
    """Whether it can be loaded. Changes nothing."""
    mine: dict[str, state.Described] = {**own_state(sharded.model), **sharded.split}
    mine |= {name: sharded.split[first] for name, first in sharded.tied().items()}
    mine = {name: each for name, each in mine.items() if name not in without}
    state.check_model(mine, model.specs, source)
    state.check_optimizer(sharded.optimizer, sharded.group_names, skeleton)
    model.check_whole(source)
    optimizer.check_whole(source)


def load_part(
    sharded: Sharded, model: Ranges, optimizer: Ranges, skeleton: dict[str, Any], without: Container[str] = ()
) -> None:
    """Load the part that this rank owns. Where parameters are kept whole, share() then sends them to the others."""
    load_model_part(sharded, model, without)
    load_optimizer_part(sharded, optimizer, skeleton)


@torch.no_grad()
def load_model_part(sharded: Sharded, source: Ranges, without: Container[str] = ()) -> None:
    """Straight into the model's own memory. Where parameters are kept whole, the others' parts are still old."""
    sharded.take_in()  # of what is not loaded
    for run in (*sharded.runs, *sharded.mirrors, *sharded.rest):
        own, span = run.parameter.detach(), run.span
        if span.name not in without and own.is_contiguous():
            source.read_into(own.view(-1), span.name, span.start)
        elif span.name not in without:  # a stage has whole parameters, as they lie in the model: channels_last, too
            own.copy_(source.read(span.name, span.start, span.end).view(own.shape))
    model = sharded.model
    here = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    others: dict[str, Tensor] = {}
    for name, tensor in whole_tensors(sharded).items():
        if name in without:
            continue
        if name in here and here[name].data_ptr() == tensor.data_ptr() and here[name].shape == tensor.shape:
            source.fill(tensor, name)
        else:  # what a module makes up for its state_dict, it knows to take back
            others[name] = source.tensor(name)
    if others:
        type(model).load_state_dict(model, others, strict=False)  # one that is split has another of its own


def load_optimizer_part(sharded: Sharded, source: Ranges, skeleton: dict[str, Any]) -> None:
    optimizer = sharded.optimizer
    empty = {each: known for each, known in optimizer.state.items() if not each.numel()}
    optimizer.state.clear()  # else the old state and the new one would be here together
    own_runs = {id(run.parameter): run for run in (*sharded.state_runs, *sharded.mirrors)}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {id(parameter): i for i, parameter in enumerate(order)}
    settings = state.unflatten(skeleton["groups"], source)
    groups = [
        {**saved, "params": [index[id(parameter)] for parameter in group["params"]]}
        for saved, group in zip(settings, optimizer.param_groups, strict=True)
    ]
    # One of no numbers is in no run, and has no state but what its optimizer began it with.
    runs = ((i, own_runs[id(parameter)]) for i, parameter in enumerate(order) if id(parameter) in own_runs)
    states = {i: _read_state(run, source, skeleton["state"]) for i, run in runs}
    state.load_state(optimizer, groups, {i: each for i, each in states.items() if each})
    optimizer.state.update(empty)


def _read_state(run: FlatRun, source: Ranges, skeleton: dict[str, Any]) -> dict[str, Any]:
    """Read the state of a run; empty for a parameter that no step has used."""
    span = run.span
    state_of_run: dict[str, Any] = {}
    saved = skeleton.get(span.name, {"dict": {}})
    if "dict" not in saved:  # its keys are no names
        return dict(state.unflatten(saved, source))
    for key, entry in saved["dict"].items():
        if _is_range(key, span, entry, source):
            name = entry["tensor"]
            flat = torch.empty(span.size, dtype=source.spec(name).dtype, device=run.parameter.device)
            source.read_into(flat, name, span.start)
            state_of_run[key] = flat.view_as(run.parameter)
        else:
            state_of_run[key] = state.unflatten(entry, source)
    return state_of_run


def _is_range(key: str, span: Span, entry: Any, source: Ranges) -> bool:
    """Whether it is of the parameter's shape, number for number."""
    if not isinstance(entry, dict) or "tensor" not in entry:
        return False
    return source.spec(entry["tensor"]).shape == span.shape and key not in COUNTERS


# The frozen base, which each worker has from elsewhere: checkpoints keep a hash of it


def leave_out(replica: "Replica", link: Link = Alone()) -> tuple[frozenset[str], dict[str, Any]]:
    """The entries of the model's state_dict that are not saved, and what the manifest says of them. A collective of
    those who hold a part of the model. What was changed since it was prepared is no base any more."""
    if replica.base is None:
        return frozenset(), {}
    told = link.gather_bytes(json.dumps(sorted(replica.moved_base())).encode())
    names = replica.base.without({name for data in told for name in json.loads(data)})
    return names, {BASE: replica.base.tell(names)} if names else {}


def check_left_out(
    base: "FrozenBase | None", standing: dict[str, Any], saved: Container[str], source: str
) -> frozenset[str]:
    """Return the names that are not in this checkpoint and are here already, once the two bases are known to be the
    same. Changes nothing."""
    if (saved_base := standing.get(BASE)) is None:
        return frozenset()
    names = frozenset(name for name in base.hashes if name not in saved) if base is not None else frozenset[str]()
    if base is None or base.hash_of(names) != saved_base["hash"]:
        what = f"{plural(saved_base['tensors'], 'tensor')} of {size(saved_base['bytes'])}"
        raise CheckpointError(
            f"{source} was trained on another frozen base than this model's: {what}, of which it holds only the hash."
            " Nothing was loaded. Load the base that the run was begun with, in the same form (type, quantisation), and"
            " freeze it before prepare()."
        )
    return names
