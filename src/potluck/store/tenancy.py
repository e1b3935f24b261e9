"""Whose store it is: the first worker of a run says so there, and those of another run leave it alone.

What is compared is what makes a run: its name, model, data, settings, and how many workers it has. A worker that was
killed and started again brings the same, and is at home.
"""

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from potluck.agree.terms import Fingerprint, check_fingerprint, differing_data, differing_settings
from potluck.errors import StoreError
from potluck.store.place import Exists
from potluck.store.store import Store

ABOUT = "about"
"""Below this lies what says whose the store is; it goes with the last of the run's workers (circles.py)."""
_RUN = f"{ABOUT}/run"
_WORDS = ("id", "name", "begun")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A run, as one of its workers knows it."""

    name: str
    settings: dict[str, Any]
    data: Fingerprint
    out: str | None = None
    """The run folder, if this worker was given one."""


def move_in(store: Store, tenant: Tenant, rank: int) -> str:
    """The id of this run; StoreError, and nothing is changed, if another is there."""
    found = store.get_bytes(_RUN)
    if found is None:
        told = {"name": tenant.name, "settings": tenant.settings, "data": tenant.data}
        begun = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        with suppress(Exists):  # another worker of ours, or a run that began at the same moment
            store.put_bytes(_RUN, json.dumps(told | {"id": secrets.token_hex(4), "begun": begun}).encode(), new=True)
        found = store.get_bytes(_RUN)
    if found is None:
        raise StoreError(f"{store.url} does not keep what is put there. Something else empties it.")
    run = _read(store, found)
    _insist_on_same(store, run, tenant)
    _insist_on_folder(store, run, tenant, f"{ABOUT}/out-{rank}")
    return str(run["id"])


def _read(store: Store, found: bytes) -> dict[str, Any]:
    try:
        run = json.loads(found)
        check_fingerprint(run["data"])
        if not isinstance(run["settings"], dict) or not all(isinstance(run[name], str) for name in _WORDS):
            raise ValueError("it has other fields")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(
            f"What {store.url} says of its run cannot be read. Give this run a place of its own, with"
            " stages.protocol.url."
        ) from None
    return dict(run)


def _insist_on_same(store: Store, run: dict[str, Any], tenant: Tenant) -> None:
    mine, theirs = tenant.settings | {"name": tenant.name}, run["settings"] | {"name": run["name"]}
    for name, (there, here) in differing_settings(theirs, mine).items():
        what = "its model has other parameters" if name == "model" else f"it has {name} = {there}, and this one {here}"
        raise _another(store, run, tenant, what)
    where = differing_data(run["data"], tenant.data, ("there", "here"))
    if where is not None:
        raise _another(store, run, tenant, f"its data have as many rows, but {where}")


def _insist_on_folder(store: Store, run: dict[str, Any], tenant: Tenant, key: str) -> None:
    if tenant.out is None:
        return
    out = store.get_bytes(key)
    if out is not None and out.decode() != tenant.out:
        raise _another(store, run, tenant, f"its folder is {out.decode()}, and this one's {tenant.out}")
    if out is None:
        store.put_bytes(key, tenant.out.encode())


def _another(store: Store, run: dict[str, Any], tenant: Tenant, what: str) -> StoreError:
    sentence = (
        f"{store.url} is where another run meets: {run['name']} ({run['id']}, begun {run['begun']}), and this is"
        f" {tenant.name}: {what}. Nothing of it was touched. Give this run a place of its own with stages.protocol.url;"
        " or go on with the other by starting it just as it was. If that is over for good, set"
        f" stages.protocol.generation to {store.generation + 1}: it ends the other, and clears away what it left."
    )
    return StoreError("".join(character if character.isprintable() else "?" for character in sentence))
