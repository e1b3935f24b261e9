"""Round: the life of a run on one worker, from one agreement of its replicas to the next, written down once.

next(loader) and fleet.step() both advance the story: the first until it gives rows, the second until it has something
to tell. It is the same for every policy, in a group and under a host: what differs is asked of the table
(group_table.py, host_table.py), and how rows are computed of the work (together.py, slice_steps.py, alone.py).

Nothing here holds a context manager across a yield: it would be in force in the user's loop. Nothing else moves the
position forward.
"""

import time
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from potluck.account import Told, tell_with
from potluck.agree.step_report import StepDecision
from potluck.data.plan import MicroBatch
from potluck.engine.run_parts import RunParts
from potluck.engine.table import Give, Outcome, RoundPlan, Table, Wait, Waits
from potluck.errors import ConfigError, PotluckError
from potluck.events import StepDone, StepSkipped, WorkerStep
from potluck.replica.evaluate import STEP_TOO_EARLY, STEP_TWICE, check_mean
from potluck.words import duration


@dataclass(frozen=True, slots=True)
class StepEnd:
    """step() returns."""

    event: StepDone | StepSkipped | None


Story = Generator[Give | StepEnd | Wait, Any, None]
Asked = TypeVar("Asked", Give, StepEnd)


class Round:
    def __init__(self, run: RunParts, table: Table) -> None:
        self._run = run
        self._table = table
        self._story: Story | None = None
        self._open: Give | None = None
        """What was given last, until step() has ended it."""
        self._plan: RoundPlan | None = None
        """The round under way, of which this worker has rows."""
        self._error = ""
        """What has ended the story: nothing can be advanced after it. As words, since an error holds on to its frames,
        and with them to connections."""

        self._waiting: tuple[Wait, float] | None = None
        """The Wait that the story stands at, and since when."""
        own = weakref.ref(self)  # what tells of it must not keep a model in memory

        def tell() -> Told:
            return ("", []) if (alive := own()) is None else alive._account()

        tell_with("round", tell)

    def _account(self) -> Told:
        """For `potluck why`: the Wait that the story stands at, by its name, or in the words of its class."""
        if (now := self._waiting) is None:
            return "", ["The loop computes, or does something of its own."]
        wait, since = now
        what = getattr(wait, "what", "") or (type(wait).__doc__ or type(wait).__name__).splitlines()[0].rstrip(".")
        return "", [f"For {duration(time.monotonic() - since)} the round has waited for: {what}."]

    # The story

    def _rest_of_epoch(self) -> Story:
        table, works, loader = self._table, self._run.works, self._run.loader
        while (plan := (yield from table.plan())) is not None:
            answer: RoundPlan | Outcome | None = plan
            word: StepDone | StepSkipped | None = None
            is_owed = is_void = False  # whether step() waits for a word
            while isinstance(answer, RoundPlan):  # again within a round: rows that a lost worker had
                plan, work = answer, works.begin(answer)
                self._plan = plan if plan.has_rows else None
                if loader is not None and plan.has_rows:
                    work.expect(loader)
                while plan.has_rows and not is_void and (given := work.next()) is not None:
                    if is_owed:
                        yield StepEnd(word)  # step() returns
                    is_void = table.is_void(plan)  # what the loop called in between may have moved the run
                    if is_owed := not is_void:
                        yield given  # next(loader) returns: forward, backward once or often, step()
                        is_void = table.is_void(plan)
                        word = None if is_void else work.end(given.micro)  # into the sums; or an own step
                if is_void:
                    self._run.prepared().restore_buffers()  # a forward may have come after the run was moved
                    work.forget()
                    self._run.step.begin_again()
                answer = None if is_void else (yield from table.agree(plan, work))
            self._plan = None
            if answer is not None:
                event = yield from self._commit(answer)
                word = word or event  # a step of our own that was skipped is told first
            if is_owed:
                yield StepEnd(word)

    def _commit(self, outcome: Outcome) -> Waits[StepDone | StepSkipped]:
        """All have agreed: each applies the same, and stands where the others do."""
        run, table = self._run, self._table
        work = run.works.of(is_together=outcome.is_together)  # one that was given nothing learns the kind here
        steps_before = run.progress.at.step
        if outcome.skipped:
            run.progress.skipped_steps(outcome.skipped, outcome.skipped_rows)
        run.progress.agreed(outcome.rows, end=outcome.end)
        decision = work.apply(outcome)  # a step along the mean gradient, the mean change, or neither
        seconds, workers = yield from table.applied(outcome, decision)
        event: StepDone | StepSkipped
        if decision.fault is None:
            event = self._step_done(decision, seconds, workers)
        else:
            event = run.step.skip(decision, step=run.progress.step_number)
            run.progress.skipped_steps(1, outcome.rows)
        if outcome.epoch is not None:
            run.progress.prove(outcome.epoch)
        if outcome.stops:
            run.progress.stop()
        run.tell(event)  # Diverged after too many bad steps in a row
        run.tell_agreed(steps_before)  # callbacks, which may evaluate, save and gather over the table
        yield from table.end_round()
        run.step.begin()
        return event

    def _step_done(self, decision: StepDecision, seconds: float, workers: tuple[WorkerStep, ...]) -> StepDone:
        progress, loader = self._run.progress, self._run.loader
        return StepDone(
            step=progress.step_number,
            epoch=loader.position.epoch if loader is not None else 0,
            rows_seen=progress.rows_seen,
            samples=decision.samples,
            loss=decision.loss,
            lr=self._run.rates.now,
            grad_norm=decision.norm,
            seconds=seconds,
            workers=workers,
        )

    # What advances it

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This worker's rows of the rest of the epoch, for the loader."""
        with self._table.a_pass():
            while (given := self._next_rows()) is not None and given.micro is not None:
                yield given.micro

    def _next_rows(self) -> Give | None:
        if self._open is not None:  # step() was not called: it may be left out within an accumulation
            self._refuse_without_step(self._open.micro)
            self._advance(StepEnd)
        self._open = self._advance(Give)
        return self._open

    def _refuse_without_step(self, micro: MicroBatch | None) -> None:
        """A forgotten step() would leave the other workers waiting for this one's gradients."""
        if micro is None or self._plan is None or self._is_void or not (micro.last or self._run.works.now.ends_each):
            return
        turn, each = " for one optimizer's turn", ": with several optimizers each batch comes once for each"
        several = self._run.turns.count > 1
        raise ConfigError(
            f"The batch of rows {micro.start} to {micro.end} was given out{turn if several else ''}, but step() was not"
            f" called after it. Call backward() and step() for every batch of the loader{each if several else ''}."
        )

    def backward(self, loss: Tensor, samples: float, last: bool | None) -> None:
        self._run.prepared()
        loss = check_mean(loss, samples)
        if self._open is None and self._run.loader is None:
            self._open = self._advance(Give)  # the loop brings batches of its own: the step begins with the first
        if self._open is None:
            raise ConfigError(
                "backward() takes the loss of a batch that the loader has given. Iterate over the loader that prepare()"
                " gave."
            )
        if self._is_void:  # these rows are to do again, here or elsewhere; step() ends them
            self._run.step.stand_in.close()
            return
        loader = self._run.loader
        micro = loader.current if loader is not None else None
        self._run.works.now.backward(micro, loss, samples, last)

    def step(self) -> StepDone | StepSkipped | None:
        """Too early is an error; twice does nothing."""
        run, loader = self._run, self._run.loader
        run.prepared()
        if self._open is None:
            if loader is None:
                raise ConfigError(STEP_TOO_EARLY if not run.progress.step_number else STEP_TWICE)
            return None
        work, micro = run.works.now, loader.current if loader is not None else None
        if not self._is_void and not work.is_ready(micro):
            is_owed = run.step.tally.is_untouched if micro is None else micro.last or work.ends_each
            if is_owed and (micro is None or micro is not run.step.trained):
                raise ConfigError(STEP_TOO_EARLY)
            return None
        self._open = None
        told = self._advance(StepEnd)
        return told.event if told is not None else None

    @property
    def _is_void(self) -> bool:
        """Whether what the loop has called since it was given rows, such as evaluate(), has moved the run."""
        return self._plan is not None and self._table.is_void(self._plan)

    @property
    def is_under_way(self) -> bool:
        """Whether this worker is within a round, where the others may be elsewhere in it."""
        loader = self._run.loader
        micro = loader.current if loader is not None else None
        return self._plan is not None and self._table.parts_ways(self._plan, micro)

    def _advance(self, wanted: type[Asked]) -> Asked | None:
        if self._error:
            raise PotluckError(f"This run has ended before: {self._error}")
        self._story = self._story or self._rest_of_epoch()
        try:
            request = next(self._story)
            while not isinstance(request, Give | StepEnd):
                self._waiting = request, time.monotonic()
                found = request.wait()
                self._waiting = None
                request = self._story.send(found)
        except StopIteration:  # the epoch is over, or the run stops
            self._story = self._open = None
            return None
        except BaseException as error:
            self._error = str(error) or type(error).__name__
            raise
        assert isinstance(request, wanted), f"The story gives {request}, and {wanted.__name__} was asked for."
        return request
