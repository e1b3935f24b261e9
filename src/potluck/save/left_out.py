"""Leaves the frozen base out of checkpoints, since each worker has it from elsewhere: they keep a hash of it."""

import json
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from potluck.errors import CheckpointError
from potluck.link.link import Alone, Link
from potluck.save.checkpoint_folder import BASE
from potluck.words import plural, size

if TYPE_CHECKING:
    from potluck.engine.frozen_base import FrozenBase
    from potluck.engine.replica import Replica


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
