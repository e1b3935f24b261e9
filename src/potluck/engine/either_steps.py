"""EitherSteps: a host's worker takes some steps together with all others, and steps by itself in windows between.

Each piece of work says which it is; what all agreed on says so too, for a worker that was given nothing of it. Both are
over one replica, and one of them has it at a time: the other has forgotten what it computed and did not agree on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from potluck.agree.step_report import StepDecision
from potluck.data.plan import MicroBatch
from potluck.engine.slice_steps import SliceSteps
from potluck.engine.window_steps import WindowSteps
from potluck.events import StepSkipped
from potluck.fleet.description import Part
from potluck.fleet.member import is_together
from potluck.fleet.tree import Node
from potluck.wire.messages import Committed, Work


class EitherSteps:
    is_repeatable = False
    """Some of it is not, and nobody else may be asked which."""

    def __init__(self, together: SliceSteps, alone: WindowSteps) -> None:
        self._together = together
        self._alone = alone
        together.sums.buffers_at = len(alone.parts) - 1
        self._now: SliceSteps | WindowSteps = together

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._alone.parts

    @property
    def divergence(self) -> float:
        return self._now.divergence

    def _turn_to(self, *, is_together: bool) -> SliceSteps | WindowSteps:
        now: SliceSteps | WindowSteps = self._together if is_together else self._alone
        if now is not self._now:
            self._now.forget()
            self._together.set_idle(not is_together)
            self._now = now
        return now

    def begin(self, work: Work, nodes: list[Node], bounds: Sequence[tuple[int, int]]) -> None:
        self._turn_to(is_together=not work.batch).begin(work, nodes, bounds)

    def micro_batches(self, work: Work, is_void: Callable[[], bool]) -> Iterator[MicroBatch]:
        return self._now.micro_batches(work, is_void)

    def expects_from(self, work: Work) -> tuple[int, ...]:
        return self._now.expects_from(work)

    def expected(self, work: Work, seed: int) -> Iterator[tuple[MicroBatch, int]]:
        return self._now.expected(work, seed)

    def seed_of(self, seed: int, micro: MicroBatch) -> int:
        return self._now.seed_of(seed, micro)

    def backward(self, micro: MicroBatch, loss: Tensor, samples: float, last: bool | None) -> None:
        self._now.backward(micro, loss, samples, last)

    def step(self, micro: MicroBatch) -> tuple[bool, StepSkipped | None]:
        return self._now.step(micro)

    def agree(self, committed: Committed, means: list[Tensor]) -> StepDecision:
        return self._turn_to(is_together=is_together(committed)).agree(committed, means)

    # What all agreed on

    def hash_weights(self) -> tuple[str, Tensor]:
        return self._now.hash_weights()

    def quick_digest(self) -> Tensor:
        return self._now.quick_digest()

    def as_agreed(self) -> AbstractContextManager[None]:
        return self._now.as_agreed()

    def forget(self) -> None:
        self._now.forget()

    def start_anew(self) -> None:
        self._together.start_anew()
        self._alone.start_anew()
