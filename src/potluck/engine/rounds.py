"""Rounds: what a run does from one agreement of its replicas to the next. Steps and Windows are the two kinds.

Rounds talk to the other replicas. How rows go through this one is said by its layers (layers.py, staged.py). Neither
knows which of the other's kinds it works with.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from potluck.engine.loader import BatchConfig, Loader
from potluck.engine.replica import Replica
from potluck.events import StepDone, StepSkipped
from potluck.save.saves import Standing

Collate = Callable[[list[Any]], Any] | None


class Rounds(Protocol):
    def insist_on_data(self, dataset: Any) -> None:
        """Refuses a run without a dataset, where it cannot be."""
        ...

    def make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Called once, on every worker. `model`: what this worker holds of it."""
        ...

    def begin(self, replica: Replica) -> None:
        """The replica is complete."""
        ...

    def make_loader(self, dataset: Any, batch: BatchConfig, seed: int, collate: Collate) -> Loader: ...

    @property
    def has_fixed_shares(self) -> bool:
        """Whether each lane's part of a batch stays as it was at first."""
        ...

    def keep_shares(self) -> None:
        """From here on they do."""
        ...

    def step(self) -> StepDone | StepSkipped | None:
        """After each backward: ends the step if that was its last, and the round if that was its last step."""
        ...

    def settle(self) -> None:
        """All replicas are equal after this. Called on every worker alike."""
        ...

    def rows_of_schedule(self) -> int:
        """Rows of all workers, at the end of the step that is being applied."""
        ...

    def on_loaded(self) -> None:
        """The parameters were loaded, and not trained."""
        ...

    def standing(self) -> Standing:
        """What a checkpoint keeps of this."""
        ...

    def stand(self) -> None:
        """The run has been put somewhere else."""
        ...
