"""Checks that the workers of a group have the same data and settings."""

import json
from typing import Any

from potluck.agree.terms import SAME_DATA, Fingerprint, differing_data, differing_settings
from potluck.data.loader import Loader
from potluck.engine.run_state import RunState
from potluck.errors import ConfigError
from potluck.words import plural


def check_same_data(run: RunState, loader: Loader) -> None:
    """Workers that planned different steps would wait for each other forever, and none may train on other rows."""
    data, training, own_rank = (
        run.look_at_data(loader.dataset, elsewhere=loader.fetching if loader.batch.fetchers else None),
        run.caller.training,
        run.link.rank,
    )
    mine = f"{plural(loader.rows, 'row')} in batches of {loader.batch.size:,}, {loader.order.tell(loader.seed)}"
    told = run.link.gather_bytes(json.dumps([mine, data, training]).encode())
    for rank, (theirs, other_data, other_training) in enumerate(map(_terms, told)):
        if theirs != mine:
            raise ConfigError(
                f"The data differs between workers: worker {own_rank} has {mine}, and worker {rank}"
                f" {theirs}. Give every worker the whole dataset, in the same order; it is shared out here."
            )
        where = differing_data(data, other_data, (f"worker {own_rank}'s", f"worker {rank}'s"))
        if where is not None:
            raise ConfigError(f"Worker {own_rank} and worker {rank} have as many rows, but {where}. {SAME_DATA}")
        for name, (own, other) in differing_settings(training, other_training).items():
            raise ConfigError(
                f"Worker {own_rank} has {name} = {own}, and worker {rank} has {other}. Give every worker the same"
                " optimizer and settings."
            )


def _terms(told: bytes) -> tuple[str, Fingerprint, dict[str, Any]]:
    """Read what a worker says of its data; one of an older version, whose words a store has kept, said but the
    first."""
    try:
        rows, data, training = json.loads(told)
    except ValueError:
        return told.decode(), {}, {}
    return rows, data, training
