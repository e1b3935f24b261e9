"""RunParts: the parts that a run is made of on one worker, and what it says to a person.

init() and prepare() make them. Each part that changes while the run goes on has its own file and changes itself:
RunProgress (where the run stands), OpenStep (the step under way), Rates (the learning rate), Kept (checkpoints).
Knows neither how a step is computed nor who keeps the run.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from potluck.agree.terms import Fingerprint
from potluck.agree.turns import Turns
from potluck.composition import Composition, Wanted
from potluck.data.fingerprint import fingerprint
from potluck.data.loader import Loader
from potluck.data.rows import FetchOptions, mix, seed_everything
from potluck.engine.checkpointing import Kept
from potluck.engine.eval_weights import LookingWeights
from potluck.engine.handle import Loop
from potluck.engine.open_step import OpenStep
from potluck.engine.progress import RunProgress
from potluck.engine.scheduled import Rates, Scheduled
from potluck.environment import LAST_WORDS
from potluck.errors import ConfigError, Diverged, Interrupted
from potluck.events import EventLog, Noticed, StepDone, StepSkipped
from potluck.link.grid import Nodes, make_grid, make_nodes, whole_grid
from potluck.link.link import Link
from potluck.replica.frozen_base import FrozenBase
from potluck.replica.precision import StepConfig
from potluck.replica.replica import Replica
from potluck.save.checkpoint_folder import BEST
from potluck.save.state import UserState
from potluck.words import say

if TYPE_CHECKING:
    from potluck.engine.store_keeper import StoreKeeper
    from potluck.engine.table import Works


class RunParts:
    works: "Works"
    """Compute this worker's part of each round, once there is a replica."""
    looking: LookingWeights
    """The weights for looking, once there is a replica."""

    def __init__(
        self, link: Link, device: torch.device, config: StepConfig, wanted: Wanted, composition: Composition
    ) -> None:
        self.link = link
        """Link of all workers; under a host, of the ranks that are this worker together."""
        self.device = device
        self.config = config
        self.wanted = wanted
        self.composition = composition
        make = whole_grid if wanted.stages is None else partial(make_grid, workers=composition.stages)
        self.grid = make(link, each=composition.node_size)
        """The grid: which worker holds which stage, for whose rows."""
        self.nodes: Nodes | None = None
        """In a group whose replicas step by themselves: the ranks of ours, and of the others those who hold what we
        do."""
        if composition.window is not None and not wanted.has_host:
            self.nodes = make_nodes(link, composition.stages * composition.node_size)
        self.speaks = False
        """Whether this worker shows the run to a person."""
        self.say: Callable[[str], None] = say

        self.loop = Loop()
        self.events = EventLog()
        self.after_step: list[Callable[[], None]] = []
        self.after_agreement: list[Callable[[], None]] = []
        self.state = UserState()
        """Values of the user's own, kept beside the model: saved, sent to newcomers, and restored by load()."""
        self.kept = Kept()
        """Pairs of save and load for what a checkpoint keeps of where the run stands, beside its position."""
        self.keeper: StoreKeeper | None = None
        """Where workers meet in a store: what is kept of this one there."""
        self.turns = Turns()
        """Whose turn it is of several optimizers: each step of the run is one of them on the batch under way."""

        # What prepare() makes
        self.replica: Replica | None = None
        self.loader: Loader | None = None
        self.scheduled: Scheduled | None = None
        self.base: FrozenBase | None = None
        """The part of the model that was frozen from the start, and is the same on every worker."""
        self.names: tuple[str, ...] = ()
        """Names of all that the model's state_dict held before it was prepared."""
        self.batch_norm: str | None = None
        """A layer of the whole model that takes means over rows, and so needs two of them at once."""
        self.layout = ""
        """Where the model is cut into stages: which worker has which layers, as text."""
        self.data: Fingerprint | None = None
        """A fingerprint of this worker's rows; None until it has been taken."""
        self.loaded_from: Path | None = None
        """The checkpoint that load() has found."""
        self.looks_with: Callable[[], AbstractContextManager[None]] = nullcontext
        """The weights with which held-out rows are looked at, if others than the run's."""

        self.progress = RunProgress(self)
        self.step = OpenStep(self)
        self.rates = Rates(self)
        scale = self.step.scale
        self.kept.add("loss_scale", lambda tensors: scale.standing(), lambda saved, tensors: scale.restore(saved))
        self.kept.add("kept", self.state.save, self.state.load)
        self.kept.add(BEST, lambda tensors: self.best_loss())

    def begin(self, replica: Replica) -> None:
        """The replica is complete."""
        self.replica, self.looking = replica, LookingWeights(replica)

    def prepared(self) -> Replica:
        if self.replica is None:
            raise ConfigError("Call prepare(model, optimizer, ...) first.")
        return self.replica

    def look_at_data(self, dataset: Any, *, elsewhere: FetchOptions | None = None) -> Fingerprint:
        if self.data is None:
            self.data = fingerprint(dataset, elsewhere=elsewhere)
        return self.data

    def seed_random(self, seed: int) -> None:
        """Gives every worker its own random numbers, the same in every run with this seed and this many workers."""
        seed_everything(mix(seed, self.progress.step_number, self.link.rank))

    def best_loss(self) -> float | None:
        """The loss of the weights of this step, where the loop has called them the best so far."""
        step, loss = self.loop.best or (None, None)
        return loss if step == self.progress.step_number else None

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

    def tell_agreed(self, steps_before: int) -> None:
        """All workers hold the same weights again, for the first time since `steps_before` steps."""
        self.rates.agree()
        for _ in self.progress.each_step_since(steps_before):
            for call in self.after_step:
                call()
        for call in self.after_agreement:
            call()
        if self.keeper is not None:  # the last of all: what was saved in a callback is not to be saved again
            self.keeper.after_agreement()
