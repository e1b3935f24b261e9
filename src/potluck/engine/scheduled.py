"""A torch LRScheduler that stands where the run does: as if it had been stepped once for each step of the run.

Where workers step by themselves, each moves it within a window as if all were as far as itself, and all put it where
the run stands when they agree. Then it goes back, which no scheduler can: it is put as it was when the window began.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from potluck.agree.turns import Turns
from potluck.errors import CheckpointError, ConfigError
from potluck.save.state import Tensors, flatten, unflatten

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts

WHOSE = "The scheduler's "


@dataclass(slots=True)
class _Look:
    """The scheduler at a step, and what it has set in the optimizer: some compute the next rate from the last."""

    steps: int
    state: dict[str, Any]
    groups: list[dict[str, Any]]


class RunScheduler:
    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer) -> None:
        _check_fit(scheduler, optimizer)
        self.scheduler = scheduler
        self._plain_step = type(scheduler).step
        self._plain_class, self._own_class = type(scheduler), _without_steps(type(scheduler))
        scheduler.__class__ = self._own_class
        self.steps = 0
        """How many times it has been stepped."""
        self._first = self._look()
        self._window: _Look | None = None
        """As it was when the window began that is open."""
        self.save({})  # what it cannot keep is said before anything is trained

    def release(self) -> None:
        """Its step() is its owner's to call again, unless somebody has changed it since."""
        if type(self.scheduler) is self._own_class:
            self.scheduler.__class__ = self._plain_class

    def go_to(self, steps: int) -> None:
        """Set the scheduler as it is before step number `steps` of the run, counted from 0."""
        if steps < self.steps:
            self._put(self._window if self._window is not None and self._window.steps <= steps else self._first)
        while self.steps < steps:
            self._step()

    def begin_window(self) -> None:
        """Also again, where this worker takes over another's part of the same window."""
        if self._window is None:
            self._window = self._look()

    def agree(self, steps: int) -> None:
        """All workers agree again, after this many steps of the run."""
        if self._window is not None:
            self._put(self._window)
            self._window = None
        self.go_to(steps)

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Save the state as of the last agreement, as JSON; tensors in it go into `tensors`."""
        look = self._window or self._look()
        return {
            "class": type(self.scheduler).__name__,
            "steps": look.steps,
            "state": flatten(look.state, "state", tensors, WHOSE),
            "groups": flatten(look.groups, "groups", tensors, WHOSE),
        }

    def load(self, saved: dict[str, Any] | None, tensors: Tensors, steps: int) -> None:
        """Load a state. For a checkpoint that has none, the scheduler stands where it would if it had been there from
        the start."""
        self._window = None
        if saved is None:
            self._put(self._first)
            self.go_to(steps)
        elif abs(saved["steps"] - steps) > 1:  # it may come over the network, and be stepped to where the run stands
            raise ValueError(f"its scheduler is at step {saved['steps']}, and the run at {steps}")
        else:
            self._put(_Look(saved["steps"], unflatten(saved["state"], tensors), unflatten(saved["groups"], tensors)))

    def check(self, saved: dict[str, Any] | None, source: str) -> None:
        mine = type(self.scheduler).__name__
        if saved is not None and saved["class"] != mine:
            raise CheckpointError(
                f"{source} holds the state of a {saved['class']}, and this run's scheduler is {mine}."
            )

    def _step(self) -> None:
        with warnings.catch_warnings():
            # A step that was skipped, or that others took, is a step all the same: torch cannot know of it.
            warnings.filterwarnings("ignore", "(?s).*(optimizer.step|lr_scheduler.step)")
            try:
                self._plain_step(self.scheduler)
            except ValueError as error:
                raise ConfigError(
                    f"The scheduler {type(self.scheduler).__name__} does not go beyond step {self.steps} of the run:"
                    f" {error}"
                ) from None
        self.steps += 1

    def _look(self) -> _Look:
        groups = self.scheduler.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return _Look(self.steps, copy.deepcopy(self.scheduler.state_dict()), copy.deepcopy(settings))

    def _put(self, look: _Look) -> None:
        known = self.scheduler.state_dict().keys()  # of another version of torch there may be others
        state = {name: value for name, value in copy.deepcopy(look.state).items() if name in known}
        for name, mine in vars(self.scheduler).items():
            if isinstance(mine, Counter) and name in state:  # JSON has dictionaries alone
                state[name] = Counter(state[name])
        self.scheduler.load_state_dict(state)
        groups = self.scheduler.optimizer.param_groups
        for group, settings, first in zip(groups, look.groups, self._first.groups, strict=True):
            for name in settings.keys() & first.keys():
                value = copy.deepcopy(settings[name])
                if isinstance(group.get(name), Tensor):  # others may hold it
                    group[name].copy_(value)
                else:
                    group[name] = value
        self.steps = look.steps


class TurnSchedulers:
    """One for each optimizer that has one, each stepped once for each turn of its own; or with every step, where all
    optimizers step together."""

    def __init__(self, schedulers: Sequence[RunScheduler | None], turns: Turns) -> None:
        self._each = {str(turn): each for turn, each in enumerate(schedulers) if each is not None}
        self._turns = turns

    def _own(self, steps: int) -> Iterator[tuple[RunScheduler, int]]:
        last = self._turns.count - 1
        return ((each, self._turns.steps_of(min(int(turn), last), steps)) for turn, each in self._each.items())

    def go_to(self, steps: int) -> None:
        for each, own in self._own(steps):
            each.go_to(own)

    def release(self) -> None:
        for each in self._each.values():
            each.release()

    def begin_window(self) -> None:
        for each in self._each.values():
            each.begin_window()

    def agree(self, steps: int) -> None:
        for each, own in self._own(steps):
            each.agree(own)

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        tensors_of_turn: dict[str, Tensor] = {}
        for turn, each in self._each.items():
            saved[turn] = each.save(tensors_of_turn)
            keys = {key: f"turn {turn}/{key}" for key in tensors_of_turn}
            tensors |= {keys[key]: tensor for key, tensor in tensors_of_turn.items()}
            tensors_of_turn.clear()
        return saved

    def load(self, saved: dict[str, Any] | None, tensors: Tensors, steps: int) -> None:
        for (turn, each), (_, own) in zip(self._each.items(), self._own(steps), strict=True):
            each.load((saved or {}).get(turn), _OfTurn(tensors, turn), own)

    def check(self, saved: dict[str, Any] | None, source: str) -> None:
        for turn, each in self._each.items():
            each.check((saved or {}).get(turn), source)


class _OfTurn:
    """The tensors of one turn's scheduler among those of all."""

    def __init__(self, tensors: Tensors, turn: str) -> None:
        self._tensors, self._turn = tensors, turn

    def __getitem__(self, name: str, /) -> Tensor:
        return self._tensors[f"turn {self._turn}/{name}"]


Scheduled = RunScheduler | TurnSchedulers


BEYOND_PEAK = 1 / 3
"""A replica's rate may exceed the peak of its schedule by this power of what would make up for its noise."""


class Rates:
    """The learning rate of a run: its scheduler's, or a function's of the rows seen, or its owner's."""

    def __init__(self, run: "RunParts") -> None:
        self._run = run

    @property
    def now(self) -> float:
        return float(self._run.prepared().optimizer.param_groups[0]["lr"])

    def set(self, rows: int, step: int | None = None) -> None:
        """Sets the rate of the step that is being applied. `rows`: of all workers, by its end. `step`: the number of
        it, counted from 0, if that does not follow from them."""
        scheduled, factor = self._run.scheduled, self._run.loop.lr_factor
        if scheduled is not None:
            scheduled.go_to(self._run.progress.step_of_schedule(rows) if step is None else step)
        if factor is not None:
            for group in self._run.prepared().optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor(rows)

    @contextmanager
    def stretched(self, stretch: float) -> Iterator[None]:
        """The rate is so many times as high meanwhile, but not much higher than the peak of its schedule.

        Where it has none, it is left alone.
        """
        groups = self._run.prepared().optimizer.param_groups if stretch > 1 else []
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

    def agree(self) -> None:
        """All stand at the same step again."""
        if self._run.scheduled is not None:
            self._run.scheduled.agree(self._run.progress.whole_steps)


def _without_steps(kind: type[LRScheduler]) -> type[LRScheduler]:
    """Make a class whose step() does nothing, for a loop that calls it out of habit: once for each step of the run is
    enough. Not by an attribute of its own, which a scheduler would save."""
    own = {"step": lambda self, *told, **more: None, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), own)


def _check_fit(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau is stepped with a loss, and scheduler= is for those that count steps. Leave it out of"
            " prepare() and call it yourself after each look, on every worker: plateau.step(fleet.evaluate(...))."
        )
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(f"scheduler= takes a torch.optim.lr_scheduler.LRScheduler, not a {type(scheduler).__name__}.")
    if scheduler.optimizer is not optimizer:
        raise ConfigError("The scheduler is of another optimizer. Make it from the one that prepare() gets.")
