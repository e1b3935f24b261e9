"""Handle: what a loop may ask of its run, and hear from it; and Loop, what it says of the run. Knows nothing of how the
run computes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.agree.records import Position
from potluck.composition import Wanted
from potluck.errors import ConfigError
from potluck.events import EpochDone, EventLog, Heard, StepDone
from potluck.replica.precision import autocast
from potluck.save.state import UserState

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts


@dataclass(slots=True)
class Loop:
    """Settings that a loop gives the run, as `fleet.loop`: most of them before the first step, and alike on every
    worker."""

    has_trainer: bool = False
    """A trainer counts epochs, hears Ctrl-C, saves and shows the run; else a loop of your own does, with our help."""
    counts_epochs: bool = False
    """epochs() or a trainer counts the passes over the loader, and so knows how many of them the run has."""
    rows_limit: int | None = None
    """The run is over after this many rows; only policies that plan several steps ahead need to know."""
    lr_factor: Callable[[int], float] | None = None
    """A function from rows seen to the share of its peak that the learning rate has; None: the rate is yours."""
    samples_per_row: float = 1.0
    """How many samples a row counts as; only for plain peers of a host, which cannot say so themselves."""
    flops_per_sample: float = 0.0
    """Floating-point operations that a sample costs, forward and backward; 0: not known. It is only shown."""
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of every worker's step that must be alike: the optimizer's, clipping, the schedule."""
    about: dict[str, Any] = field(default_factory=dict)
    """Details of the run that a host shows: its name, the unit of samples, how many steps there are."""
    memo: dict[str, int] = field(default_factory=dict)
    """Numbers that a loop wants to find again if this worker is killed and restarted while the run continues."""
    best: tuple[int, float] | None = None
    """The step with the lowest validation loss so far, and that loss: the checkpoint of this step is kept as well."""

    def end_after(self, steps: int, *, rows_of_epoch: int, batch_size: int) -> None:
        """Sets the end of the run to this many steps, in epochs of so many rows."""
        whole, rest = divmod(steps, -(-rows_of_epoch // batch_size))
        self.rows_limit = whole * rows_of_epoch + min(rest * batch_size, rows_of_epoch)
        self.about |= {"steps_total": steps}


class Handle:
    run: "RunParts"
    before_step: list[Callable[[], None]]
    """Functions that are called before each step of this worker's optimizer. To read the gradient that all workers
    agreed on, or to change it, use torch's `optimizer.register_step_pre_hook()`: it is in `grad` then."""

    @property
    def layout(self) -> str:
        """Where the model is cut into stages: which worker has which layers, as text."""
        return self.run.layout

    @property
    def pipelines(self) -> int:
        """Among how many each batch is shared out: workers, or those of them that hold one cut model together."""
        return self.run.grid.pipelines

    @property
    def turn(self) -> int:
        """With several optimizers: the number of the one that steps next. Each batch comes once for each of them."""
        return self.run.turns.now

    @property
    def step_number(self) -> int:
        """Steps of the run so far."""
        return self.run.progress.step_number

    @property
    def rows_seen(self) -> int:
        """Rows of all epochs so far, over all workers."""
        return self.run.progress.rows_seen

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far because they were not finite."""
        return self.run.progress.at.skipped

    @property
    def stopping(self) -> bool:
        """Whether every worker has agreed to stop after the step that is done."""
        return self.run.progress.stopping

    @property
    def last_step(self) -> StepDone | None:
        """The last step that was applied. It is the same on every worker, also on one that had no rows of it."""
        return self.run.events.last_step

    @property
    def last_epoch(self) -> EpochDone | None:
        """The proof of the last epoch: `last_epoch.sentence`."""
        return self.run.progress.last_epoch

    @property
    def events(self) -> EventLog:
        """Everything that happens in the run: on() hears of it, and `events.emit` tells of something of your own."""
        return self.run.events

    def on(self, kind: type[Heard], callback: Callable[[Heard], None]) -> Callable[[], None]:
        """Calls back on this worker for each event of this kind, of `potluck.events`; `Event`: of every kind.

        Call what it returns to stop listening. The step waits for the callback. One that fails is said once and not
        called again, and the run continues; one that raises an error of ours, such as Interrupted, ends the run.
        """
        return self.run.events.on(kind, callback)

    @property
    def after_step(self) -> list[Callable[[], None]]:
        """Functions that are called on every worker once per step of the run, also for a step in which it had no rows.
        Under Cadence and Async they are called for all steps of a window when it has ended, with the agreed weights."""
        return self.run.after_step

    @property
    def after_agreement(self) -> list[Callable[[], None]]:
        """Functions that are called on every worker when all hold the same weights again: after each step or window."""
        return self.run.after_agreement

    @property
    def state(self) -> UserState:
        """Values of your own, kept beside the model: saved, sent to newcomers, and restored by load()."""
        return self.run.state

    def kept(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Keeps an object of yours in `fleet.state[name]`: `fleet.kept("ema", ema.state_dict, ema.load_state_dict)`.

        `save()` is asked for it whenever a checkpoint or a newcomer needs it. `load(value)` is called on every worker
        whose run was put somewhere else, by load() or by a host, with None if nothing was saved under the name.
        """
        self.run.state.add_pair(name, save, load)

    # For whoever writes a trainer

    @property
    def loop(self) -> Loop:
        """Settings that the loop gives the run: its end, the shape of its learning rate, and what a host shows of
        it."""
        return self.run.loop

    @property
    def setup(self) -> Wanted:
        """Options that init() was called with: `setup.policy`, `strategy`, `stages` and `wire`."""
        return self.run.wanted

    @property
    def position(self) -> Position:
        """Where the run stands in its data: `position.epoch`, and `position.row` of that epoch's order."""
        return self.run.progress.position

    @property
    def ranks(self) -> int:
        """How many processes a group has; under a host, how many are this worker together."""
        return self.run.link.world

    @property
    def is_prepared(self) -> bool:
        """Whether prepare() has been called."""
        return self.run.replica is not None

    @property
    def is_split(self) -> bool:
        """Whether this worker holds only parts of the model between two steps."""
        return self.is_prepared and (self.run.prepared().gathers or self.run.wanted.stages is not None)

    @property
    def is_restored(self) -> bool:
        """Whether this worker was killed and restarted, and stands where it was while the run continued."""
        return self.run.keeper is not None and self.run.keeper.is_restored

    @property
    def loaded_from(self) -> Path | None:
        """The checkpoint that load() has found."""
        return self.run.loaded_from

    @property
    def speaks(self) -> bool:
        """Whether this worker shows the run to a person."""
        return self.run.speaks

    def notice(self, sentence: str) -> None:
        """Tells a person of something that is not as they may think; the run continues."""
        self.run.notice(sentence)

    def has_passed(self, every: int) -> bool:
        """Whether a multiple of this many steps came with the last agreement: under Cadence and Async that may be many
        steps at once. For what is due now and then, in after_agreement."""
        return self.step_number // every > self.run.progress.steps_before // every

    def autocast(self) -> AbstractContextManager[Any]:
        """Computes in the precision of `StepConfig`, for code beside the loss function that should do so too."""
        return autocast(self.run.device, self.run.config)

    @property
    def clip(self) -> float | None:
        """The largest norm that the whole gradient may have; None: it is not clipped."""
        return self.run.config.clip

    @clip.setter
    def clip(self, norm: float | None) -> None:
        if norm != self.run.config.clip and self.run.wanted.has_host:
            raise ConfigError(
                "Under a host all workers clip alike from the first step: say so in StepConfig(clip=...)."
            )
        self.run.config = replace(self.run.config, clip=norm)

    @property
    def lr_factor(self) -> Callable[[int], float] | None:
        """A function from rows seen to the share of its peak that the learning rate has; None: the rate is yours."""
        return self.run.loop.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: Callable[[int], float] | None) -> None:
        self.run.loop.lr_factor = factor
