"""RunState: what a run is made of, where it stands, and what was decided.

Everything here is the same on every worker, or is made so. Knows neither how a step is computed nor who keeps the run.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from potluck.agree.loss_scale import LossScale
from potluck.agree.records import Position, Range, RunTerms
from potluck.agree.step_report import StepDecision
from potluck.agree.terms import Fingerprint
from potluck.agree.turns import Turns
from potluck.composition import Composition, Wanted
from potluck.data.fetching import FetchOptions
from potluck.data.loader import Loader
from potluck.data.plan import MicroBatch
from potluck.data.rows import mix, seed_everything
from potluck.engine.checkpointing import Kept
from potluck.engine.fingerprint import fingerprint
from potluck.engine.frozen_base import FrozenBase
from potluck.engine.handle import Loop
from potluck.engine.precision import StepConfig
from potluck.engine.replica import MicroPass, Replica
from potluck.engine.scheduled import Scheduled
from potluck.environment import LAST_WORDS
from potluck.errors import ConfigError, Diverged, Interrupted
from potluck.events import EpochDone, EventLog, Noticed, StepDone, StepSkipped, WorkerStep
from potluck.fleet.ledger import Ledger
from potluck.link.grid import Grid, make_grid, whole_grid
from potluck.link.link import Link
from potluck.save.checkpoint_folder import BEST
from potluck.save.state import UserState
from potluck.words import say

BEYOND_PEAK = 1 / 3
"""A replica's rate may exceed the peak of its schedule by this power of what would make up for its noise."""

if TYPE_CHECKING:
    from potluck.engine.store_keeper import StoreKeeper


@dataclass(slots=True)
class StepTally:
    """This worker's part of the step that is under way."""

    loss_sum: Tensor
    started: float
    samples: float = 0.0
    rows: int = 0
    is_last: bool = False
    """Whether its last backward is done."""
    is_untouched: bool = False
    """Batches are the caller's own, and there was no backward yet."""
    only_samples: float | None = None
    """The samples of the step's only backward, where nobody else's gradient is added to it."""


@dataclass(eq=False)
class RunState:
    link: Link
    """Link of all workers; under a host, of the ranks that are this worker together."""
    device: torch.device
    config: StepConfig
    wanted: Wanted
    composition: Composition
    speaks: bool = False
    """Whether this worker shows the run to a person."""
    say: Callable[[str], None] = say

    caller: Loop = field(default_factory=Loop)
    events: EventLog = field(default_factory=EventLog)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    after_agreement: list[Callable[[], None]] = field(default_factory=list)
    state: UserState = field(default_factory=UserState)
    """Values of the user's own, kept beside the model: saved, sent to newcomers, and restored by load()."""

    at: Position = field(default_factory=Position, init=False)
    """Where the run stands. seek(), advance() and agreed() move it, and nothing outside of this module does."""
    shown_step: int | None = field(default=None, init=False)
    """While after_step runs for each step of a window: which of them that is."""
    steps_before: int = 0
    """Steps of the run by the agreement before the last one."""
    skipped_in_a_row: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    last_epoch: EpochDone | None = None
    """The proof of the last epoch: `last_epoch.sentence`."""
    wants_stop: bool = False
    stopping: bool = False
    """Whether every worker has agreed to stop after the step that is done."""

    turns: Turns = field(default_factory=Turns)
    """Whose turn it is of several optimizers: each step of the run is one of them on the batch under way."""
    replica: Replica | None = None
    names: tuple[str, ...] = ()
    """Names of all that the model's state_dict held before it was prepared."""
    base: FrozenBase | None = None
    """The part of the model that was frozen from the start, and is the same on every worker."""
    loader: Loader | None = None
    scheduled: Scheduled | None = None
    batch_norm: str | None = None
    """A layer of the whole model that takes means over rows, and so needs two of them at once."""
    unit: float = 1.0
    """Factor of each gradient, beside its samples: about one over the rows of a batch."""
    scale: LossScale = field(init=False)
    """Further factor of each gradient in fp16."""
    data: Fingerprint | None = None
    """A fingerprint of this worker's rows; None until it has been taken."""
    layout: str = ""
    """Where the model is cut into stages: which worker has which layers, as text."""
    tally: StepTally = field(init=False)
    trained: MicroBatch | None = None
    """The last that had a backward."""
    stand_in: ExitStack = field(default_factory=ExitStack)
    """Puts back what the forward of a row that does not count has changed in buffers."""

    grid: Grid = field(init=False)
    """The grid: which worker holds which stage, for whose rows."""
    kept: Kept = field(default_factory=Kept)
    """Pairs of save and load for what a checkpoint keeps of where the run stands, beside its position."""
    keeper: "StoreKeeper | None" = None
    """Where workers meet in a store: what is kept of this one there."""
    looks_with: Callable[[], AbstractContextManager[None]] = nullcontext
    """The weights with which held-out rows are looked at, if others than the run's."""
    is_restored: bool = False
    """Whether this worker was killed, and continues from where it was in a run that has continued meanwhile."""
    loaded_from: Path | None = None

    def __post_init__(self) -> None:
        make = whole_grid if self.wanted.stages is None else partial(make_grid, workers=self.composition.stages)
        self.grid = make(self.link, each=self.composition.node_size)
        self.scale = LossScale(is_on=self.config.precision == "fp16")
        self.kept.add(
            "loss_scale", lambda tensors: self.scale.standing(), lambda saved, tensors: self.scale.restore(saved)
        )
        self.kept.add("kept", self.state.save, self.state.load)
        self.kept.add(BEST, lambda tensors: self._best_loss())
        self.start_of_step()

    def prepared(self) -> Replica:
        if self.replica is None:
            raise ConfigError("Call prepare(model, optimizer, ...) first.")
        return self.replica

    # What is decided

    def ask_to_stop(self) -> None:
        """This worker wishes that all stop, or that it may leave."""
        self.wants_stop = True

    def stop(self) -> None:
        """All workers stop after the step that is done; or the run is over for this one."""
        self.stopping = True

    def continue_(self) -> None:
        """The run has gone back behind the end at which it stopped."""
        self.stopping = False

    def prove(self, epoch: EpochDone) -> None:
        self.last_epoch = epoch

    def begin_ledger(self, ranges: Sequence[Range] = ()) -> None:
        """A new epoch is counted; or the rest of one of which these rows are done."""
        self.ledger = Ledger(list(ranges))

    # What is said

    def speak(self, speaks: bool, say: Callable[[str], None]) -> None:
        """Whether this worker shows the run to a person, and how it says a sentence."""
        self.speaks, self.say = speaks, say

    def notice(self, sentence: str) -> None:
        """Something is not as a person may think, and the run continues."""
        self.events.emit(Noticed(sentence=sentence))
        self.say(sentence)

    def interrupted(self, sentence: str) -> Interrupted:
        """An error to raise. Our launcher says its sentence; where there is none, it is said here."""
        if self.speaks and LAST_WORDS not in os.environ:
            say(sentence)
        return Interrupted(sentence)

    def tell(self, event: StepDone | StepSkipped) -> None:
        self.events.emit(event)
        if isinstance(event, StepSkipped) and event.in_a_row >= self.config.nonfinite_limit:
            raise Diverged(
                f"Stopped after {event.in_a_row} skipped steps in a row, at step {event.step}: {event.reason}."
                " The weights are those of the last good step. Try a lower learning rate, a longer warm-up, step.clip,"
                f" or fp32, and look at the data around there.{self.prepared().nonfinite_hint()}"
            )

    def look_at_data(self, dataset: Any, *, elsewhere: FetchOptions | None = None) -> Fingerprint:
        if self.data is None:
            self.data = fingerprint(dataset, elsewhere=elsewhere)
        return self.data

    # Where it stands

    @property
    def position(self) -> Position:
        """Where the run stands; at an epoch's end, that is the beginning of the next."""
        assert self.loader is not None
        return self.at.next_epoch() if self.at.row >= self.loader.rows else self.at

    @property
    def step_number(self) -> int:
        return self.at.step if self.shown_step is None else self.shown_step

    @property
    def steps_done(self) -> int:
        """Steps of the run, as step_number, except while after_step runs for each step of a window."""
        return self.at.step

    @property
    def rows_seen(self) -> int:
        return self.at.rows_seen

    @property
    def skipped(self) -> int:
        return self.at.skipped

    @property
    def terms(self) -> RunTerms:
        is_sync = self.wanted.policy.steps_together
        if self.loader is None:
            return RunTerms(turns=self.turns.count, is_sync=is_sync)
        rows, size = self.loader.rows, self.loader.batch.size
        return RunTerms(rows=rows, batch=size, turns=self.turns.count, is_sync=is_sync)

    def seek(self, position: Position) -> None:
        """Moves the run elsewhere."""
        self.at = position
        self.turns.now = min(position.turn, self.turns.count - 1)

    def agreed(self, rows: int, *, end: int | None = None) -> None:
        """All have agreed: as Position.after() has it."""
        self.at = self.at.after(rows, self.terms, end=end)

    def skipped_steps(self, steps: int, rows: int = 0) -> None:
        self.at = self.at.skip(steps, rows)

    @property
    def is_at_the_end(self) -> bool:
        return self.caller.rows_limit is not None and self.rows_seen >= self.caller.rows_limit

    @property
    def whole_steps(self) -> int:
        """Steps of the run that are done: one of which some rows are still to do counts for step_number alone."""
        if self.loader is None or self.wanted.policy.steps_together:
            return self.step_number
        row, size = self.loader.position.row, self.loader.batch.size
        return self.step_number - self.turns.count * (row % size > 0 and row < self.loader.rows)

    def _best_loss(self) -> float | None:
        """The loss of the weights of this step, where the loop has called them the best so far."""
        step, loss = self.caller.best or (None, None)
        return loss if step == self.step_number else None

    def seed_random(self, seed: int) -> None:
        """Gives every worker its own random numbers, the same in every run with this seed and this many workers."""
        seed_everything(mix(seed, self.step_number, self.link.rank))

    # A step

    def start_of_step(self) -> None:
        self.tally = StepTally(
            torch.zeros((), device=self.device), time.perf_counter(), is_untouched=self.loader is None
        )
        if self.replica is not None:
            self.replica.remember_buffers()

    def forget_round(self) -> None:
        """Forgets what was computed since the last agreement: the step begins again."""
        self.turns.now = min(self.at.turn, self.turns.count - 1)
        self.start_of_step()

    @property
    def gradient_unit(self) -> float:
        """Weight of a gradient for each sample where a host adds them up, until it is applied."""
        return self.unit * self.scale.factor

    @property
    def samples_per_gradient(self) -> float:
        """By how many samples gradients are divided from their backward on, on all who step together alike.

        It is the step's rows, so that a hook on an activation sees what it would see in one process; or the samples of
        the only backward, so that its loss is as it was given. What they are short of is made up for by the step.
        """
        if (only := self.tally.only_samples) is not None:
            return only / (self.scale.factor * (self.scale.samples_per_row if self.scale.is_on else 1.0))
        if self.loader is None:
            return 1 / self.scale.factor
        rows, micro = self.loader.batch.size, self.loader.current
        if micro is not None and self.wanted.policy.steps_together:
            rows = max(1, micro.step_end - self.loader.position.row)
        return rows / self.scale.factor

    def micro_pass(self) -> MicroPass:
        """The micro-batch that the loader gave last, as it goes through the replica."""
        loader, seed = self.loader, 0
        micro = loader.current if loader is not None else None
        if loader is not None and micro is not None:
            turn = [self.turns.now] if self.turns.now else []
            seed = mix(loader.seed, loader.position.epoch, micro.start, *turn)
        return MicroPass(micro, seed, self.samples_per_gradient, self.tally)

    def count_rows(self, micro: MicroBatch) -> None:
        """A micro-batch had its backward. Of a pipeline, the last stage counts its rows."""
        if micro.counts and self.grid.is_last:
            self.tally.rows += micro.end - micro.start
            if self.turns.is_last:
                self.ledger.record(micro.start, micro.end)
        self.note_trained(micro)

    def note_trained(self, micro: MicroBatch) -> None:
        self.trained = micro

    def good_step(self) -> None:
        self.skipped_in_a_row = 0
        self.scale.rise()

    def next_turn(self) -> None:
        """A step is done, applied or skipped."""
        if self.turns.count > 1:
            self.turns.next()
            self.trained = None  # the same batch comes again

    def set_lr(self, rows: int, step: int | None = None) -> None:
        """Sets the rate of the step that is being applied. `rows`: of all workers, by its end. `step`: the number of
        it, counted from 0, if that does not follow from them."""
        if self.scheduled is not None:
            self.scheduled.go_to(self._step_of_schedule(rows) if step is None else step)
        if self.caller.lr_factor is not None:
            for group in self.prepared().optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.caller.lr_factor(rows)

    @contextmanager
    def stretched_lr(self, stretch: float) -> Iterator[None]:
        """The rate is so many times as high meanwhile, but not much higher than the peak of its schedule.

        Where it has none, it is left alone.
        """
        groups = self.prepared().optimizer.param_groups if stretch > 1 else []
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            if "initial_lr" in group and rate > 0:
                most = max(group["initial_lr"], group.get("max_lr", 0.0)) * stretch**BEYOND_PEAK
                group["lr"] = rate * max(1.0, min(stretch, most / rate))
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _step_of_schedule(self, rows: int) -> int:
        """Return the step of the run, counted from 0, in which these rows end."""
        if self.loader is None:
            return self.step_number - 1
        row, size = self.loader.position.row, self.loader.batch.size
        if (ahead := rows - self.rows_seen) <= 0:
            return self.step_number - 1
        batches = -(-(row + ahead) // size) - -(-row // size)
        return self.step_number + (batches - 1) * self.turns.count + self.turns.now

    @property
    def lr(self) -> float:
        return float(self.prepared().optimizer.param_groups[0]["lr"])

    def skip(self, decision: StepDecision, *, step: int, where: str = "") -> StepSkipped:
        """The gradient is of no use."""
        self.prepared().drop()
        reason, in_a_row = f"{where}{decision.fault}", 0
        if decision.samples and self.scale.fall():
            reason += f", and the loss scale falls to {self.scale.value:g}"
        else:
            in_a_row = self.skipped_in_a_row = self.skipped_in_a_row + 1
        return StepSkipped(step=step, loss=decision.loss, in_a_row=in_a_row, reason=reason)

    def step_done(self, decision: StepDecision, lr: float, seconds: float, workers: tuple[WorkerStep, ...]) -> StepDone:
        return StepDone(
            step=self.step_number,
            epoch=self.loader.position.epoch if self.loader is not None else 0,
            rows_seen=self.rows_seen,
            samples=decision.samples,
            loss=decision.loss,
            lr=lr,
            grad_norm=decision.norm,
            seconds=seconds,
            workers=workers,
        )

    def tell_agreed(self, steps_before: int) -> None:
        """All workers hold the same weights again, for the first time since `steps_before` steps."""
        if self.scheduled is not None:
            self.scheduled.agree(self.whole_steps)
        self.steps_before = steps_before
        for number in range(steps_before + 1, self.at.step + 1):
            self.shown_step = number
            for call in self.after_step:
                call()
        self.shown_step = None
        for call in self.after_agreement:
            call()
        if self.keeper is not None:  # the last of all: what was saved in a callback is not to be saved again
            self.keeper.after_agreement()
