"""Rounds: what a run does from one agreement of its replicas to the next. Steps and Windows are the two kinds.

`Rounds` talk to the other replicas. `Layers` say how rows go through one replica: all of it is here, or some stages.
Neither knows which of the other's kinds it works with.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from potluck.agree.pulse import Pulse
from potluck.engine.loader import BatchConfig, Loader
from potluck.engine.losses import LossFunction
from potluck.engine.replica import Replica
from potluck.events import StepDone, StepSkipped, WorkerStep
from potluck.link.link import Link
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


class Layers(Protocol):
    is_whole: bool
    """Whether this worker has all of them; else its loss function runs on some, and a pipeline on the rest."""

    @property
    def lanes(self) -> int:
        """Among how many each batch is shared out."""
        ...

    @property
    def lane(self) -> int:
        """Which of them this worker is."""
        ...

    @property
    def peers(self) -> Link:
        """Those who hold the same layers as this worker."""
        ...

    @property
    def shards(self) -> Link:
        """Those of them who hold them of our replica: each some part."""
        ...

    @property
    def place(self) -> int:
        """Which of a replica's stages are here."""
        ...

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has, whoever holds them."""
        ...

    def check(self, dataset: Any, loss: LossFunction | None, micro_size: int | None) -> int | None:
        """Refuses what prepare() was not given. How many rows go through the model at once."""
        ...

    def introduce(self, model: nn.Module, optimizer: Optimizer, dataset: Any, about: dict[str, Any]) -> None: ...

    def make_replica(
        self, model: nn.Module, optimizer: Optimizer, rounds: Rounds, options: dict[str, Any]
    ) -> Replica: ...

    def settle_in(self) -> None:
        """prepare() is done."""
        ...

    def train(self, loss_of: LossFunction, batch: Any) -> None: ...

    def insist_on_backward(self) -> None: ...

    def reduce(self, replica: Replica) -> tuple[float, float, float]:
        """Ends the sums over all ranks: (seconds waited for them, the gradient's norm, this worker's loss sum)."""
        ...

    def times(self, busy_s: float, optimizer_s: float) -> tuple[float, float]:
        """Of the step that ends, and the optimizer's before it: how long this worker computed, and how long it sent to
        other stages."""
        ...

    def lane_pulses(self, pulses: list[Pulse]) -> list[Pulse]:
        """One for each lane."""
        ...

    def worker_steps(self, pulses: list[Pulse], took_s: float) -> tuple[WorkerStep, ...]: ...

    def samples_of_lane(self, pulses: list[Pulse]) -> float:
        """Over which samples this worker's gradient is, from the pulses of all workers."""
        ...

    def samples_in_node(self, samples: Sequence[float]) -> float:
        """The same, from the samples of each rank of this worker's replica."""
        ...

    def fingerprint(self, replica: Replica) -> str: ...

    def look(self, loss_of: LossFunction, loader: Loader) -> tuple[float, float]:
        """The sum of the losses of this worker's rows, and over how many samples it is."""
        ...

    def standing(self) -> Standing: ...

    def on_saved(self) -> None: ...

    def end_of_step(self) -> None: ...

    def end_of_window(self) -> None: ...

    def close(self, *, has_failed: bool) -> None: ...
