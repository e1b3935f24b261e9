"""Trainer: a whole run from one call, on the engine that your own loop would use.

    potluck.Trainer(model, optimizer, dataset, loss=loss_of, batch_size=32, folder="runs/mine").fit()

`loss(model, batch)` gives the mean over the batch's rows, or (mean, samples) to count in something else.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from potluck import BatchConfig, CheckpointConfig, Engine, init
from potluck.data.source import held_out
from potluck.devices import name_of
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.events import (
    CheckpointSaved,
    EpochDone,
    Event,
    EventFile,
    Listener,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
    loss_among,
)
from potluck.save.checkpoint_folder import best_of, found, holds_any
from potluck.save.run_folder import check_room, hold, make_run_folder, point_page_to
from potluck.show.progress import Progress
from potluck.signals import on_interrupt
from potluck.trackers.known import name_fault
from potluck.trackers.reporter import Tracking
from potluck.train.schedule import ScheduleConfig
from potluck.validations import Validations, needs_loss
from potluck.words import check_at_least, check_at_most, plural

LossFunction = Callable[[nn.Module, Any], Any]
"""Gives the mean loss over a batch's rows, or (mean loss, number of samples) where rows are not what is counted."""
VALIDATIONS = "trainer.validations"
"""Key under which fleet.state keeps the validations: saved, sent to newcomers, and found again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitConfig:
    """How long a run is, and what it does on the way."""

    epochs: int = 1
    """Passes over the data; in each, every row is used exactly once."""
    max_steps: int | None = None
    """Stop after this many steps, even within an epoch."""
    validate_every: int | None = None
    """Steps between two validations; None: at the end of each epoch."""
    patience: int | None = None
    """End the run after this many validations in a row whose loss was not the lowest so far; None: never."""
    ema: float | None = None
    """Keep an average of the weights, of which this much stays at each step, such as 0.999, and validate with it."""
    unit: str = "rows"
    """The unit in which the loss function counts samples; it is only shown."""
    schedule: ScheduleConfig | None = None
    """How the learning rate changes over the run; None: it does not."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, and how much to keep."""
    seed: int = 0
    """Seeds the order of rows and each worker's random numbers."""
    track: tuple[str, ...] = ()
    """Trackers to which the run is reported: "tensorboard", "wandb", "mlflow", "trackio", "otel"."""
    tensorboard: bool = False
    """Adds "tensorboard" to track."""
    progress: bool = True
    """Show the run in the terminal."""

    def __post_init__(self) -> None:
        check_at_least(1, epochs=self.epochs, max_steps=self.max_steps, validate_every=self.validate_every)
        check_at_least(1, patience=self.patience)
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, such as 0.999, not {self.ema}")
        check_at_most("epochs", self.epochs, 10**6, "to end a run after some steps, set fit.max_steps")
        check_at_most("max_steps", self.max_steps, 10**12, "leave it out for no limit but the epochs")
        if fault := next(filter(None, map(name_fault, self.track)), None):
            raise ValueError(fault)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be at least 0 and below 2**63, not {self.seed}")


@dataclass
class Summary:
    """The result of a run."""

    folder: Path
    steps: int = 0
    rows_seen: int = 0
    seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The figures of the last validation, where its function gave names."""
    best_loss: float | None = None
    """The lowest validation loss."""
    best: Path | None = None
    """Checkpoint of the best validation, if checkpoint.best was asked for; under a host it is in the host's folder."""
    skipped: int = 0
    checkpoint: Path | None = None
    epochs: list[str] = field(default_factory=list)
    """Each epoch's proof that every sample was used once, as a sentence."""

    def __call__(self, event: Event) -> None:
        match event:
            case StepDone():
                self.loss = event.loss
            case Validated():
                self.validation_loss, self.metrics = event.loss, event.metrics
            case EpochDone():
                self.epochs.append(event.sentence)
                if event.used != event.total:
                    raise PotluckError(f"{event.sentence} That is a fault in Potluck; please report it.")
            case CheckpointSaved():
                self.checkpoint = Path(event.folder)


class Trainer:
    """A whole run from one call: progress, validation, checkpoints, Ctrl-C and resuming included.

        Trainer(model, optimizer, dataset, loss=loss_of, batch_size=32, folder="runs/mine").fit()

    `loss(model, batch)` gives the mean loss over the batch's rows, or (mean, samples) to count something else.
    `validate(model, batch)` gives what is wanted of the `validation` rows: a loss, or a dictionary of means by name,
    such as {"loss": ..., "accuracy": ...}; without it that is the loss.
    `callbacks` are functions that hear every event of the run (potluck.events) on every worker. One may call
    engine.request_stop(), which stops the run as Ctrl-C does; one that fails ends it.
    `batch_size` is the rows of one step over all workers together. `engine` is the handle that init() returned;
    without one, the trainer calls init().
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        loss: LossFunction,
        batch_size: int | BatchConfig | None = None,
        folder: str | Path,
        validation: Any = None,
        validate: LossFunction | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        callbacks: Sequence[Listener] = (),
        rows: int | None = None,
        engine: Engine | None = None,
        config: FitConfig = FitConfig(),
    ) -> None:
        self.engine = engine or init()
        self._loop = self.engine.loop
        self._loop.has_trainer = True
        self.loss = loss
        self.validate = validate or loss
        self.folder = Path(folder)
        self.config = config
        batch = _batch(batch_size, has_own=isinstance(dataset, DataLoader))
        self.model, self.optimizer, self._loader = self.engine.prepare(
            model,
            optimizer,
            dataset,
            batch_size=batch.size if batch_size is not None else None,
            micro_batch_size=batch.micro_size,
            fetchers=batch.fetchers,
            slices=batch.slices,
            collate=collate,
            rows=rows,
            seed=config.seed,
            loss=loss,
        )
        self.batch = replace(batch, size=self._loader.batch.size, fetchers=self._loader.batch.fetchers)
        self._validation = None
        if validation is not None:
            self._validation = held_out(validation, batch.micro_size or self.batch.size, self._loader.collate)
        self.steps_total, self.rows_total = self._length()
        if (schedule := config.schedule) is not None:
            self._loop.lr_factor = lambda rows_seen: schedule.factor(rows_seen, self.rows_total)
            told = asdict(schedule) | {"rows": self.rows_total}
            self._loop.training |= {f"schedule.{name}": value for name, value in told.items()}
        self._loop.rows_limit = self.rows_total
        self.summary = Summary(self.folder)
        self.average = self.engine.ema(config.ema) if config.ema is not None else None
        self.callbacks = callbacks
        self._validations = Validations()
        self.engine.kept(VALIDATIONS, lambda: asdict(self._validations), self._take_validations)
        self._validated_at = self._loop.memo.get("validated_at", -1)
        self._saved_at = self._loop.memo.get("saved_at", -1)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def fit(self, *, resume: bool = False) -> Summary:
        """Trains until the end, or until Ctrl-C, which saves first. `resume` continues from the newest checkpoint."""
        engine = self.engine
        started = time.perf_counter()
        self._loop.about = asdict(self._run_started())
        outlived = engine.is_restored  # then it stands where it resumes already
        resume = resume or outlived
        with self._listening(resume=resume), on_interrupt(engine.interrupt):
            if not (outlived or ((resume or engine.is_led) and self._load())):
                engine.seed_random(self.config.seed)
            engine.events.emit(self._run_started())
            reason = "failed"
            try:
                self._run()
                reason = "finished" if self._is_over or engine.is_finished else "interrupted"
            except BaseException as error:
                reason = str(error) or type(error).__name__
                raise
            finally:
                self._emit_end(reason, time.perf_counter() - started)
        if reason == "interrupted":
            self._leave()
        return self.summary

    def _leave(self) -> NoReturn:
        """Says where the run is saved; our launcher does so itself."""
        raise self.engine.interrupted(f"Saved in {self.summary.checkpoint}." if self.engine.keeps_folder else "")

    def _run(self) -> None:
        self.model.train()
        self.engine.after_agreement.append(self._after_agreement)
        most, steps = self.config.max_steps, self.engine.step_number
        if most is not None and steps >= most and not self.engine.is_led:
            self.engine.notice(
                f"This run has done {plural(steps, 'step')}, and fit.max_steps is {most:,}: nothing is left to train."
                " Raise it to continue the run."
            )
        try:
            while True:
                self._train_epochs()
                if is_over := self._is_over:
                    self._validate()
                self._keep()
                if self._is_over or not is_over:  # else the run has gone back meanwhile, and is trained on
                    return
        finally:
            self.engine.after_agreement.remove(self._after_agreement)

    def _train_epochs(self) -> None:
        for _ in self.engine.passes(self.config.epochs, self._keep):
            if self._is_over:  # it has as many steps as it may
                break
            for batch in self._loader:
                self.engine.train(self.loss, batch)
                self.engine.step()

    def _keep(self) -> None:
        self._save()
        self.engine.wait_for_saves()

    @property
    def _is_over(self) -> bool:
        steps, epochs = self.engine.step_number, self._loader.position.epoch
        if self._has_stopped_early:
            return True
        return epochs >= self.config.epochs or steps >= (self.config.max_steps or steps + 1)

    def _length(self) -> tuple[int, int]:
        """How many steps and rows the run has by its end, from where it stands now."""
        position, rows, size = self._loader.position, self._loader.rows, self.batch.size
        steps, rows_seen = self.engine.step_number, self.engine.rows_seen
        left = (self.config.max_steps or 1 << 62) - steps
        begun = 0 if self.engine.setup.policy.steps_together else -position.row % size  # of a batch that counts already
        for epoch in range(position.epoch, self.config.epochs):
            rows_left = rows - (position.row if epoch == position.epoch else 0)
            taken = max(0, min(left, -(-(rows_left - begun) // size)))
            steps, left = steps + taken, left - taken
            rows_seen += min(rows_left, taken * size + begun)
            begun = 0
            if left <= 0:
                break
        return steps, rows_seen

    def _load(self) -> bool:
        """The optimizer's state comes from the checkpoint; its settings are those that this run was given."""
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if not self.engine.load(self.checkpoints):
            return False
        for group, given in zip(self.optimizer.param_groups, settings, strict=True):
            group.pop("initial_lr", None)
            group.update(given)
        self.steps_total, self.rows_total = self._length()
        self._loop.rows_limit = self.rows_total
        self._saved_at = self.engine.step_number
        self.summary.checkpoint = self.engine.loaded_from
        return True

    def _after_agreement(self) -> None:
        """Run on every worker alike, so that what follows may talk to the others."""
        at_end_of_epoch = self._loader.position.row == self._loader.rows
        every = self.config.validate_every
        if not self.engine.stopping and (at_end_of_epoch if every is None else self.engine.has_passed(every)):
            self._validate()
        if self.engine.is_replaying and not self._has_stopped_early:
            return
        if self.config.checkpoint.every is not None and self.engine.has_passed(self.config.checkpoint.every):
            self._save()
        if self._is_over:
            self.engine.end()

    def _validate(self) -> None:
        looked_at = self._validation
        if looked_at is None or not len(looked_at.rows) or self._validated_at == self.engine.step_number:
            return
        self._validated_at = self._loop.memo["validated_at"] = self.engine.step_number
        is_best = False
        if not self.engine.is_replaying:
            is_best = self._look()
        if self.engine.is_led:  # a newcomer has missed what the others found while it caught up
            self._validations.follow(_rows_of(self.engine.gather(asdict(self._validations))))
            self._note_best()
        if is_best and self.config.checkpoint.best:
            self._save()
        if self._has_stopped_early:
            self._tell_of_early_end()

    def _look(self) -> bool:
        """Whether the loss is the lowest so far."""
        looked: float | dict[str, float] = self.engine.evaluate(self.validate, self._validation)
        metrics = looked if isinstance(looked, dict) else {}
        step, loss = self.engine.step_number, loss_among(looked)
        self.engine.events.emit(Validated(step=step, loss=loss, metrics=metrics))
        is_best = self._validations.take(step, loss)
        self._note_best()
        if loss is None and (self.config.checkpoint.best or self.config.patience is not None):
            self._keep()
            raise ConfigError(needs_loss(list(metrics)))
        return is_best

    @property
    def _has_stopped_early(self) -> bool:
        return self._validations.is_out_of(self.config.patience)

    def _tell_of_early_end(self) -> None:
        known, engine = self._validations, self.engine
        engine.end()
        engine.notice(
            f"Stopped after step {engine.step_number:,}: of the last {plural(known.since_best, 'validation')} none was"
            f" better than {known.best:.4f}, at step {known.best_step:,}."
        )

    def _take_validations(self, known: dict[str, Any] | None) -> None:
        """The run was put somewhere else."""
        self._validations = Validations(**(known or {}))
        self._note_best()

    def _note_best(self) -> None:
        found = self._validations
        self.summary.best_loss = found.best_loss
        self._loop.best = (found.best_step, found.best) if self.config.checkpoint.best else None

    def _save(self) -> None:
        if self._saved_at != self.engine.step_number:
            self._saved_at = self._loop.memo["saved_at"] = self.engine.step_number
            self.engine.save(self.checkpoints, keep_last=self.config.checkpoint.keep_last)

    def _run_started(self) -> RunStarted:
        engine = self.engine
        return RunStarted(
            name=self.folder.name,
            folder=str(self.folder),
            workers=engine.world,
            device=str(engine.device),
            parameters=engine.parameters,
            unit=self.config.unit,
            batch_size=self.batch.size,
            steps_total=self.steps_total,
            from_step=engine.step_number,
            layout=engine.layout,
            strategy=engine.setup.strategy.kind,
            policy=engine.setup.policy.kind,
            wire=engine.setup.wire,
            device_name=name_of(engine.device),
            flops_per_sample=self._loop.flops_per_sample,
            settings=dict(self._loop.training),
        )

    def _emit_end(self, reason: str, seconds: float) -> None:
        summary, engine = self.summary, self.engine
        summary.steps, summary.rows_seen = engine.step_number, engine.rows_seen
        summary.seconds, summary.skipped = seconds, engine.skipped
        if engine.keeps_folder:
            summary.best = best_of(found(self.checkpoints))
        engine.events.emit(
            RunEnded(
                reason=reason,
                step=summary.steps,
                rows_seen=summary.rows_seen,
                seconds=seconds,
                loss=summary.loss,
                validation_loss=summary.validation_loss,
                skipped=summary.skipped,
            )
        )

    @contextmanager
    def _listening(self, *, resume: bool) -> Iterator[None]:
        """Rank 0 alone keeps the run folder, and speaks."""
        listeners = self.engine.events.listeners
        with ExitStack() as stack:
            stack.callback(listeners.__setitem__, slice(None), list(listeners))
            listeners.append(self.summary)
            listeners += [partial(_call, callback) for callback in self.callbacks]
            if self.engine.keeps_folder:
                listeners += self._open_folder(stack, resume=resume)
            if self.config.progress and self.engine.speaks:
                progress = Progress()
                stack.callback(progress.close)
                listeners.append(progress)
            yield

    def _open_folder(self, stack: ExitStack, *, resume: bool) -> list[Listener]:
        """Open the run folder on rank 0, and return its listeners; the stack closes them."""
        if not resume and holds_any(self.checkpoints):
            raise ConfigError(f"{self.folder} already holds a run. Resume it, or name another folder.")
        make_run_folder(self.folder)
        own = list(self.model.parameters())
        trained = sum(parameter.nbytes for parameter in own if parameter.requires_grad)
        frozen = sum(parameter.nbytes for parameter in own if not parameter.requires_grad)
        check_room(self.folder, 3 * trained + (frozen if frozen <= trained else 0))  # a large base is not saved
        stack.enter_context(hold(self.folder))  # before the first line: two runs would write into one file
        file = EventFile(self.folder / "events.jsonl")
        stack.callback(file.close)
        point_page_to(self.folder)  # once it is ours: the page would show the run that has it
        wanted = (*self.config.track, *(["tensorboard"] if self.config.tensorboard else []))
        tracking = Tracking(wanted, self.folder, self.folder / "events.jsonl", self.engine.notice)
        stack.callback(tracking.close)
        return [file, tracking]


def _rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """List each worker's values as a row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _call(callback: Listener, event: Event) -> None:
    try:
        callback(event)
    except (PotluckError, Interrupted):
        raise
    except Exception as error:
        name = getattr(callback, "__name__", type(callback).__name__)
        raise PotluckError(
            f"The callback {name} failed when it heard of {type(event).__name__}: {type(error).__name__}: {error}"
        ) from error


def _batch(size: int | BatchConfig | None, *, has_own: bool) -> BatchConfig:
    """`has_own`: the data say themselves how large their batches are."""
    if isinstance(size, BatchConfig):
        return size
    if size is None and has_own:
        return BatchConfig()
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"batch_size is the rows of a step, a whole number of at least 1, not {size!r}.")
    return BatchConfig(size=size)
