"""BestSoFar: what a loop has told keep_best() and early_stop(): the best value, and how many were not better since.

It is saved with every checkpoint, sent to newcomers, and the same on every worker.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from potluck.engine.own_values import broadcast
from potluck.errors import ConfigError
from potluck.events import LOSS, Validated
from potluck.validations import Validations
from potluck.words import plural

if TYPE_CHECKING:
    from potluck.engine.engine import Engine

Value = float | dict[str, float]


class BestSoFar:
    def __init__(self, fleet: "Engine") -> None:
        self._fleet = fleet
        self._known = Validations()
        fleet.run.kept.add("best so far", lambda tensors: self._saved(), lambda saved, tensors: self._load(saved))

    def _saved(self) -> dict[str, Any] | None:
        return asdict(self._known) if self._known.last_step >= 0 else None

    def _load(self, saved: dict[str, Any] | None) -> None:
        self._known = Validations(**(saved or {}))
        loop = self._fleet.run.loop
        loop.best = loop.best if loop.has_trainer else None  # what was kept may be no more, where the run has gone back

    def _take(self, value: Value, call: str) -> bool:
        """Whether this is the best value so far. keep_best() and early_stop() of one step hear the same value.

        `call`: the one that all workers must make."""
        fleet, known = self._fleet, self._known
        if fleet.is_under_way:
            raise ConfigError(
                "fleet.keep_best() and fleet.early_stop() need all workers at the same place. Call them where you"
                " evaluate: once fleet.step() has ended a step, in fleet.after_agreement, or after an epoch."
            )
        step, figures, loss = fleet.step_number, value if isinstance(value, dict) else {}, _number(value)
        if not fleet.is_led:
            with fleet.run.link.within(call, step):
                loss = float(broadcast(fleet.run.link.gather_bytes, loss, 0))
        if step != known.last_step:
            if not fleet.is_replaying:
                known.take(step, loss)
                fleet.events.emit(Validated(step=step, loss=loss, metrics=figures))
            if fleet.is_led:  # a newcomer has missed what the others found while it caught up
                columns = fleet.gather(asdict(known))
                known.follow([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
        return known.best_step == step

    def keep(self, value: Value, save: Callable[[], None]) -> bool:
        is_best = self._take(value, "fleet.keep_best()")
        if is_best:
            loop, known = self._fleet.run.loop, self._known
            is_saved, loop.best = loop.best == (known.best_step, known.best), (known.best_step, known.best)
            if not is_saved:
                save()
        return is_best

    def is_over(self, value: Value, patience: int) -> bool:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ConfigError(f"patience= is how many values in a row may be no better, at least 1, not {patience!r}.")
        fleet = self._fleet
        self._take(value, "fleet.early_stop()")
        known = self._known
        if not known.is_out_of(patience):
            return False
        if fleet.is_main and not fleet.stopping:
            fleet.notice(
                f"Stopped after step {fleet.step_number:,}: of the last {plural(known.since_best, 'value')} none was"
                f" better than {known.best:.4f}, at step {known.best_step:,}."
            )
        return True


def _number(value: Any) -> float:
    """The value that is compared, of which lower is better."""
    if isinstance(value, dict):
        if LOSS not in value:
            raise ConfigError(
                f"fleet.keep_best() and fleet.early_stop() go by a value of which lower is better, and this has"
                f' {", ".join(value)}. Give one of them, or name it "loss"; of an accuracy that is 1 - accuracy.'
            )
        value = value[LOSS]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"fleet.keep_best() and fleet.early_stop() take a number, not {value!r}.") from None
