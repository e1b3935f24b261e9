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

It knows where the run stands (step, rows, position in the epoch) and makes every decision that all workers must
make alike: to apply a gradient or to skip it, to stop, to have ended an epoch.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from potluck.agree.balance import Balance
from potluck.agree.policy import ApplyPolicy, Sync
from potluck.agree.pulse import Pulse, Verdict, decide_step, worker_steps
from potluck.agree.shares import share_out
from potluck.agree.terms import SAME_DATA, UNCOMPARED, Fingerprint, differing_data, differing_settings
from potluck.config import checked
from potluck.engine.compiling import Compiling, expect_any_rows
from potluck.engine.fingerprint import fingerprint, training_settings
from potluck.engine.loader import BatchConfig, Loader, MicroBatch, Position
from potluck.engine.replica import Replica, StepConfig, find_batch_norm, in_float32, insist_on_memory
from potluck.engine.rows import as_dataset, mix, rows_of, seed_everything
from potluck.engine.scheduled import Scheduled
from potluck.environment import LAST_WORDS, ONLY, PATIENCE_S, insist_on_patience
from potluck.errors import CheckpointError, ConfigError, Diverged, Interrupted, WorkerLost
from potluck.events import Decided, EpochDone, EventLog, Noticed, Recovered, StepDone, StepSkipped, WorkerStep
from potluck.fleet.invite import INVITE, read_invite
from potluck.fleet.ledger import Ledger, prove
from potluck.link.link import Alone, Link, Rows, choose_device, connect, loss_of_peer
from potluck.save.kept import Kept
from potluck.save.memory import Recovery, my_recovery
from potluck.save.saves import TENSORS, KeptTensors, Saves, Standing, sharded_of
from potluck.save.state import tensors_json, tensors_of_json
from potluck.shard.strategy import FullShard, NoShard, ShardGradOp, ShardingStrategy
from potluck.signals import on_interrupt
from potluck.stages.protocol import CommunicationProtocol, Stages
from potluck.words import plural

if TYPE_CHECKING:
    from potluck.save.buddies import Buddies
    from potluck.shard.sharded import Sharded


STEP_TOO_EARLY = (
    "step() was called before backward(). Call fleet.backward(loss, samples=...) first, in place of loss.backward(),"
    " which tells the other workers nothing."
)
LossFunction = Callable[[nn.Module, Any], Any]
"""Gives the mean loss over a batch's rows, or (mean loss, number of samples) where rows are not what is counted."""


def init(
    policy: ApplyPolicy = Sync(),
    strategy: ShardingStrategy = NoShard(),
    *,
    stages: Stages | CommunicationProtocol | None = None,
    step: StepConfig = StepConfig(),
    patience_s: float = PATIENCE_S,
) -> "Engine":
    """Joins the run that `potluck join`, `potluck run` or torchrun started; started by none, it is a run of one.

    `stages`: cuts the model into stages, one to a worker; how they talk, or also how many and where it is cut.
    """
    checked(lambda: insist_on_patience("patience_s", patience_s))
    device = choose_device()
    if stages is not None:
        stages = stages if isinstance(stages, Stages) else Stages(protocol=stages)
    if stages is not None and INVITE in os.environ:
        raise ConfigError(
            "A host's workers each have a whole replica, and stages would need each other. Start stages with potluck"
            ' run or potluck train; workers that have no connection meet in a store, with protocol "datastore".'
        )
    if INVITE in os.environ:
        from potluck.engine.elastic import ElasticEngine

        return ElasticEngine.join(read_invite(None), device, policy=policy, strategy=strategy, step=step)
    recovery = my_recovery()
    if recovery is not None:
        policy, strategy = _for_those_left(policy, strategy, recovery)
    if stages is not None:
        from potluck.engine.staged import staged_engine

        return staged_engine(device, policy=policy, strategy=strategy, step=step, stages=stages, patience_s=patience_s)
    link = connect(device, patience_s)
    if not isinstance(policy, Sync):
        from potluck.engine.windows import WindowEngine

        return WindowEngine(link, device, policy=policy, strategy=strategy, step=step)
    engine = Engine(link, device, policy=policy, strategy=strategy, step=step)
    engine.recovery = recovery
    return engine


def _for_those_left(
    policy: ApplyPolicy, strategy: ShardingStrategy, recovery: Recovery
) -> tuple[ApplyPolicy, ShardingStrategy]:
    """What was set for each worker by itself, without that of the lost ones."""
    if isinstance(policy, Sync):
        policy = replace(policy, shares=recovery.of_those_left(policy.shares))
    if isinstance(strategy, FullShard | ShardGradOp) and strategy.weights != "memory":
        strategy = replace(strategy, weights=recovery.of_those_left(strategy.weights))
    return policy, strategy


class Engine:
    _loss_sum: Tensor

    def __init__(
        self,
        link: Link | None = None,
        device: torch.device | None = None,
        *,
        policy: ApplyPolicy = Sync(),
        strategy: ShardingStrategy = NoShard(),
        step: StepConfig = StepConfig(),
    ) -> None:
        self.link = link or Alone()
        self.device = device or torch.device("cpu")
        self.policy = policy
        self.strategy = strategy
        self.config = step
        self.events = EventLog()
        self.after_step: list[Callable[[], None]] = []
        """Called on every worker once per step of the run, also for one in which this worker had no rows. Where workers
        step by themselves, all steps of a window are told when it has ended and the weights are those agreed on."""
        self.after_agreement: list[Callable[[], None]] = []
        """Called on every worker when all hold the same weights again: after each step, or after each window."""
        self.state = Kept()
        """What you want kept beside the model: saved, sent to whoever joins, and put back by load()."""
        self.rows_limit: int | None = None
        """The run is over at so many rows; only policies that plan several steps ahead need to know."""
        self.lr_factor: Callable[[int], float] | None = None
        """The share of its peak that the learning rate has for the step which ends at so many rows; none: yours."""
        self.step_number = 0
        self._steps_done = 0
        """The same, but for while after_step is told of each step of a window."""
        self.rows_seen = 0
        self.skipped = 0
        self.stopping = False
        """Every worker has agreed to stop after the step that is done."""
        self.replaying = False
        """A step is applied that others have taken before this worker came."""
        self.samples_per_row = 1.0
        """How many samples a row counts as; only for peers of a host that cannot say."""
        self.layout = ""
        """How a model that is cut lies on the workers, as lines to be shown."""
        self.data: Fingerprint | None = None
        """What is in this worker's rows; none before it was looked at."""
        self.training: dict[str, Any] = {}
        """What every worker's step must do alike: the optimizer's settings, clipping, the schedule."""
        self.told: dict[str, Any] = {}
        """What a host shows of the run: its name, the unit of samples, how many steps there are."""
        self.memo: dict[str, int] = {}
        """What a caller wants to find again, should this worker be killed and started again in a run that goes on."""
        self.has_trainer = False
        """Trainer counts epochs, hears Ctrl-C, saves and shows the run; else a loop of your own does, with our help."""
        self.is_restored = False
        """This worker was killed, and goes on where it had been, in a run that went on meanwhile."""
        self.loaded_from: Path | None = None
        self.run_folder: Path | None = None
        """Kept with the rest in memory, so that a run that outlived a loss finds its folder again."""
        self.recovery: Recovery | None = None
        """What was left of this run after a loss: prepare() goes on from it."""
        self.last_epoch: EpochDone | None = None
        """What was proved of the epoch that ended last."""
        self.replica: Replica | None = None
        self.loader: Loader | None = None
        self._scheduled: Scheduled | None = None
        self._compiling: Compiling | None = None
        self._batch_norm: str | None = None
        """A layer of the whole model that takes means over rows, and so needs two of them at once."""
        self._is_counted = False
        """epochs() counts the passes over the loader, and so knows how many of them the run has."""
        self._folder: Path | None = None
        """That load() was given."""
        self._saved_last: tuple[Path, int] | None = None
        self._skipped_in_a_row = 0
        self._skipped_rows = 0
        """Of the epoch that is under way."""
        self._wants_stop = False
        self._optimizer_s = 0.0
        self._balance: Balance | None = None
        self._ledger = Ledger()
        self._trained: MicroBatch | None = None
        self._saves = Saves(self.link, self.events)
        self._buddies: Buddies | None = None
        self._recovered: Recovered | None = None
        """Told with the first step, when everybody listens."""
        self._unit = 1.0
        self._stand_in = ExitStack()
        """Puts back what the forward of a row that does not count has changed in buffers."""
        self._start_of_step()

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def world(self) -> int:
        return self.link.world

    @property
    def last_step(self) -> StepDone | None:
        """The last step that was applied, on every worker alike: also on one that had no rows of it."""
        return self.events.last_step

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has, whoever holds them."""
        return sum(parameter.numel() for parameter in self._prepared().model.parameters())

    @property
    def lanes(self) -> int:
        """Among how many each batch is shared out: here all workers."""
        return self.world

    @property
    def _computers(self) -> int:
        """Among how many a batch is cut before anybody computes its rows; a node's ranks each compute a part."""
        return self.lanes

    @property
    def lane(self) -> int:
        """Which of them this worker is."""
        return self.rank

    @property
    def keeps_folder(self) -> bool:
        """Whether this worker writes the run folder."""
        return self.rank == 0

    @property
    def is_led(self) -> bool:
        """Whether a host leads this worker: it keeps the run's folder, and hands out the work."""
        return False

    @property
    def speaks(self) -> bool:
        """Whether this worker shows the run to a person."""
        return self.rank == 0 or ONLY in os.environ

    @overload
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, scheduler: LRScheduler | None = None
    ) -> tuple[nn.Module, Optimizer]: ...

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        fetchers: int = 0,
        slices: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        loss: LossFunction | None = None,
        scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, Optimizer, Loader]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any = None,
        *,
        batch_size: int = 0,
        micro_batch_size: int | None = None,
        fetchers: int = 0,
        slices: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        loss: LossFunction | None = None,
        scheduler: LRScheduler | None = None,
    ) -> Any:
        """Readies model and optimizer, and gives a loader of this worker's share.

        `batch_size` is the rows of one step over all workers together, so that the numbers do not depend on how many
        there are. Without a dataset you bring your own batches; their sizes may differ between workers.
        `loss` is needed only where the model is cut into stages: see train().
        `scheduler` is stepped here, once per step of the run under every policy; you do not step it.
        """
        if self.replica is not None:
            raise ConfigError(
                "prepare() was called already, and a run trains one model with one optimizer. Put several models into"
                " one nn.Module, and their parameters into groups of one optimizer."
            )
        if isinstance(model, nn.Module):
            insist_on_memory(model)
        self.training = training_settings(optimizer, self.config.clip) | self.training
        self._scheduled = Scheduled(scheduler, optimizer) if scheduler is not None else None
        self._batch_norm = find_batch_norm(model) if isinstance(model, nn.Module) else None
        self.replica = self._make_replica(model, optimizer)
        if self.config.compile:
            self._compiling = Compiling(self._say)
        if dataset is None:
            self._meet_buddies()
            return self.replica.model, optimizer
        try:
            batch = BatchConfig(size=batch_size, micro_size=micro_batch_size, fetchers=fetchers, slices=slices)
        except ValueError as error:
            raise ConfigError(f"batch {error}.") from None
        if slices is not None:
            self._insist_on_slices(slices)
        # A power of two, so that it changes no digit of any gradient; it only keeps sums in the range of means.
        self._unit = 2.0 ** -round(math.log2(batch.size))
        self.loader = self._make_loader(dataset, batch, seed, collate)
        if self.config.compile and (self._balance is not None or not self.loader.is_even):
            expect_any_rows(self.replica.model)
        if self._batch_norm is not None:
            self._warn_of_single_rows(self._batch_norm, self.loader)
        self.loader.on_epoch_end = self._end_of_epoch
        self.loader.on_stand_in = lambda: self._stand_in.enter_context(self._prepared().buffers_kept())
        self.loader.is_stopped = lambda: self.stopping
        self._meet_buddies()
        self.start()
        return self.replica.model, optimizer, self.loader

    def _insist_on_slices(self, slices: int) -> None:
        self.notice("batch.slices has no effect here: it cuts the batches that a host hands out.")

    def _warn_of_single_rows(self, layer: str, loader: Loader) -> None:
        """Those that no plan can avoid, before the first step."""
        size, micro = loader.batch.size, loader.batch.micro_size
        if micro == 1:
            where, advice = "micro-batches have 1 row", "make them larger"
        elif size < 2 * self._computers:
            where = f"some of {plural(self._computers, 'worker')} have 1 row of a batch of {size}"
            advice = "use more rows"
        elif loader.rows % size == 1:
            where, advice = f"the last of {loader.rows:,} rows is a batch by itself", "leave it out, or change the size"
        else:
            return
        self.notice(
            f"{layer} takes means over the values of a channel, and {where}. Unless rows have several values of each"
            f" channel, as images have, the run stops there: {advice}."
        )

    def introduce(
        self, model: nn.Module, optimizer: Optimizer, dataset: Any, *, batch_size: int, seed: int, **about: Any
    ) -> None:
        """What this worker brings, before it says anything to the others; where they meet in a store, that may be
        another run's. prepare() does so too. `about`: the run's name, and its folder if one was given (`out`)."""

    def epochs(self, count: int, folder: str | Path | None = None) -> Iterator[int]:
        """The epochs of a run that has `count` of them, from where it stands: `for epoch in fleet.epochs(3)`.

        A run that load() has put in the middle, or that this worker has joined there, trains what is left and no more.
        Ctrl-C stops all workers after the step that is under way, saves in `folder` (if there is none, in the one that
        load() was given), and raises Interrupted; the end is saved there too. Under a host it is the host that saves.
        """
        if self.loader is None:
            raise ConfigError("epochs() counts passes over the dataset: give prepare() one, and a batch_size.")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"epochs() takes how many the run has, a whole number of at least 1, not {count!r}.")
        self.rows_limit = count * self.loader.rows
        self.told = self.told | {"steps_total": count * -(-self.loader.rows // self.loader.batch.size)}
        return self._care_for(count, Path(folder) if folder is not None else None)

    def _care_for(self, count: int, folder: Path | None) -> Iterator[int]:
        with on_interrupt(self.request_stop):
            yield from self.passes(count)
            if self._position().epoch < count:
                self._end_early(folder or self._folder)
            self._end_well(folder or self._folder)

    def passes(self, count: int) -> Iterator[int]:
        """As epochs(), for a caller that hears Ctrl-C, saves and shows the run itself."""
        self._is_counted = True
        self._begin_run()
        loader = self.loader
        assert loader is not None
        if (done := self._position().epoch) >= count and not self.is_led:
            self.notice(
                f"This run has done {done} of its epochs, and {count} {'was' if count == 1 else 'were'} asked for:"
                " nothing is left to train. Ask for more epochs to continue it."
            )
        while True:
            if loader.position.row >= loader.rows:
                loader.end_epoch()
            if self.stopping or loader.position.epoch >= count:
                return
            before = self.step_number, loader.position.epoch, loader.given
            yield loader.position.epoch
            if before == (self.step_number, self._position().epoch, loader.given) and not self.stopping:
                raise ConfigError(
                    "An epoch of fleet.epochs() has passed without a step. Iterate over the loader in each of them, and"
                    " call backward() and step() for every batch."
                )

    def _position(self) -> Position:
        """Where the run stands; a place at an epoch's end is the beginning of the next."""
        assert self.loader is not None
        position = self.loader.position
        return Position(position.epoch + 1) if position.row >= self.loader.rows else position

    def _begin_run(self) -> None:
        """Before the first epoch."""

    def _end_early(self, folder: Path | None) -> NoReturn:
        """The run was stopped: what is done is saved, and a sentence says where."""
        where = " Nothing was saved: name a folder for that, as in fleet.epochs(3, 'runs/mine')."
        if folder is not None:
            self._save_once(folder)
            where = f" Saved in {folder}, from where fleet.load() goes on."
        raise self.interrupted(f"Stopped after step {self.step_number}.{where}")

    def _end_well(self, folder: Path | None) -> None:
        if folder is not None:
            self._save_once(folder)

    def _save_once(self, folder: Path) -> None:
        if self._saved_last != (folder, self.step_number):
            self.save(folder)
        self.wait_for_saves()

    def interrupted(self, sentence: str) -> Interrupted:
        """An error to raise. Our launcher says its sentence; where there is none, it is said here."""
        if self.speaks and LAST_WORDS not in os.environ:
            print(f"potluck: {sentence}", file=sys.stderr, flush=True)
        return Interrupted(sentence)

    def start(self) -> None:
        """What was done since init(), such as loading data and weights, is no part of the first step."""
        self._start_of_step()

    def train(self, loss_of: LossFunction, batch: Any) -> None:
        """Forward and backward of one batch of the loader, also where the model is cut into stages.

        Then step(). `loss_of(model, batch)` gives the mean loss over the batch's rows, or (mean, samples).
        """
        loss, samples = loss_and_samples(self._prepared().loss(loss_of, batch), batch)
        self.backward(loss, samples=samples)

    def backward(self, loss: Tensor, *, samples: float, last: bool | None = None) -> None:
        """The gradient of a mean over `samples`, weighted by them: rows, or tokens, as you count.

        `last` says whether the next call is step(); the loader knows it, and without one it is taken to be so.
        """
        replica = self._prepared()
        loss = _insist_on_mean(loss, samples)
        micro = self.loader.current if self.loader is not None else None
        if last is None:
            last = micro is None or micro.last
        replica.arm(last=last)
        self._stand_in.close()
        if micro is not None and not micro.counts:
            samples = 0.0
        if samples:  # a mean over nothing is not a number, and has no gradient
            (loss * (samples * self._unit)).backward()  # type: ignore[no-untyped-call]
        replica.end_backward()
        if samples:
            self._loss_sum = self._loss_sum + loss.detach().reshape(()) * samples  # in float64, if the loss is
            self._samples += samples
        self._is_last, self._is_untouched = last, False
        if micro is None:
            self._rows += int(samples)
        elif micro is not self._trained and micro.counts:  # several backwards of one batch still use its rows once
            self._rows += micro.end - micro.start
            self._ledger.record(micro.start, micro.end)
            self._trained = micro
        replica.seal()

    def step(self) -> StepDone | StepSkipped | None:
        """Steps the optimizer once the step's last micro-batch is done; before that it does nothing.

        All workers apply the mean over all their samples, or skip the step together if it is not finite.
        """
        replica = self._prepared()
        if not self._is_last:
            micro = self.loader.current if self.loader is not None else None
            if (micro.last and micro is not self._trained) if micro is not None else self._is_untouched:
                raise ConfigError(STEP_TOO_EARLY)
            return None
        replica.unseal()
        if self.device.type == "cuda" and self.world > 1 and not replica.gathers:
            torch.cuda.current_stream().synchronize()  # else busy would be the time to launch kernels
        busy_s = time.perf_counter() - self._started + self._optimizer_s
        if replica.runs_ahead and self._samples and not replica.has_unused and type(self) is Engine:
            return self._step_ahead(replica, busy_s)
        replica.start_sums()
        told = self._tell(busy_s) if self.world > 1 else None
        wait_s, norm, loss_sum = self._reduce(replica)
        told = told or self._tell(busy_s, loss_sum)
        pulses = [Pulse(*row) for row in told.wait()]
        if any(pulse.has_unused for pulse in pulses):
            replica.drop_unused()
        verdict = decide_step(pulses, norm, self._unit, self.config.clip)
        self._advance(sum(int(pulse.rows) for pulse in pulses))
        self.stopping = any(pulse.wants_stop for pulse in pulses)
        exchanged = time.perf_counter()
        event = self._apply(pulses, verdict, busy_s + wait_s)
        self._optimizer_s = time.perf_counter() - exchanged
        return self._end_of_step(event, pulses)

    def _step_ahead(self, replica: Replica, busy_s: float) -> StepDone | StepSkipped:
        """As step(), with the verdict reached on the GPU, which has its next work before we know of it."""
        replica.finish()
        self._advance(self._rows)
        self._set_lr(replica)
        said = replica.apply_unless_bad(self._loss_sum, 1 / (self._samples * self._unit), self.config.clip)
        if self.loader is not None:
            self.loader.fetch_ahead()
        norm, was_bad, loss_sum = torch.stack([*said, self._loss_sum]).tolist()
        if was_bad:  # perhaps only to float32
            norm = replica.norm().item()
        else:
            replica.drop()
        pulses = [Pulse(*row) for row in self._tell(busy_s, loss_sum).wait()]
        self.stopping = bool(pulses[0].wants_stop)
        verdict = decide_step(pulses, norm, self._unit, self.config.clip)
        return self._end_of_step(self._apply(pulses, verdict, busy_s, is_done=not was_bad), pulses)

    def _end_of_step(self, event: StepDone | StepSkipped, pulses: list[Pulse]) -> StepDone | StepSkipped:
        if self._recovered is not None:
            self.events.emit(self._recovered)
            self._recovered = None
        self.events.emit(event)
        self._insist_on_progress(event)
        self._share_anew(pulses)
        self._tell_agreed(self.step_number - 1)
        if self._buddies is not None and self._buddies.is_due(self.step_number):
            self._refresh()
        self._start_of_step()
        return event

    def _tell_agreed(self, steps_before: int) -> None:
        """All workers hold the same weights; so many steps of the run were done when they last did."""
        if self._scheduled is not None:
            self._scheduled.agree(self._whole_steps())
        end = self._steps_done = self.step_number
        for number in range(steps_before + 1, end + 1):
            self.step_number = number
            for call in self.after_step:
                call()
        self.step_number = end
        for call in self.after_agreement:
            call()

    def _whole_steps(self) -> int:
        """Steps of the run that are done: one of which some rows are still to do counts for step_number alone."""
        if self.loader is None or isinstance(self.policy, Sync):
            return self.step_number
        row, size = self.loader.position.row, self.loader.batch.size
        return self.step_number - (row % size > 0 and row < self.loader.rows)

    def request_stop(self) -> None:
        """Asks all workers to stop together after the step in which they hear of it."""
        self._wants_stop = True

    def evaluate(self, loss_of: LossFunction, dataset: Any, batch_size: int) -> float:
        """The mean loss over a dataset, each worker computing its share. Nothing is trained."""
        model = self._prepared().model
        rows = as_dataset(dataset)
        loader = Loader(
            rows,
            BatchConfig(size=max(1, len(rows)), micro_size=max(1, batch_size // self.lanes)),
            shares=self.loader.shares if self._balance is not None and self.loader is not None else self._shares(None),
            rank=self.lane,
            device=self.device,
            collate=self.loader.collate if self.loader is not None else None,
            in_step=self._prepared().in_step,
        )
        were_training = [module for module in model.modules() if module.training]
        model.eval()
        with torch.no_grad():
            total, count = self._look(loss_of, loader)
        for module in were_training:
            module.training = True
        sums = self.link.gather_rows([total, count])
        counted = sum(row[1] for row in sums)
        return sum(row[0] for row in sums) / counted if counted else math.nan

    def _look(self, loss_of: LossFunction, loader: Loader) -> tuple[float, float]:
        """The sum of the losses of this worker's rows, and over how many samples it is."""
        total = count = 0.0
        for batch in loader.once():
            loss, samples = loss_and_samples(self._prepared().loss(loss_of, batch), batch)
            if samples and loader.current is not None and loader.current.counts:
                total += loss.item() * samples
                count += samples
        return total, count

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        """Saves a checkpoint below `folder`: call it on every worker.

        Returns once it is in host memory; the disk is written meanwhile.
        """
        standing, kept = self._take_standing()
        self._saves.save(Path(folder), self._prepared(), standing, keep_last, kept)
        self._saved_last = Path(folder), standing["step"]

    def load(self, folder: str | Path) -> bool:
        """Goes on from the newest whole checkpoint below `folder`, on any number of workers. False if there is none.

        A run that has just outlived a loss stays where it is.
        """
        self._folder = Path(folder)
        if self._recovered is not None:
            return True
        standing = self._saves.load(Path(folder), self._prepared(), self._check_standing)
        if standing is None:
            return False
        self._stand_at(standing)
        self.loaded_from = Path(standing["path"])
        self._saved_last = self._folder, self.step_number
        if self.loader is not None and self.loader.position.row >= self.loader.rows:
            self.loader.end_epoch()
        if standing["workers"] != self.world:
            self.seed_random(standing["seed"])
        self._refresh()
        return True

    def last_words(self) -> str:
        """Where the run stands when it is stopped."""
        return f"Stopped after step {self.step_number}."

    def wait_for_saves(self) -> None:
        """Until every checkpoint is on the disk: call it on every worker."""
        self._saves.wait_together()

    def close(self) -> None:
        """Ends what is still being written, and leaves the group."""
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
        try:
            self._saves.wait()
        finally:
            self.link.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, WorkerLost) or (error is not None and loss_of_peer(error) is not None):
            self._saves.one_is_gone()
        self.close()

    def seed_random(self, seed: int) -> None:
        """Every worker draws its own numbers, the same in every run of this seed and this many workers."""
        seed_everything(mix(seed, self.step_number, self.rank))

    # What a step is made of

    def _make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Called once."""
        if isinstance(self.strategy, NoShard):
            return Replica(model, optimizer, self.link, self.device, self.config)
        from potluck.engine.sharded import ShardedReplica

        return ShardedReplica(model, optimizer, self.link, self.device, self.config, strategy=self.strategy)

    def _make_loader(
        self, dataset: Any, batch: BatchConfig, seed: int, collate: Callable[[list[Any]], Any] | None
    ) -> Loader:
        loader = Loader(
            dataset,
            batch,
            shares=self._shares(batch.size),
            rank=self.lane,
            device=self.device,
            seed=seed,
            collate=collate,
            in_step=self._prepared().in_step,
            in_pairs=self._batch_norm is not None,
        )
        self._insist_on_same_data(loader)
        is_measured = isinstance(self.policy, Sync) and self.policy.balance and not self.policy.shares
        # Where ranks gather parameters they wait for each other in every layer, and nobody's own speed can be seen.
        if is_measured and self.lanes > 1 and not self._prepared().gathers:
            self._balance = Balance(batch.size, self.lanes)
        return loader

    def _start_of_step(self) -> None:
        self._started = time.perf_counter()
        self._loss_sum = torch.zeros((), device=self.device)
        self._samples = 0.0
        self._rows = 0
        self._is_last = False
        self._is_untouched = self.loader is None
        """Batches are the caller's own, and there was no backward yet."""
        if self.replica is not None:
            self.replica.remember_buffers()

    def _reduce(self, replica: Replica) -> tuple[float, float, float]:
        """Ends the sums over all ranks: (seconds waited for them, the gradient's norm, this worker's loss sum)."""
        wait_s = replica.finish()
        started = time.perf_counter()
        norm, loss_sum = torch.stack([replica.norm().to(self.device), self._loss_sum]).tolist()
        if self.device.type == "cuda" and self.world > 1:  # there, finish() only put the sums in line
            wait_s += time.perf_counter() - started
        return wait_s, norm, loss_sum

    def _tell(self, busy_s: float, loss_sum: float | None = None) -> Rows:
        """What this worker says of the step, and hears from all, while the sums are under way."""
        mine = Pulse(
            samples=self._samples,
            loss_sum=self._loss_sum.item() if loss_sum is None else loss_sum,
            rows=self._rows,
            busy_s=busy_s,
            has_unused=self._prepared().has_unused,
            wants_stop=self._wants_stop,
        )
        return self.link.start_gather(mine)

    def _advance(self, rows: int) -> None:
        self.step_number += 1
        self.rows_seen += rows
        if self.loader is not None and self.loader.current is not None:
            self.loader.position.row = self.loader.current.step_end

    def _apply(
        self, pulses: list[Pulse], verdict: Verdict, took_s: float, *, is_done: bool = False
    ) -> StepDone | StepSkipped:
        """`is_done`: the optimizer has stepped already, or has left it out."""
        replica = self._prepared()
        if verdict.fault is not None:
            replica.drop()
            replica.restore_buffers()
            self.skipped += 1
            self._skipped_in_a_row += 1
            self._skipped_rows += sum(int(pulse.rows) for pulse in pulses)
            return StepSkipped(
                step=self.step_number, loss=verdict.loss, in_a_row=self._skipped_in_a_row, reason=verdict.fault
            )
        self._skipped_in_a_row = 0
        if not is_done:
            self._set_lr(replica)
            replica.apply(verdict.scale)
        replica.average_buffers(self._samples_of(pulses) / verdict.samples)
        return StepDone(
            step=self.step_number,
            epoch=self.loader.position.epoch if self.loader is not None else 0,
            rows_seen=self.rows_seen,
            samples=verdict.samples,
            loss=verdict.loss,
            lr=float(replica.optimizer.param_groups[0]["lr"]),
            grad_norm=verdict.norm,
            seconds=time.perf_counter() - self._started,
            workers=self._worker_steps(pulses, took_s),
        )

    def _worker_steps(self, pulses: list[Pulse], took_s: float) -> tuple[WorkerStep, ...]:
        return worker_steps(pulses, took_s)

    def _samples_of(self, pulses: list[Pulse]) -> float:
        """Over which this worker's gradient is."""
        return self._samples

    def _apply_alone(self, verdict: Verdict, where: str) -> StepSkipped | None:
        """A step of this replica by itself: applied, or skipped and told."""
        replica = self._prepared()
        if verdict.fault is None:
            self._skipped_in_a_row = 0
            self._set_lr(replica)
            replica.apply(verdict.scale)
            return None
        replica.drop()
        replica.restore_buffers()
        self._skipped_in_a_row += 1
        event = StepSkipped(
            step=self.step_number + 1,
            loss=verdict.loss,
            in_a_row=self._skipped_in_a_row,
            reason=f"on {where}, {verdict.fault}",
        )
        self.events.emit(event)
        self._insist_on_progress(event)
        return event

    def _share_anew(self, pulses: list[Pulse]) -> None:
        """Workers of different speeds get parts of different sizes."""
        if self._balance is None or self.loader is None:
            return
        changed = self._balance.report([int(pulse.rows) for pulse in pulses], [pulse.busy_s for pulse in pulses])
        if changed is not None:
            parts, reason = changed
            self.loader.shares = tuple(float(part) for part in parts)
            self.events.emit(Decided(step=self.step_number, rows=tuple(parts), reason=reason))

    def _set_lr(self, replica: Replica) -> None:
        if self._scheduled is not None:
            self._scheduled.go_to(self._step_of_schedule())
        if self.lr_factor is not None:
            for group in replica.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.lr_factor(self._rows_of_schedule())

    def _rows_of_schedule(self) -> int:
        """Rows of all workers, at the end of the step that is being applied."""
        return self.rows_seen

    def _step_of_schedule(self) -> int:
        """Which step of the run is being applied, counted from 0: the one in which its rows end."""
        if self.loader is None:
            return self.step_number - 1
        row, size = self.loader.position.row, self.loader.batch.size
        end = row + self._rows_of_schedule() - self.rows_seen
        return self.step_number + -(-end // size) - -(-row // size) - 1

    def _insist_on_progress(self, event: StepDone | StepSkipped) -> None:
        if isinstance(event, StepSkipped) and event.in_a_row >= self.config.nonfinite_limit:
            raise Diverged(
                f"Stopped after {event.in_a_row} skipped steps in a row, at step {event.step}: {event.reason}."
                " The weights are those of the last good step. Try a lower learning rate, a longer warm-up, step.clip,"
                f" or fp32, and look at the data around there.{self._prepared().suspicion()}"
            )

    def _end_of_epoch(self) -> None:
        assert self.loader is not None
        mine = json.dumps([self._fingerprint(), self._ledger.ranges]).encode()
        told = [json.loads(data) for data in self.link.gather_bytes(mine)]
        proof = prove(((a, b) for _, ranges in told for a, b in ranges), self.loader.rows)
        same = len({fingerprint for fingerprint, _ in told}) == 1
        weights = "all workers hold the same weights"
        if not same:
            self._prepared().align()
            weights = "THE WORKERS' WEIGHTS HAD DRIFTED APART, and are worker 0's again"
        skipped = f", {self._skipped_rows:,} of them in steps that were skipped" if self._skipped_rows else ""
        unseen = "" if self.data else UNCOMPARED
        self._ledger, self._skipped_rows = Ledger(), 0
        epoch = self.loader.position.epoch
        self.last_epoch = EpochDone(
            epoch=epoch,
            used=proof.used,
            total=proof.total,
            same_weights=same,
            sentence=f"Epoch {epoch + 1}: {proof}{skipped}" + (f"{unseen}; {weights}." if self.world > 1 else "."),
        )
        self.events.emit(self.last_epoch)

    def _fingerprint(self) -> str:
        return self._prepared().fingerprint()

    def _look_at_data(self, dataset: Any, *, elsewhere: bool = False) -> Fingerprint:
        if self.data is None:
            self.data = fingerprint(dataset, elsewhere=elsewhere)
        return self.data

    def _insist_on_same_data(self, loader: Loader) -> None:
        """Workers that planned different steps would wait for each other for ever; and none may train on other rows."""
        data = self._look_at_data(loader.dataset, elsewhere=loader.batch.fetchers > 0)
        mine = f"{plural(loader.rows, 'row')} in batches of {loader.batch.size:,}, shuffled by seed {loader.seed}"
        told = self.link.gather_bytes(json.dumps([mine, data, self.training]).encode())
        for rank, (theirs, other_data, training) in enumerate(map(_terms, told)):
            if theirs != mine:
                raise ConfigError(
                    f"The data differs between workers: worker {self.rank} has {mine}, and worker {rank}"
                    f" {theirs}. Give every worker the whole dataset; it is shared out here."
                )
            where = differing_data(data, other_data, (f"worker {self.rank}'s", f"worker {rank}'s"))
            if where is not None:
                raise ConfigError(f"Worker {self.rank} and worker {rank} have as many rows, but {where}. {SAME_DATA}")
            for name, (own, other) in differing_settings(self.training, training).items():
                raise ConfigError(
                    f"Worker {self.rank} has {name} = {own}, and worker {rank} has {other}. Give every worker the same"
                    " optimizer and settings."
                )

    def _shares(self, batch_size: int | None) -> tuple[float, ...]:
        shares = (self.policy.shares if isinstance(self.policy, Sync) else ()) or (1.0,) * self.lanes
        if len(shares) != self.lanes:
            raise ConfigError(
                f"policy.shares has {plural(len(shares), 'number')}, and the run {plural(self.lanes, 'worker')}."
            )
        if batch_size is not None and 0 in (parts := share_out(batch_size, shares)):
            raise ConfigError(
                f"A batch of {batch_size} does not fit {plural(self.lanes, 'worker')}: each needs at least one row, and"
                f" they would have {', '.join(map(str, parts))}. Use a larger batch, fewer workers, or more even"
                " shares."
            )
        return shares

    def _prepared(self) -> Replica:
        if self.replica is None:
            raise ConfigError("Call prepare(model, optimizer, ...) first.")
        return self.replica

    # Copies in memory

    def _meet_buddies(self) -> None:
        """Goes on from what those who are left had kept, if one was lost; from here on, all keep copies anew."""
        if not (isinstance(self.strategy, FullShard | ShardGradOp) and self.strategy.buddy):
            return
        from potluck.save.buddies import Buddies, recover

        if not isinstance(self.policy, Sync):
            raise ConfigError("strategy.buddy keeps copies between steps of all workers together: use the Sync policy.")
        if self.recovery is not None:
            standing = recover(self.recovery, self._sharded())
            self._prepared().remember_buffers()
            self._check_standing(Path("What the workers had kept in memory"), standing)
            self._stand_at(standing)
            self.seed_random(standing["seed"])
            self._recovered = Recovered(step=self.step_number, lost=self.recovery.lost, workers=self.world)
        if self.world > 1:
            self._buddies = Buddies(self.link, self.strategy.buddy_every)
        self._refresh()
        if self.recovery is not None and self.rank == 0:
            self.recovery.forget()

    def _refresh(self) -> None:
        if self._buddies is not None:
            folder = str(self.run_folder) if self.run_folder is not None else None
            self._buddies.refresh(self._sharded(), self._standing_as_json() | {"folder": folder})

    def _sharded(self) -> "Sharded":
        sharded = sharded_of(self._prepared())
        assert sharded is not None
        return sharded

    # Where the run stands

    def _standing(self) -> Standing:
        position = self.loader.position if self.loader is not None else Position()
        return {
            "step": max(self._steps_done, self.step_number),
            "rows_seen": self.rows_seen,
            "skipped": self.skipped,
            "skipped_rows": self._skipped_rows,
            "epoch": position.epoch,
            "row": position.row,
            "left": [list(part) for part in position.left],
            "rows_in_epoch": self.loader.rows if self.loader is not None else 0,
            "seed": self.loader.seed if self.loader is not None else 0,
            "batch": self.loader.batch.size if self.loader is not None else 0,
            "data": self.data or {},
        }

    def _take_standing(self) -> tuple[Standing, KeptTensors]:
        """Where the run stands and what is kept beside the model, and the tensors among that."""
        tensors: KeptTensors = {}
        scheduler = self._scheduled.save(tensors) if self._scheduled is not None else None
        return self._standing() | {"scheduler": scheduler, "kept": self.state.save(tensors)}, tensors

    def _standing_as_json(self) -> Standing:
        standing, tensors = self._take_standing()
        return standing | {TENSORS: tensors_json(tensors)}

    def _take_back(self, standing: Standing) -> None:
        """What was kept beside the model; checkpoints of earlier versions have none of it."""
        tensors = standing.get(TENSORS, {})
        tensors = tensors_of_json(tensors) if isinstance(tensors, str) else tensors
        try:
            if self._scheduled is not None:
                self._scheduled.load(standing.get("scheduler"), tensors, self._whole_steps())
            if standing.get("kept") is not None:
                self.state.load(standing["kept"], tensors)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"What the checkpoint keeps beside the model is damaged: {error!r}.") from None

    def _check_standing(self, path: Path, standing: Standing) -> None:
        if self._scheduled is not None:
            self._scheduled.check(standing.get("scheduler"), str(path))
        if self.loader is not None and standing["rows_in_epoch"] not in (0, self.loader.rows):
            raise CheckpointError(
                f"{path} stands in an epoch of {plural(standing['rows_in_epoch'], 'row')}, and the data now has"
                f" {self.loader.rows:,}. Go on with the same data, or start anew in another folder."
            )

    def _tell_of_changes(self, standing: Standing, loader: Loader) -> None:
        """What is not as it was when this was saved: allowed, and said. Older checkpoints do not know all of it."""
        step, changes = standing["step"], []
        where = differing_data(standing.get("data", {}), self.data or {}, ("the checkpoint's", "yours"))
        if where is not None:
            changes.append(
                f"The data are OTHER DATA than those this run was trained on up to step {step}: as many rows, but"
                f" {where}. It goes on with them. If that is not what you want, stop it, and give it the data it had."
            )
        if standing["seed"] != loader.seed:
            changes.append(
                f"This run was begun with seed {standing['seed']}, and keeps it: the order of its rows depends on it."
                f" Seed {loader.seed}, which was given now, is not used."
            )
        if standing.get("batch") not in (None, 0, loader.batch.size):
            changes.append(
                f"Batches had {standing['batch']:,} rows up to step {step}, and from here on {loader.batch.size:,}."
            )
        for sentence in changes:
            self.notice(sentence)

    def notice(self, sentence: str) -> None:
        """Something is not as a person may think, and goes on."""
        self.events.emit(Noticed(sentence=sentence))
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        if self.speaks:
            print(f"potluck: {sentence}", file=sys.stderr, flush=True)

    def _stand_at(self, standing: Standing) -> None:
        self.step_number = standing["step"]
        self.rows_seen = standing["rows_seen"]
        self.skipped = standing["skipped"]
        self._skipped_rows = standing["skipped_rows"]
        if self.loader is not None:
            self._tell_of_changes(standing, self.loader)
            left = tuple((start, end) for start, end in standing.get("left", ()))
            self.loader.position = Position(standing["epoch"], standing["row"], left)
            self.loader.seed = standing["seed"]
            self.loader.current = None
        self._steps_done = self.step_number
        self._take_back(standing)
        # What was trained before the checkpoint is rank 0's to tell, since those workers may be gone.
        self._ledger = Ledger([(0, standing["row"])] if self.rank == 0 else [])


def _terms(told: bytes) -> tuple[str, Fingerprint, dict[str, Any]]:
    """What a worker says of its data; one of an older version, whose words a store has kept, said but the first."""
    try:
        rows, data, training = json.loads(told)
    except ValueError:
        return told.decode(), {}, {}
    return rows, data, training


def _insist_on_mean(loss: Any, samples: float) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(f"backward() takes the mean loss, a tensor of one number, not {_tell(loss)}.")
    if not (math.isfinite(samples) and samples >= 0):
        raise ConfigError(f"backward() takes how many samples the loss is a mean over, not {samples}.")
    if samples:
        insist_on_grad(loss)
    return in_float32(loss)


def insist_on_grad(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ConfigError(
            "The loss has no gradient: no parameter that is trained had a part in it. It was detached (.detach(),"
            " .item(), .data, torch.tensor(loss)), or computed under torch.no_grad() or with frozen parameters alone."
        )


def loss_and_samples(result: Any, batch: Any) -> tuple[Tensor, float]:
    """What a loss function gave: a mean over the batch's rows, or (mean, how many samples it is over)."""
    if not isinstance(result, tuple):
        return result, float(rows_of(batch))
    if len(result) != 2 or not (isinstance(result[1], int | float) or getattr(result[1], "numel", lambda: 0)() == 1):
        raise ConfigError(
            "A loss function returns the mean loss over the batch's rows, or (mean loss, number of samples), not"
            f" {_tell(result)}."
        )
    samples = float(result[1])
    if not (math.isfinite(samples) and samples >= 0):
        raise ConfigError(f"A loss function says over how many samples its mean is, and {samples} is no such number.")
    return result[0], samples


def _tell(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
