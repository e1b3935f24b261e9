"""Table: where replicas meet. It is all that differs between a group, whose workers agree among themselves
(group_table.py), and a host, which leads workers that come and go (host_table.py).

What may take long is a generator that yields each Wait: so the story of a run (round.py) never blocks by itself, and
the same story runs over sockets, over a link and on a virtual clock.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from torch import Tensor

from potluck.agree.records import Range
from potluck.agree.step_report import StepDecision
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, MicroBatch
from potluck.data.source import DataSource, HeldOut
from potluck.events import EpochDone, StepSkipped, WorkerStep
from potluck.fleet.tree import Node
from potluck.replica.evaluate import Figures, LossFunction
from potluck.replica.replica import Agreed, Replica

T = TypeVar("T")


class Wait(Protocol):
    """Something that is on its way."""

    def wait(self) -> Any:
        """Blocks until it is here. A virtual clock answers in its place."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A Wait by its name, as `potluck why` says it; one of a link's has its class's first sentence."""

    what: str
    wait: Callable[[], Any]


Waits = Generator[Wait, Any, T]
"""A part of a story: it yields what it waits for, and is sent what that came to."""


def drive(story: Waits[T]) -> T:
    """Runs a part of a story to its end, and blocks wherever it waits."""
    try:
        waits = next(story)
        while True:
            waits = story.send(waits.wait())
    except StopIteration as end:
        result: T = end.value
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """The work of this worker until the next agreement."""

    version: int
    """The agreement that it leads to; a host calls it a step."""
    epoch: int
    row: int
    """Where the round begins in the epoch's order, over all workers."""
    rows: int
    """How many rows it has, over all workers."""
    is_together: bool | None
    """All take one step, of the mean gradient; else each steps by itself, and the mean change is taken. None: this
    worker has no part in it, and learns when it is agreed on."""
    batches: tuple[tuple[Range, tuple[MicroBatch, ...]], ...] = ()
    """This worker's batches, with what goes through the model at once. None: it has no part in this round."""
    part: int = 0
    """How many rows this worker is to do; it may do more of its batches while others are not done with theirs."""
    stretch: float = 1.0
    """By how much longer its own steps are than the schedule says."""
    bounds: tuple[Range, ...] = ()
    """Under a host: the rows of each slice of the round."""
    nodes: tuple[Node, ...] = ()
    """Under a host: the slices that are this worker's, as parts of the tree."""
    until_s: float | None = None
    """When the round ends, from its start, whatever is done by then."""

    @property
    def has_rows(self) -> bool:
        return bool(self.batches or self.nodes)


@dataclass(frozen=True, slots=True)
class Give:
    """next(loader) returns: forward and backward of these rows are the loop's to do."""

    micro: MicroBatch | None
    """None: the loop brings batches of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a round: all workers have agreed on it, and each hears the same."""

    is_together: bool
    rows: int
    """Rows of the run that are done with it; 0: a turn of the batch that is not its last."""
    samples: float
    loss: float
    fault: str | None = None
    """Why its gradient is of no use, as far as the reports say so: a loss is not finite, or one had no room in fp16."""
    end: int | None = None
    """The row of the epoch that it ends at, where a loop left some out, or has no loader."""
    skipped: int = 0
    """Steps of replicas by themselves that were skipped in it, and their rows."""
    skipped_rows: int = 0
    rows_computed: int = 0
    """Rows that were computed for it, in every turn of their batch."""
    own_samples: float = 0.0
    """In a group: the samples of this replica's part of it."""
    stops: bool = False
    """Whether all workers stop here."""
    workers: tuple[WorkerStep, ...] = ()
    seconds: float = 0.0
    """How long the round took until this was known."""
    epoch: EpochDone | None = None
    """The proof of the epoch that it ends."""
    means: tuple[Tensor, ...] = ()
    """Under a host: the mean of each part, in host memory."""
    used: bytes = b""
    """Under a host: which parameters got a gradient."""
    buffers: bytes = b""
    """Under a host: what buffers became that have no mean."""


Took = tuple[float, tuple[WorkerStep, ...]]
"""Seconds from the beginning of a round to its end, and how each worker spent them."""


class RoundWork(Protocol):
    """How this worker computes its part of a round: Together (together.py, slice_steps.py), or Alone (alone.py)."""

    ends_each: bool = False
    """Whether step() has to end each micro-batch, and not only the last of a batch."""

    @property
    def drift(self) -> float:
        """How far this worker was from the others at the last agreement, where each steps by itself."""
        return 0.0

    def begin(self, plan: RoundPlan) -> None: ...

    def next(self) -> Give | None:
        """The next micro-batch; None: this worker's part is done."""

    def seeds_of(self, seed: int, micro: MicroBatch) -> tuple[int, int | None]:
        """Gives what Loader.seeds_of asks for, in a run with this seed."""

    def expect(self, loader: Loader) -> None:
        """Tells the loader what comes, as far as it is known."""

    def backward(self, micro: MicroBatch | None, loss: Tensor, samples: float, last: bool | None) -> None: ...

    def is_ready(self, micro: MicroBatch | None) -> bool:
        """Whether step() may end this micro-batch: it had its last backward."""

    def end(self, micro: MicroBatch | None) -> StepSkipped | None:
        """The micro-batch is done. Returns a step of our own that was skipped."""

    def apply(self, outcome: Outcome) -> StepDecision:
        """A step along the mean gradient, or the mean change; or neither, and why."""

    def agreed(self) -> tuple[Agreed, Sequence[Tensor]]:
        """Parameters and buffers that all workers agreed on last, as they are in this worker's memory; of parameters,
        those that the model does not hold."""
        return {}, ()

    def as_agreed(self) -> AbstractContextManager[None]:
        """The model as all agreed on it last, also in the middle of the round."""
        return nullcontext()

    def forget(self) -> None:
        """Discards what was computed: the model is again as it was agreed on."""

    def start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""


class Table(Protocol):
    """The calls that a run makes to where its replicas meet. All but plan(), agree() and applied() are made between two
    of those, also from callbacks, and never while another part of a story waits."""

    @property
    def has_fixed_shares(self) -> bool:
        """Whether each pipeline's part of a batch stays as it was at first."""
        return True

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""

    @property
    def world(self) -> int:
        """How many workers there are."""

    @property
    def is_replaying(self) -> bool:
        """Whether the step being applied was taken by others before this worker joined."""
        return False

    # Preparing

    def begin(self, replica: Replica) -> "Works":
        """The replica is complete."""

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader: ...

    # A round

    def plan(self) -> Waits[RoundPlan | None]:
        """The next round, from where the run stands. None: the epoch is done, or the run stops."""

    def is_void(self, plan: RoundPlan) -> bool:
        """Whether the plan is of no use any more: the run was put elsewhere since, or is over here."""

    def agree(self, plan: RoundPlan, work: RoundWork) -> Waits[Outcome | RoundPlan | None]:
        """This worker's part is done, or it had none. A plan: more of the same round, which a lost worker had. None:
        the run may stand elsewhere, or is over here."""

    def applied(self, outcome: Outcome, decision: StepDecision) -> Waits[Took]:
        """The weights have changed. Returns how long the round took, and each worker in it."""

    def end_round(self) -> Waits[None]:
        """After the callbacks of a round."""

    def a_pass(self) -> AbstractContextManager[None]:
        """Around a pass of the loop over its loader."""
        return nullcontext()

    def parts_ways(self, plan: RoundPlan, micro: MicroBatch | None) -> bool:
        """Whether the others may be elsewhere in this round than this worker, which has come to this micro-batch."""

    # Between rounds

    def evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures: ...

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all workers who are here, in order of rank."""

    def save(self, folder: Path, keep_last: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load(self, folder: Path) -> bool: ...

    def wait_for_saves(self) -> None: ...

    # The beginning and the end

    def begin_run(self, epochs: int) -> None:
        """Called before the first epoch."""

    def end_of_epoch(self) -> None:
        """Ends the epoch: all of its rows are done."""

    def request_stop(self) -> None:
        """Ctrl-C on this worker: in a group all stop, and under a host it leaves."""

    def stop_all(self) -> None:
        """All workers stop after the step in which they hear of it."""

    def finish_all(self) -> None:
        """All workers stop likewise, and the run counts as done."""

    def finishes(self) -> bool:
        """Whether a run that stops before its last row counts as done: the same on every worker that stops."""

    def end_early(self, folder: Path | None) -> NoReturn:
        """The run was stopped: what is done is saved, and a sentence says where."""

    def end_well(self, folder: Path | None) -> None: ...

    def end_with_script(self) -> None:
        """A script that closes nothing has ended: close() waits for what is still being written."""
        return

    def end_for_all(self) -> None:
        """The run ends here, though rows are left: all workers have found so."""
        return

    def last_words(self) -> str:
        """Where the run stands when it is stopped."""

    def close(self, error: BaseException | None) -> None:
        """Finishes what is still being written, and leaves. `error`: what ended the loop."""


def _stay(is_together: bool) -> None:
    """There is one kind of work."""


class Works:
    """The works of a run, over one replica. One of them has it at a time: the other has forgotten what it computed and
    did not agree on."""

    def __init__(
        self, together: RoundWork | None, alone: RoundWork | None, turn: Callable[[bool], None] = _stay
    ) -> None:
        """`turn(is_together)`: the replica goes from one to the other."""
        self._together, self._alone, self._turn = together, alone, turn
        self._is_together: bool | None = None
        first = together or alone
        assert first is not None
        self.now: RoundWork = first

    def begin(self, plan: RoundPlan) -> RoundWork:
        if plan.is_together is None:
            return self.now
        work = self.of(is_together=plan.is_together)
        work.begin(plan)
        return work

    def of(self, *, is_together: bool) -> RoundWork:
        """The one that computes such rounds."""
        work = (self._together if is_together else self._alone) or self.now
        if work is not self.now:
            self.now.forget()
            self.now = work
        if is_together is not self._is_together and self._together is not None and self._alone is not None:
            self._turn(is_together)
        self._is_together = is_together
        return work

    def start_anew(self) -> None:
        for work in (self._together, self._alone):
            if work is not None:
                work.start_anew()
