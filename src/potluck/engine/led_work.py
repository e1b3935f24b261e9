"""LedWork: what a host's worker computes of a round, and what it makes of what all agreed on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from potluck.agree.pulse import Verdict
from potluck.engine.loader import MicroBatch
from potluck.events import StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.tree import Node
from potluck.wire.messages import Committed, Work


class LedWork(Protocol):
    is_repeatable: bool
    """Whether work that is done again has the same bits, whoever does it."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is sent of a round, and in which order."""

    @property
    def divergence(self) -> float:
        """Of this worker from the others at the last agreement, where each steps by itself."""

    def begin(self, nodes: list[Node], bounds: Sequence[tuple[int, int]]) -> None:
        """`bounds`: the rows of each slice. `nodes`: which of them are ours, as parts of the tree."""

    def micro_batches(self, work: Work, is_void: Callable[[], bool]) -> Iterator[MicroBatch]:
        """What goes through the model at once, until the work is done or of no use any more."""

    def seed_of(self, seed: int, micro: MicroBatch) -> int:
        """The same for these rows whoever computes them."""

    def backward(self, micro: MicroBatch, loss: Tensor, samples: float, last: bool | None) -> None: ...

    def step(self, micro: MicroBatch) -> tuple[bool, StepSkipped | None]:
        """Whether all of the work is done; a step of our own that was skipped."""

    def count_rows(self, rows: int) -> None:
        """Of all workers together, in the round that is agreed on."""

    def agree(self, committed: Committed, means: list[Tensor]) -> Verdict:
        """What all sent, as its mean, becomes everybody's; or all leave it."""

    def hash_weights(self) -> tuple[str, Tensor]:
        """The digest of what all workers agreed on last, as it is in this worker's memory, and a glance at it."""

    def glance(self) -> Tensor: ...

    def as_agreed(self) -> AbstractContextManager[None]:
        """The model as all agreed on it last, also in the middle of the work."""

    def forget(self) -> None:
        """The model is again as it was agreed on."""

    def start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""
