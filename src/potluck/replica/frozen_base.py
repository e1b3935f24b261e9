"""FrozenBase: what was frozen when a model was prepared, such as the model below an adapter. Each worker has its own.

It neither travels nor is saved: workers compare its hash, and a checkpoint keeps that. What is smaller than what is
trained is no base: it is saved with the rest, as are buffers, and parameters that are frozen later on.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from potluck.errors import ConfigError
from potluck.link.link import Link
from potluck.replica.weight_hash import digest, quick_digest
from potluck.sharding.absent import own_state
from potluck.sharding.runs import FlatRun, first_names, plain_tensors


@dataclass(frozen=True, slots=True)
class FrozenBase:
    hashes: Mapping[str, str]
    """Hash of each entry of the model's state_dict that is part of it, by name."""
    owners: Mapping[str, str]
    """By the same names: the parameter that the entry is, by its first name; or that it belongs to, as what a quantised
    weight is scaled by."""
    sizes: Mapping[str, int]
    """By the same names, in bytes."""
    is_plain: bool
    """Whether its tensors could travel: those of a class of their own cannot."""

    def hash_of(self, names: Collection[str]) -> str:
        """Hash these entries together."""
        chosen = [[name, self.hashes[name]] for name in sorted(names)]
        return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:32]

    @property
    def hash(self) -> str:
        return self.hash_of(self.hashes)

    def without(self, moved: Collection[str]) -> frozenset[str]:
        """Its entries, but for those of some parameters."""
        return frozenset(name for name, owner in self.owners.items() if owner not in moved)

    def tell(self, names: Collection[str]) -> dict[str, str | int]:
        """Return what a checkpoint says of what it leaves out."""
        size = sum(self.sizes[name] for name in names)
        return {"hash": self.hash_of(names), "tensors": len(names), "bytes": size}


def glance_at(base: FrozenBase, held: Mapping[str, Sequence[FlatRun]]) -> dict[str, Tensor]:
    """Sums of what a rank holds of the base, by a parameter's name: they change with any bit of it."""
    return {
        name: quick_digest(part for run in runs for part in plain_tensors(run.parameter.detach()))
        for name, runs in held.items()
        if name in base.hashes
    }


def find_base(model: nn.Module) -> FrozenBase | None:
    """Find the frozen base as it is now, before the model is placed, split or cut."""
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    state, owners = own_state(model), _owners(model)
    parts = {name: list(plain_tensors(state[name])) for name in owners}
    sizes = {name: sum(part.nbytes for part in each) for name, each in parts.items()}
    is_plain = not any(is_traceable_wrapper_subclass(state[name]) for name in owners)
    known = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    once = [name for name in sizes if name in known or name not in every]  # what is tied is there once
    if not owners or (is_plain and sum(sizes[name] for name in once) <= trained):
        return None
    hashes = {name: _hash(state[name], each) for name, each in parts.items()}
    return FrozenBase(hashes, owners, sizes, is_plain)


def agree_on_base(link: Link, base: FrozenBase | None, notice: Callable[[str], None]) -> FrozenBase | None:
    """Return the base if it is the same on every worker; None where they differ, and so have to be told each other's. A
    collective."""
    if link.world == 1:
        return base
    told = link.gather_bytes((base.hash if base is not None else "").encode())
    if len({*told}) == 1:
        return base
    hashes = [json.loads(data) for data in link.gather_bytes(json.dumps(_hashes(base)).encode())]
    other = next(rank for rank, theirs in enumerate(hashes) if theirs != hashes[0])
    name = next((n for n in hashes[0] if hashes[0][n] != hashes[other].get(n)), "")
    where = f"The frozen parameters differ between worker 0 and worker {other}, first in {name or 'their names'}."
    if base is not None and not base.is_plain:
        raise ConfigError(f"{where} They cannot be sent: load the same base, in the same form, on every worker.")
    notice(f"{where} All take worker 0's, and checkpoints hold them. Load the same base on every worker to avoid both.")
    return None


def _hashes(base: FrozenBase | None) -> dict[str, str]:
    return dict(base.hashes) if base is not None else {}


def _hash(whole: Tensor, parts: list[Tensor]) -> str:
    forms = [f"{tuple(each.shape)} {each.dtype}" for each in (whole, *parts)]
    return hashlib.sha256("\n".join([*forms, digest(parts)]).encode()).hexdigest()[:16]


def _owners(model: nn.Module) -> dict[str, str]:
    """Map each entry of the state_dict that is frozen to the first name of its parameter."""
    first, parameters = first_names(model), dict(model.named_parameters(remove_duplicate=False))
    owners = {name: first[name] for name, parameter in parameters.items() if not parameter.requires_grad}
    trained = parameters.keys() - owners.keys()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    others = [name for name, value in own_state(model).items() if isinstance(value, Tensor)]
    found = {name: owners[name] for name in others if name in owners}
    for name in others:
        if name not in owners and name not in trained and name not in buffers:
            owner = _owner_of_extra(name, owners, trained)
            found |= {name: owner} if owner is not None else {}
    return found


def _owner_of_extra(name: str, owners: Mapping[str, str], trained: Collection[str]) -> str | None:
    """Find the owner of what a layer adds to its state_dict: the frozen weight it is named after, or one of a layer
    without others."""
    above = name
    while above := above.rpartition(".")[0]:
        if above in owners:
            return owners[above]
        own = [other for other in (*owners, *trained) if other.rpartition(".")[0] == above]
        if own:
            return owners[own[0]] if not {*own} & {*trained} else None
    return None
