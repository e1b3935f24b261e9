"""RunProgress: where a run stands, what of its epoch was trained here, and whether it is over.

It is the same on every worker, or is made so. Nothing else moves the position.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from potluck.agree.records import Position, Range, RunTerms
from potluck.events import EpochDone
from potluck.fleet.ledger import Ledger

if TYPE_CHECKING:
    from potluck.engine.run_parts import RunParts


class RunProgress:
    def __init__(self, run: "RunParts") -> None:
        self._run = run
        self.at = Position()
        self.moves = 0
        """How often it has moved. It may have come back to where it was."""
        self.steps_before = 0
        """Steps of the run by the agreement before the last one."""
        self._shown_step: int | None = None
        """While after_step runs for each step of a window: which of them that is."""
        self.ledger = Ledger()
        self.last_epoch: EpochDone | None = None
        """The proof of the last epoch: `last_epoch.sentence`."""
        self.wants_stop = False
        self.stopping = False
        """Whether every worker has agreed to stop after the step that is done."""
        self.finishes = False
        """Whether the run ends as if it were done, and is not interrupted: as far as this worker has asked or heard."""

    # Where it stands

    @property
    def position(self) -> Position:
        """Where the run stands; at an epoch's end, that is the beginning of the next."""
        loader = self._run.loader
        assert loader is not None
        return self.at.next_epoch() if self.at.row >= loader.rows else self.at

    @property
    def step_number(self) -> int:
        return self.at.step if self._shown_step is None else self._shown_step

    @property
    def rows_seen(self) -> int:
        return self.at.rows_seen

    @property
    def terms(self) -> RunTerms:
        loader, turns, is_sync = self._run.loader, self._run.turns.count, self._run.wanted.policy.steps_together
        if loader is None:
            return RunTerms(turns=turns, is_sync=is_sync)
        return RunTerms(rows=loader.rows, batch=loader.batch.size, turns=turns, is_sync=is_sync)

    @property
    def is_at_the_end(self) -> bool:
        limit = self._run.loop.rows_limit
        return limit is not None and self.rows_seen >= limit

    @property
    def whole_steps(self) -> int:
        """Steps of the run that are done: one of which some rows are still to do counts for step_number alone."""
        loader = self._run.loader
        if loader is None or self._run.wanted.policy.steps_together:
            return self.step_number
        row, size = self.at.row, loader.batch.size
        return self.step_number - self._run.turns.count * (row % size > 0 and row < loader.rows)

    def step_of_schedule(self, rows: int) -> int:
        """Return the step of the run, counted from 0, in which these rows of it end."""
        loader, turns = self._run.loader, self._run.turns
        if loader is None or (ahead := rows - self.rows_seen) <= 0:
            return self.step_number - 1
        row, size = self.at.row, loader.batch.size
        batches = -(-(row + ahead) // size) - -(-row // size)
        return self.step_number + (batches - 1) * turns.count + turns.now

    # What moves it

    def seek(self, position: Position) -> None:
        """Moves the run elsewhere."""
        self.at, self.moves = position, self.moves + 1
        self._run.turns.go_to(position.turn)

    def agreed(self, rows: int, *, end: int | None = None) -> None:
        """All have agreed: as Position.after() has it."""
        self.at, self.moves = self.at.after(rows, self.terms, end=end), self.moves + 1

    def skipped_steps(self, steps: int, rows: int = 0) -> None:
        self.at = self.at.skip(steps, rows)

    def each_step_since(self, before: int) -> Iterator[int]:
        """Shows each step after these as the one that was just done, and then the last."""
        self.steps_before = before
        try:
            for number in range(before + 1, self.at.step + 1):
                self._shown_step = number
                yield number
        finally:
            self._shown_step = None

    def prove(self, epoch: EpochDone) -> None:
        self.last_epoch = epoch

    def begin_ledger(self, ranges: Sequence[Range] = ()) -> None:
        """A new epoch is counted; or the rest of one of which these rows are done."""
        self.ledger = Ledger(list(ranges))

    # Whether it is over

    def ask_to_stop(self) -> None:
        """This worker wishes that all stop, or that it may leave."""
        self.wants_stop = True

    def ask_to_finish(self) -> None:
        """Wherever the run stops, it is done."""
        self.finishes = True

    def stop(self) -> None:
        """All workers stop after the step that is done; or the run is over for this one."""
        self.stopping = True

    def continue_(self) -> None:
        """The run has gone back behind the end at which it stopped."""
        self.stopping = False
