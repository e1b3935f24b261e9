"""The engine of a run, behind both doors: Trainer, and your own loop.

    fleet = potluck.init()
    model, optimizer, loader = fleet.prepare(model, optimizer, dataset, batch_size=32)
    for epoch in fleet.epochs(3):
        for batch in loader:
            loss = loss_of(model, batch)
            fleet.backward(loss, samples=len(batch))
            fleet.step()

In the last step of an epoch there may be fewer rows than workers; one that has none takes part from within the loader,
and its loop body does not run. What must happen at every step on every worker belongs in `fleet.after_step`; a
learning-rate scheduler is prepare()'s. An optimizer.zero_grad() is not needed, and does nothing.

It is made of a run's state and three parts: the replica says how rows go through it, the table where replicas meet, and
the round is the life of the run over both (round.py).
"""

import atexit
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.policy import ApplyPolicy, Sync
from potluck.composition import Wanted, check_data, compose, settled
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, MicroBatch
from potluck.data.source import AskedData, DataSource, held_out, source_of
from potluck.engine import own_values
from potluck.engine.best import BestSoFar
from potluck.engine.checkpointing import shadow_saving
from potluck.engine.engine_parts import make_replica, over_group
from potluck.engine.eval_weights import WeightAverage
from potluck.engine.handle import Handle
from potluck.engine.prepare import Given, accumulated, of_one_dataset, training_settings, warn_of_single_rows
from potluck.engine.round import Round
from potluck.engine.run_parts import RunParts
from potluck.engine.scheduled import Scheduled
from potluck.engine.table import Table
from potluck.environment import LAST_WORDS
from potluck.errors import ConfigError, Interrupted
from potluck.events import Event, EventFile, StepDone, StepSkipped
from potluck.link.link import Alone, Link
from potluck.replica.compiling import Compiling, expect_any_rows
from potluck.replica.evaluate import LossFunction
from potluck.replica.frozen_base import agree_on_base, find_base
from potluck.replica.model_checks import check_dense, check_model, check_no_writes, find_batch_norm
from potluck.replica.precision import StepConfig, keep_masters
from potluck.replica.replica import Replica
from potluck.save.run_folder import make_run_folder
from potluck.sharding.runs import sees_nothing
from potluck.sharding.strategy import NoShard, ShardingStrategy
from potluck.signals import on_interrupt

Models = TypeVar("Models")
Optimizers = TypeVar("Optimizers")


def _close_loop(loop: weakref.ref[Generator[int, None, None]]) -> None:
    """Closes a loop that a script has left and has a name for: it puts signals back as they were, and once Python has
    taken the modules away it cannot."""
    left = loop()
    if left is not None and getgeneratorstate(left) != GEN_RUNNING:
        left.close()


class Engine(Handle):
    """The handle of a run, made by init(): what a training loop calls. A context manager that closes itself."""

    def __init__(
        self,
        link: Link | None = None,
        device: torch.device | None = None,
        *,
        policy: ApplyPolicy = Sync(),
        strategy: ShardingStrategy = NoShard(),
        step: StepConfig = StepConfig(),
        wanted: Wanted | None = None,
        table: Callable[[RunParts], Table] = over_group,
    ) -> None:
        """`wanted`: what was asked for, if that is more than a policy and a strategy. `table`: where workers
        meet."""
        self.link = link or Alone()
        self.device = device or torch.device("cpu")
        """Where this worker computes."""
        wanted = wanted or Wanted(
            policy=policy,
            strategy=strategy,
            world=self.link.world,
            offload_optimizer=step.offload_optimizer,
            on_gpu=self.device.type == "cuda",
        )
        wanted = settled(wanted)
        self.run = RunParts(self.link, self.device, step, wanted, compose(wanted))
        self.table = table(self.run)
        self.round = Round(self.run, self.table)
        self._compiling: Compiling | None = None
        self._gathered_rows: int | None = None
        """How many rows this worker gave to all_gather() in the step under way."""
        self._is_tracked = False
        self._closing = ExitStack()
        self._folder: Path | None = None
        """The folder that epochs() was given, or load()."""
        self._is_in_epochs = False
        """Whether the loop over epochs() has begun, and has not come to its end."""
        self._on_cut: Callable[[], None] = lambda: None
        """Called where the loop over the loader ends and the epoch does not."""
        self._best = BestSoFar(self)
        self.before_step = []

    @overload
    def prepare(self, model: Models, optimizer: Optimizers, *, scheduler: Any = None) -> tuple[Models, Optimizers]: ...

    @overload
    def prepare(
        self,
        model: Models,
        optimizer: Optimizers,
        dataset: Any,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        micro_batch_size: int | None = None,
        fetchers: int = 0,
        slices: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        rows: int | None = None,
        seed: int = 0,
        loss: LossFunction | None = None,
        scheduler: Any = None,
    ) -> tuple[Models, Optimizers, Loader]: ...

    @of_one_dataset
    def prepare(
        self,
        model: Any,
        optimizer: Any,
        dataset: Any = ...,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        micro_batch_size: int | None = None,
        fetchers: int = 0,
        slices: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        rows: int | None = None,
        seed: int = 0,
        loss: LossFunction | None = None,
        scheduler: Any = None,
    ) -> Any:
        """Prepares model and optimizer, and returns them with a loader of this worker's share of the rows.

        `dataset`: map-style, tensors, a stream, or a DataLoader, whose sampler, collate_fn and workers are used.
        Without one it returns two, and you bring your own batches, whose sizes may differ between workers. (For a
        dataset of None it returns None in its place.)

        - `batch_size`: rows of one step over all workers together, so that numbers do not depend on how many there are;
          None: a DataLoader's own.
        - `accumulate`: batches of batch_size that make one step, as loops for DDP count them: backward() and step() are
          called for each, step() steps with the last, and nothing is divided by their number.
        - `micro_batch_size`: rows that go through the model at once on one worker; None: all of its share.
        - `fetchers`: processes that fetch rows ahead of the model; 0: a DataLoader's own, or none.
        - `slices`: under a host, with Sync: the least number of parts in which a batch is handed out; None: 8.
        - `collate`: makes a batch from a list of rows; None: as torch's DataLoader does.
        - `rows`: how many rows of a stream make an epoch; None: all, by its `len()` or by counting them.
        - `seed`: where the order of rows starts from.
        - `loss`: your loss function, needed only where the model is cut into stages: see train().
        - `scheduler`: any LRScheduler. It is stepped here, once per step of the run under every policy; its own step()
          does nothing any more.

        `model` may be several, as a list or a dict; so may `optimizer`, each with a scheduler (or None) in a list. Then
        each batch comes once for each optimizer, `fleet.turn` says whose turn it is, and step() steps that one alone.
        """
        run = self.run
        if run.replica is not None:
            raise ConfigError(
                "prepare() was called already, and a run has one call of it. Give it several models as a list, or in"
                " one nn.Module, and several optimizers as a list."
            )
        inputs = Given(model, optimizer, scheduler, run.turns)
        model, optimizer = inputs.model, inputs.optimizer
        gives_two, dataset = dataset is ..., None if dataset is ... else dataset
        sizes = {"micro_size": micro_batch_size, "slices": slices}
        micro_batch_size = check_data(run.wanted, **sizes, has_data=dataset is not None, has_loss=loss is not None)
        source: DataSource | None = None
        if dataset is not None:
            asked = AskedData(batch_size=batch_size, collate=collate, fetchers=fetchers, seed=seed, rows=rows)
            source = source_of(dataset, replace(asked, notice=run.notice))
            source, micro_batch_size = accumulated(run, source, accumulate, micro_batch_size)
            self.introduce(model, optimizer, source.dataset, batch_size=source.batch_size, seed=seed)
        replica = self._prepare_model(inputs, source, loss)
        if source is None:
            return inputs.back(replica.model) if gives_two else (*inputs.back(replica.model), None)
        loader = self._prepare_data(source, {"micro_size": micro_batch_size, "slices": slices}, seed)
        return *inputs.back(replica.model), loader

    def _prepare_model(self, inputs: Given, source: DataSource | None, loss: LossFunction | None) -> Replica:
        run, model, optimizer = self.run, inputs.model, inputs.optimizer
        if isinstance(model, nn.Module):
            check_model(model)
            if run.link.world > 1 or run.wanted.has_host or run.composition.split is not None:
                check_no_writes(model)
                check_dense(model)
            if run.wanted.has_host and run.composition.split is None:
                keep_masters(model, optimizer, run.notice)
            run.batch_norm = find_batch_norm(model)
            self._settle_wire(model)
            run.base = agree_on_base(run.link, find_base(model), run.notice)
        wire = run.composition.wire if run.wanted.has_host else run.wanted.wire
        run.loop.training = training_settings(optimizer, run.config.clip, wire) | run.loop.training
        self._schedule_by(inputs.scheduled)
        run.names = tuple(model.state_dict()) if isinstance(model, nn.Module) else ()
        run.begin(replica := make_replica(run, model, optimizer, source, loss))
        replica.adapter.on_own_step = self.step
        hook = optimizer.register_step_pre_hook(sees_nothing(lambda *told: self._call_before_step()))
        replica.on_close.callback(hook.remove)
        if run.scheduled is not None:
            replica.on_close.callback(run.scheduled.release)
        shadow_saving(run, model, self.state_dict, lambda: self.rank)
        run.works = self.table.begin(replica)
        if run.config.compile:
            self._compiling = Compiling(run.say)
        return replica

    def _call_before_step(self) -> None:
        self.run.prepared().outer.early.clear()
        for call in self.before_step:
            call()

    def _schedule_by(self, scheduled: Scheduled | None) -> None:
        run = self.run
        run.scheduled = scheduled
        if scheduled is not None:
            run.kept.add(
                "scheduler",
                scheduled.save,
                lambda saved, tensors: scheduled.load(saved, tensors, run.progress.whole_steps),
            )

    def _settle_wire(self, model: nn.Module) -> None:
        """Refuses to code complex numbers. Of what is not measured: windows code changes of float32 alone."""
        run = self.run
        trained = [each for each in model.parameters() if each.requires_grad]
        if run.wanted.wire != "fp32" and any(map(torch.is_complex, trained)):
            if run.wanted.wire != "auto":
                raise ConfigError(
                    f"A trained parameter is complex, and wire = {run.wanted.wire} codes real numbers. Leave out wire."
                )
            run.composition = replace(run.composition, wire="fp32", wire_is_measured=False)
        if run.wanted.wire != "auto" or run.composition.wire == "fp32":
            return
        if run.composition.window is not None and any(each.dtype != torch.float32 for each in trained):
            run.composition = replace(run.composition, wire="fp32")
        run.notice(f"With wire = auto, what workers agree on travels as {run.composition.wire} here.")

    def _prepare_data(self, source: DataSource, sizes: dict[str, int | None], seed: int) -> Loader:
        run, replica = self.run, self.run.prepared()
        counts: dict[str, Any] = {"size": source.batch_size, "fetchers": source.fetchers, **sizes}
        try:
            batch = BatchConfig(**counts)
        except ValueError as error:
            raise ConfigError(f"batch {error}.") from None
        if batch.slices is not None and not run.wanted.has_host:
            run.notice("batch.slices has no effect here: it cuts the batches that a host hands out.")
        # A power of two, so that it changes no digit of any gradient; it only keeps sums in the range of means.
        run.step.unit = 2.0 ** -round(math.log2(batch.size))
        run.step.scale.learn(run.loop.samples_per_row, 1.0)
        loader = run.loader = self.table.make_loader(source, batch, seed)
        loader.turns = run.turns
        loader.follow_run(lambda: run.progress.at, run.progress.seek)
        if run.config.compile and not (self.table.has_fixed_shares and loader.is_even):
            expect_any_rows(replica.model)
        if run.batch_norm is not None:
            warn_of_single_rows(run.batch_norm, loader, run.grid.pipelines, run.notice)
        loader.on_epoch_end = self.table.end_of_epoch
        loader.on_stand_in = lambda: run.step.stand_in.enter_context(replica.buffers_kept())
        loader.plan = self._micro_batches
        loader.seeds_of = lambda micro: run.works.now.seeds_of(loader.seed, micro)
        run.step.begin()
        if run.keeper is not None:
            run.keeper.begin(replica)  # type: ignore[arg-type]
        return loader

    def _micro_batches(self) -> Iterator[MicroBatch]:
        """This worker's rows of the rest of the epoch."""
        yield from self.round.micro_batches()
        loader, progress = self.run.loader, self.run.progress
        is_cut = progress.stopping and not progress.is_at_the_end
        if is_cut and loader is not None and loader.position.row < loader.rows:
            self._on_cut()

    def introduce(
        self, model: nn.Module, optimizer: Optimizer, dataset: Any, *, batch_size: int, seed: int, **about: Any
    ) -> None:
        """Introduce this worker's model and data before it says anything to the others; where they meet in a store,
        that may be another run's. prepare() does so too. `about`: the run's name, and its folder if one was given
        (`out`)."""
        if self.run.keeper is not None:
            self.run.keeper.introduce(model, optimizer, dataset, about | {"batch_size": batch_size, "seed": seed})

    def epochs(self, count: int, folder: str | Path | None = None) -> Iterator[int]:
        """The epochs of a run that has `count` of them, from where it stands: `for epoch in fleet.epochs(3)`.

        A run that load() has put in the middle, or that this worker has joined there, trains what is left and no more.
        Ctrl-C stops all workers after the step that is under way, saves in `folder` (if there is none, in the one that
        load() was given), and raises Interrupted; the end is saved there too. Under a host it is the host that saves.
        """
        run = self.run
        if run.loader is None:
            raise ConfigError("epochs() counts passes over the dataset: give prepare() one, and a batch_size.")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"epochs() takes how many the run has, a whole number of at least 1, not {count!r}.")
        run.loop.rows_limit = count * run.loader.rows
        run.loop.about |= {"steps_total": count * run.loader.steps_of_epoch * run.turns.count}
        loop = self._care_for(count, Path(folder) if folder is not None else None)
        atexit.register(_close_loop, weakref.ref(loop))
        return loop

    def _care_for(self, count: int, folder: Path | None) -> Generator[int, None, None]:
        self._folder, self._is_in_epochs = folder or self._folder, True
        if self.is_led:  # a script that closes nothing ends its run, too
            atexit.unregister(self._close_at_exit)
            self.close_at_exit()

        def stop_early() -> None:
            """Ctrl-C came, or another word to stop: the loop ends here, and not with what it does after an epoch."""
            if not self.table.finishes():
                self._is_in_epochs = False
                self.table.end_early(folder)

        progress, self._on_cut = self.run.progress, stop_early
        with on_interrupt(self.interrupt):
            yield from self.passes(count, partial(self.table.end_well, folder))
            if progress.position.epoch < count:
                stop_early()
            self._is_in_epochs = False
            self.table.end_well(folder)

    def passes(self, count: int, keep: Callable[[], None]) -> Iterator[int]:
        """Count epochs as epochs() does, for a caller that hears Ctrl-C, saves and shows the run itself. `keep`: saves,
        if it can, what is done before an epoch that cannot be."""
        run, loader = self.run, self.run.loader
        assert loader is not None
        run.loop.counts_epochs = True
        self.table.begin_run(count)
        if not run.step.tally.samples:
            run.step.tally.started = time.perf_counter()  # what came before the loop is no part of its first step
        while True:
            if loader.position.row >= loader.rows:
                loader.end_epoch()
            if self.is_led and loader.position.epoch >= count:
                self.table.end_well(None)  # the run may go back until that is kept, and is trained on then
            if run.progress.stopping or loader.position.epoch >= count:
                return
            loader.check_epoch(keep)
            before = run.progress.moves, loader.given
            yield loader.position.epoch
            if before == (run.progress.moves, loader.given) and not run.progress.stopping:
                raise ConfigError(
                    "An epoch of fleet.epochs() has passed without a step. Iterate over the loader in each of them, and"
                    " call backward() and step() for every batch."
                )

    def train(self, loss_of: LossFunction, batch: Any) -> None:
        """Forward and backward of one batch of the loader, also where the model is cut into stages.

        Then step(). `loss_of(model, batch)` gives the mean loss over the batch's rows, or (mean, samples).
        """
        found = self.run.step.train(loss_of, batch)
        if found is not None:
            self.round.backward(*found, last=None)

    def backward(self, loss: Tensor, *, samples: float | None = None, last: bool | None = None) -> None:
        """Computes the gradient of a mean over `samples`, weighted by them: rows, or tokens, as you count.

        `last` says whether the next call is step(); the loader knows it, and without one it is taken to be so.
        """
        if not self.run.prepared().is_whole:
            raise ConfigError(
                "Stages go forward and backward by themselves: call fleet.train(loss_of, batch) instead of the loss"
                " function and backward()."
            )
        if samples is None:
            raise ConfigError(
                "backward() needs samples=, which is what the loss is a mean over: samples=len(x) for the rows of a"
                " batch, or the number of labelled tokens. Workers with more of them weigh more."
            )
        if self._gathered_rows is not None:
            self._check_gathered(self._gathered_rows, samples)
        self.round.backward(loss, samples, last)

    def _check_gathered(self, rows: int, samples: float) -> None:
        """Check that what all_gather() has gathered weighs what this worker brought of it, and no more."""
        micro = self.run.loader.current if self.run.loader is not None else None
        self._gathered_rows = None
        if samples not in (rows, micro.end - micro.start if micro is not None else rows):
            raise ConfigError(
                f"After fleet.all_gather(), backward() takes samples={rows}, the rows that this worker gave to it, and"
                f" not {samples:g}."
            )

    def step(self) -> StepDone | StepSkipped | None:
        """Steps the optimizer once the step's last micro-batch is done; before that it does nothing.

        All workers apply the mean over all their samples, or skip the step together if it is not finite; or, where
        replicas step by themselves, each does so, and all agree with the last step of a window.
        """
        return self.round.step()

    def print(self, *words: Any, **options: Any) -> None:
        """Print on rank 0 alone."""
        if self.rank == 0:
            print(*words, **options)

    def evaluate(self, loss_of: LossFunction, dataset: Any, batch_size: int | None = None) -> Any:
        """The mean loss over a dataset or a DataLoader, each worker computing its share. Nothing is trained.

        `loss_of(model, batch)` may give a dictionary of means by name, such as {"loss": ..., "accuracy": ...}, or
        (dictionary, samples): then this does too, of floats. `batch_size`: rows that go through the models of all
        workers at once; None: the DataLoader's own.
        """
        own = self.run.loader.collate if self.run.loader is not None else None
        self.run.prepared()
        return self.table.evaluate(loss_of, held_out(dataset, batch_size, own))

    def mean(self, value: Any, weight: float = 1.0) -> Any:
        """The mean of all workers' values, weighted: a number, a tensor, or a dictionary of them. Call it on every
        worker at the same place, after a step or an epoch; all get the same bits.

        A worker whose weight is 0 does not count, whatever its value is. Each rank counts by itself, also those that
        hold parts of one replica: where they give the same value and weight, the mean does not change.
        """
        return own_values.mean(partial(self._exchange, "fleet.mean()"), value, weight)

    def gather(self, value: Any) -> Any:
        """All workers' values in order of rank, on every worker: tensors one after the other along their first
        dimension, which may differ; numbers as a list; of a dictionary, each by its name. Called as mean() is."""
        return own_values.gather(partial(self._exchange, "fleet.gather()"), value)

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all workers in this step, in the order of the batch, with a gradient for this worker's own.

        For losses that compare each row with all others, such as contrastive ones: gather what they compare, compute
        the loss of the whole batch on every worker, and give backward() `samples=` this worker's own rows.
        """
        run, micro = self.run, self.run.loader.current if self.run.loader is not None else None
        if self.is_led or run.composition.window is not None or run.wanted.stages is not None:
            raise ConfigError(
                "fleet.all_gather() needs all workers in each step, and here each takes its steps by itself, or has"
                " some layers alone. Use the Sync policy in a process group, without stages."
            )
        if run.loader is not None and run.loader.batch.micro_size is not None:
            raise ConfigError(
                "fleet.all_gather() gathers the rows of a whole step, and micro-batches come one after the other. Leave"
                " out micro_batch_size."
            )
        self._gathered_rows = len(rows) if rows.dim() else 0
        counts = micro is None or micro.weighs
        return own_values.all_gather(partial(self._exchange, "fleet.all_gather()"), rows, self.rank, counts=counts)

    def _exchange(self, call: str, data: bytes) -> list[bytes]:
        if self.round.is_under_way:
            raise ConfigError(
                "fleet.mean() and fleet.gather() need all workers at the same place, and within a step or a window each"
                " is somewhere else. Call them once fleet.step() has ended one, in fleet.after_step or"
                " fleet.after_agreement, or after an epoch."
            )
        with self.run.link.within(call, self.run.progress.step_number):
            return self.table.exchange(data)

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        """Saves a checkpoint below `folder`: call it on every worker. Under a host it is the host that saves.

        Returns once it is in host memory; the disk is written meanwhile.
        """
        self.table.save(Path(folder), keep_last)

    def state_dict(self) -> dict[str, Any]:
        """All of the model's state on the CPU, under the names that it had before prepare(): call it on every worker.

        Rank 0 gets it, and every other worker an empty one. Where the model is split it is fetched block by block, and
        is never whole on a GPU.
        """
        self.run.prepared()
        return self.table.state_dict()

    def load(self, folder: str | Path) -> bool:
        """Continues from the newest whole checkpoint below `folder`, on any number of workers. False if there is none.

        A run that has just survived a loss stays where it is. Under a host: whether the run is past its beginning.
        """
        self._folder = self._folder or Path(folder)
        return self.table.load(Path(folder))

    def wait_for_saves(self) -> None:
        """Waits until every checkpoint is on the disk: call it on every worker."""
        self.table.wait_for_saves()

    def track(self, *trackers: str, folder: str | Path) -> None:
        """Reports this run to trackers: "tensorboard", "wandb", "mlflow", "trackio" or "otel".

        Call it on every worker: rank 0 alone reports, and under a host nobody here does, since the host can (`potluck
        host --track`). `folder`: where a restart finds by which id each tracker knows the run.
        """
        from potluck.trackers.known import check_names
        from potluck.trackers.reporter import Tracking

        check_names(trackers)
        if not self.keeps_folder or self._is_tracked:
            return
        self._is_tracked = True
        make_run_folder(Path(folder))
        place = Path(folder) / "trackers" / "events.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        file = EventFile(place)
        tracking = Tracking(trackers, Path(folder), place, self.run.notice)

        def write(event: Event) -> None:
            try:
                file(event)
            except ConfigError as error:  # a full disk ends the tracking, and not the run
                raise OSError(str(error)) from None

        self.on(Event, write)
        self.on(Event, tracking)
        self._closing.callback(file.close)
        self._closing.callback(tracking.close)

    def barrier(self) -> None:
        """Waits until every worker is here. Under a host, where workers come and go, it does not wait."""
        self.broadcast(None)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Worker `src`'s value on every worker, of what JSON can hold. Under a host each worker keeps its own."""
        if self.is_led:
            return value
        with self.run.link.within("fleet.broadcast()", self.run.progress.step_number):
            return own_values.broadcast(self.run.link.gather_bytes, value, src)

    def ema(self, decay: float) -> WeightAverage:
        """Keeps an exponential moving average of the weights, of which `decay` stays at each step, such as 0.999.

        Call it once after prepare() and before the first step, on every worker. evaluate() uses it from then on,
        checkpoints hold it, and `with average.applied():` puts it in the weights' place, for what a loop looks at
        itself. It averages parameters, and takes buffers, such as BatchNorm's running statistics, as they are.
        """
        return WeightAverage(self.run, decay)

    def keep_best(self, value: float | dict[str, float], folder: str | Path | None = None) -> bool:
        """Whether this value is the lowest so far; then the checkpoint of this step is saved, and kept for as long as
        none is better. Call it on every worker, with what evaluate() gave: a number, or figures of which one is "loss".

        `folder`: of the run; None: the one that epochs() or load() was given. Under a host it is the host that saves.
        """
        folder = folder or self._folder
        if folder is None and not self.is_led:
            raise ConfigError(
                "keep_best() saves the best checkpoint: name the run's folder, as in fleet.epochs(3, 'runs/mine')."
            )
        return self._best.keep(value, lambda: self.save(folder or "."))

    def early_stop(self, value: float | dict[str, float], *, patience: int) -> bool:
        """Whether the last `patience` values were no better than the best before them. Then the run ends for all, as if
        it were done: the loops over epochs() and the loader end, and what follows them runs. Called as keep_best()."""
        is_over = self._best.is_over(value, patience)
        if is_over:
            self.end()
        return is_over

    def request_stop(self) -> None:
        """Asks all workers to stop together after the step in which they hear of it, also under a host: the run is
        saved, Interrupted is raised on each, and it can be resumed."""
        self.table.stop_all()

    def finish(self) -> None:
        """Asks all workers to end the run together after the step in which they hear of it, as if it were done: it is
        saved, the loops over epochs() and the loader end, and what follows them runs. One worker's word is enough."""
        self.run.progress.ask_to_finish()
        self.table.finish_all()

    def interrupt(self) -> None:
        """Asks for what Ctrl-C on this worker asks for: in a group that all stop, and under a host that it leaves."""
        self.table.request_stop()

    @property
    def is_finished(self) -> bool:
        """Once all stop: whether the run ends as if it were done, and not to be resumed. Ask on every worker."""
        return self.run.progress.stopping and self.table.finishes()

    def end(self) -> None:
        """Ends the run for all workers after the step that is done, also if rows are left: call it on every worker
        alike, in after_step or after_agreement."""
        if not self.run.progress.is_at_the_end:
            self.table.end_for_all()
        self.run.progress.ask_to_finish()
        self.run.progress.stop()

    def interrupted(self, where: str = "") -> Interrupted:
        """The error to raise where a loop ends before the run does: it says after which step, and then `where`."""
        return self.run.interrupted(f"{self.table.last_words()} {where}".strip())

    def seed_random(self, seed: int) -> None:
        """Gives every worker its own random numbers, the same in every run with this seed and this many workers."""
        if not self.is_led:  # work that a host hands out draws its own numbers
            self.run.seed_random(seed)

    def close(self) -> None:
        """Ends what is still being written, and leaves the run."""
        self._close(None)

    def close_at_exit(self) -> None:
        """Closes the handle when the script ends, for loops that do not; a host has the last weights by then."""
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None and self.is_prepared:
            self.table.end_with_script()
        if LAST_WORDS not in os.environ:  # plain Python ends so by sys.exit(1), too, which ends no run for others
            self._is_in_epochs = False
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        atexit.unregister(self._close_at_exit)
        if self._is_in_epochs and error is None and sys.exc_info()[1] is None:
            self._is_in_epochs = False
            self._end_with_loop()
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
        self.table.close(error)
        self._closing.close()

    def _end_with_loop(self) -> None:
        """A loop that was left by break or return has ended the run: under a host for all, and in a group all leave
        theirs alike. What is done is saved, as at any end."""
        if self.is_led and not self.run.progress.stopping:
            self.finish()
        if self.is_led or not self.round.is_under_way:
            self.table.end_well(self._folder)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._close(error)

    # What a loop may ask

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self.table.rank

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0: the one that prints and writes files of your own, so that they are there once.
        Calls that all workers must make, such as save() and evaluate(), do not belong behind it."""
        return self.rank == 0

    @property
    def world(self) -> int:
        """How many workers there are."""
        return self.table.world

    @property
    def is_led(self) -> bool:
        """Whether a host leads this worker: it keeps the run's folder, and hands out the work."""
        return self.run.wanted.has_host

    @property
    def parameters(self) -> int:
        """How many numbers are trained, over all workers that hold parts of them."""
        return self.run.prepared().parameter_count

    @property
    def is_under_way(self) -> bool:
        """Whether this worker is within a step or a window, where the others may be elsewhere in it."""
        return self.round.is_under_way

    @property
    def keeps_folder(self) -> bool:
        """Whether this worker writes the run's folder: rank 0; under a host nobody here, since the host does."""
        return self.rank == 0 and not self.is_led

    @property
    def is_replaying(self) -> bool:
        """Whether the step being applied was taken by others before this worker joined."""
        return self.table.is_replaying

    @property
    def version(self) -> int:
        """Agreements so far."""
        return self.run.progress.at.version
