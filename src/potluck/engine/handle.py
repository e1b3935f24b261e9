"""Handle: what a loop may ask of its run, and hear from it. Knows nothing of how the run computes."""

from collections.abc import Callable
from typing import Any

from potluck.engine.run_state import RunState
from potluck.events import EpochDone, EventLog, Heard, StepDone
from potluck.save.state import UserState


class Handle:
    run: RunState

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
        return self.run.step_number

    @property
    def rows_seen(self) -> int:
        """Rows of all epochs so far, over all workers."""
        return self.run.rows_seen

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far because they were not finite."""
        return self.run.skipped

    @property
    def stopping(self) -> bool:
        """Whether every worker has agreed to stop after the step that is done."""
        return self.run.stopping

    @property
    def last_step(self) -> StepDone | None:
        """The last step that was applied. It is the same on every worker, also on one that had no rows of it."""
        return self.run.events.last_step

    @property
    def last_epoch(self) -> EpochDone | None:
        """What was proved of the last epoch: `last_epoch.sentence`."""
        return self.run.last_epoch

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
        """What you want kept beside the model: saved, sent to newcomers, and restored by load()."""
        return self.run.state

    def kept(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Keeps an object of yours in `fleet.state[name]`: `fleet.kept("ema", ema.state_dict, ema.load_state_dict)`.

        `save()` is asked for it whenever a checkpoint or a newcomer needs it. `load(value)` is called on every worker
        whose run was put somewhere else, by load() or by a host, with None if nothing was saved under the name.
        """
        self.run.state.add_pair(name, save, load)

    @property
    def lr_factor(self) -> Callable[[int], float] | None:
        """A function from rows seen to the share of its peak that the learning rate has; None: the rate is yours."""
        return self.run.caller.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: Callable[[int], float] | None) -> None:
        self.run.caller.lr_factor = factor
