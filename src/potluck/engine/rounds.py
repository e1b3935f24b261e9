"""Rounds: what a run does from one agreement of its replicas to the next. Steps, Windows and HostRounds are its kinds.

Rounds talk to the other replicas. How rows go through this one is up to the replica (replica.py, staged.py), and who
keeps the run to its lifecycle (lifecycle.py). None knows which of the others' kinds it works with.
"""

import json
from typing import Any, Protocol

from torch import Tensor

from potluck.agree.terms import SAME_DATA, Fingerprint, differing_data, differing_settings
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig
from potluck.data.source import DataSource
from potluck.engine.replica import Replica
from potluck.engine.run_state import RunState
from potluck.errors import ConfigError
from potluck.events import StepDone, StepSkipped
from potluck.link.grid import Nodes
from potluck.words import plural


class Rounds(Protocol):
    @property
    def has_fixed_shares(self) -> bool:
        """Whether each pipeline's part of a batch stays as it was at first."""

    @property
    def nodes(self) -> Nodes | None:
        """Where replicas step by themselves: the ranks of ours, and of the others those who hold what we do."""

    @property
    def is_under_way(self) -> bool:
        """Whether this worker is within a step or a window, where the others may be elsewhere in it."""

    def begin(self, replica: Replica) -> None:
        """The replica is complete."""

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader: ...

    def backward(self, loss: Tensor, samples: float, last: bool | None) -> None: ...

    def step(self) -> StepDone | StepSkipped | None:
        """After each backward: ends the step if that was its last, and the round if that was its last step."""

    def settle(self) -> None:
        """All replicas are equal after this. Called on every worker alike."""


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
