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
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from potluck.agree.policy import ApplyPolicy, Sync
from potluck.agree.terms import UNCOMPARED
from potluck.composition import Composition
from potluck.engine.compiling import Compiling, expect_any_rows
from potluck.engine.copies import Copies
from potluck.engine.fingerprint import training_settings
from potluck.engine.layers import WholeLayers
from potluck.engine.loader import BatchConfig, Loader
from potluck.engine.losses import LossFunction, insist_on_mean
from potluck.engine.replica import Replica, StepConfig, find_batch_norm, insist_on_memory
from potluck.engine.rounds import Collate
from potluck.engine.rows import as_dataset
from potluck.engine.run_state import RunState
from potluck.engine.scheduled import Scheduled
from potluck.engine.steps import Steps
from potluck.engine.windows import Windows
from potluck.errors import ConfigError, Interrupted, WorkerLost
from potluck.events import EpochDone, StepDone, StepSkipped
from potluck.fleet.ledger import Ledger, prove
from potluck.link.link import Link, loss_of_peer
from potluck.shard.strategy import NoShard, ShardingStrategy
from potluck.signals import on_interrupt
from potluck.words import plural

if TYPE_CHECKING:
    from potluck.engine.staged import StagedLayers


class Engine(RunState):
    def __init__(
        self,
        link: Link | None = None,
        device: torch.device | None = None,
        *,
        policy: ApplyPolicy = Sync(),
        strategy: ShardingStrategy = NoShard(),
        step: StepConfig = StepConfig(),
        composition: Composition | None = None,
        layers: Callable[["Engine"], "WholeLayers | StagedLayers"] = WholeLayers,
    ) -> None:
        """`composition`: what the run is made of, if whoever makes this has composed it already."""
        super().__init__(link, device, policy=policy, strategy=strategy, step=step, composition=composition)
        self._has_failed = False
        self._data: dict[str, Any] = {}
        """What prepare() was given of the data."""
        self.copies = Copies(self)
        self.layers = layers(self)
        self.rounds = Windows(self) if self.composition.window is not None and not self.is_led else Steps(self)

    @property
    def parameters(self) -> int:
        """How many numbers the whole model has, whoever holds them."""
        return self.layers.parameters

    @property
    def lanes(self) -> int:
        """Among how many each batch is shared out: all workers, or the pipelines that they make up."""
        return self.layers.lanes

    @property
    def _computers(self) -> int:
        """Among how many a batch is cut before anybody computes its rows; a node's ranks each compute a part."""
        return self.lanes

    @property
    def lane(self) -> int:
        """Which of them this worker is."""
        return self.layers.lane

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
        micro_batch_size = self.layers.check(dataset, loss, micro_batch_size)
        self.rounds.insist_on_data(dataset)
        if dataset is not None:
            dataset = as_dataset(dataset)
            self.introduce(model, optimizer, dataset, batch_size=batch_size, seed=seed)
        if isinstance(model, nn.Module):
            insist_on_memory(model)
        self.training = training_settings(optimizer, self.config.clip) | self.training
        self._scheduled = Scheduled(scheduler, optimizer) if scheduler is not None else None
        self._batch_norm = find_batch_norm(model) if isinstance(model, nn.Module) else None
        self._data = {"batch_size": batch_size, "dataset": dataset, "loss": loss, "collate": collate}
        self.replica = self._make_replica(model, optimizer)
        if self.config.compile:
            self._compiling = Compiling(self._say)
        if dataset is None:
            self.copies.begin()
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
        if self.config.compile and not (self.rounds.has_fixed_shares and self.loader.is_even):
            expect_any_rows(self.replica.model)
        self._listen_to(self.loader)
        self.copies.begin()
        self.start()
        self.layers.settle_in()
        return self.replica.model, optimizer, self.loader

    def _listen_to(self, loader: Loader) -> None:
        if self._batch_norm is not None:
            self._warn_of_single_rows(self._batch_norm, loader)
        loader.on_epoch_end = self._end_of_epoch
        loader.on_stand_in = lambda: self._stand_in.enter_context(self._prepared().buffers_kept())
        loader.is_stopped = lambda: self.stopping

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
        self.layers.introduce(model, optimizer, dataset, about | {"batch_size": batch_size, "seed": seed})

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

    def train(self, loss_of: LossFunction, batch: Any) -> None:
        """Forward and backward of one batch of the loader, also where the model is cut into stages.

        Then step(). `loss_of(model, batch)` gives the mean loss over the batch's rows, or (mean, samples).
        """
        self.layers.train(loss_of, batch)

    def backward(self, loss: Tensor, *, samples: float, last: bool | None = None) -> None:
        """The gradient of a mean over `samples`, weighted by them: rows, or tokens, as you count.

        `last` says whether the next call is step(); the loader knows it, and without one it is taken to be so.
        """
        self.layers.insist_on_backward()
        replica = self._prepared()
        loss = insist_on_mean(loss, samples)
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
        tally = self.tally
        if samples:
            tally.loss_sum = tally.loss_sum + loss.detach().reshape(()) * samples  # in float64, if the loss is
            tally.samples += samples
        tally.is_last, tally.is_untouched = last, False
        if micro is None:
            tally.rows += int(samples)
        elif micro is not self._trained and micro.counts:  # several backwards of one batch still use its rows once
            tally.rows += micro.end - micro.start
            self._ledger.record(micro.start, micro.end)
            self._trained = micro
        replica.seal()

    def step(self) -> StepDone | StepSkipped | None:
        """Steps the optimizer once the step's last micro-batch is done; before that it does nothing.

        All workers apply the mean over all their samples, or skip the step together if it is not finite; or, where
        replicas step by themselves, each does so, and all agree with the last step of a window.
        """
        return self.rounds.step()

    def evaluate(self, loss_of: LossFunction, dataset: Any, batch_size: int) -> float:
        """The mean loss over a dataset, each worker computing its share. Nothing is trained."""
        self.rounds.settle()
        model = self._prepared().model
        rows = as_dataset(dataset)
        loader = Loader(
            rows,
            BatchConfig(size=max(1, len(rows)), micro_size=max(1, batch_size // self.lanes)),
            shares=self._shares(None) if self.rounds.has_fixed_shares or self.loader is None else self.loader.shares,
            rank=self.lane,
            device=self.device,
            collate=self.loader.collate if self.loader is not None else None,
            in_step=self._prepared().in_step,
        )
        were_training = [module for module in model.modules() if module.training]
        model.eval()
        with torch.no_grad():
            total, count = self.layers.look(loss_of, loader)
        for module in were_training:
            module.training = True
        sums = self.link.gather_rows([total, count])
        counted = sum(row[1] for row in sums)
        return sum(row[0] for row in sums) / counted if counted else math.nan

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        """Saves a checkpoint below `folder`: call it on every worker.

        Returns once it is in host memory; the disk is written meanwhile.
        """
        self.rounds.settle()
        standing, kept = self._take_standing()
        self._saves.save(Path(folder), self._prepared(), standing, keep_last, kept)
        self._saved_last = Path(folder), standing["step"]
        self.layers.on_saved()

    def load(self, folder: str | Path) -> bool:
        """Goes on from the newest whole checkpoint below `folder`, on any number of workers. False if there is none.

        A run that has just outlived a loss stays where it is.
        """
        self._folder = Path(folder)
        if self.copies.has_just_recovered:
            return True
        standing = self._saves.load(Path(folder), self._prepared(), self._check_standing)
        self.rounds.on_loaded()
        if standing is None:
            return False
        self._stand_at(standing)
        self.loaded_from = Path(standing["path"])
        self._saved_last = self._folder, self.step_number
        if self.loader is not None and self.loader.position.row >= self.loader.rows:
            self.loader.end_epoch()
        if standing["workers"] != self.world:
            self.seed_random(standing["seed"])
        self.copies.refresh()
        return True

    def last_words(self) -> str:
        """Where the run stands when it is stopped."""
        return f"Stopped after step {self.step_number}."

    def wait_for_saves(self) -> None:
        """Until every checkpoint is on the disk: call it on every worker."""
        self._saves.wait_together()

    def close(self) -> None:
        """Ends what is still being written, and leaves the group."""
        self.layers.close(has_failed=self._has_failed)
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
        self._has_failed = error is not None and not isinstance(error, Interrupted)
        if isinstance(error, WorkerLost) or (error is not None and loss_of_peer(error) is not None):
            self._saves.one_is_gone()
        self.close()

    def _end_of_epoch(self) -> None:
        assert self.loader is not None
        mine = json.dumps([self.layers.fingerprint(self._prepared()), self._ledger.ranges]).encode()
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

    # What a host's worker makes otherwise

    def _make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Called once."""
        replica = self.layers.make_replica(model, optimizer, self.rounds, self._data)
        self.rounds.begin(replica)
        return replica

    def _make_loader(self, dataset: Any, batch: BatchConfig, seed: int, collate: Collate) -> Loader:
        return self.rounds.make_loader(dataset, batch, seed, collate)
