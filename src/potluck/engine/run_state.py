"""What a run knows of itself: where it stands, what was decided, and what is kept of it.

Everything here is the same on every worker, or is made so. Knows nothing of how a step is computed.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from potluck.agree.policy import ApplyPolicy, Sync
from potluck.agree.pulse import Verdict
from potluck.agree.shares import share_out
from potluck.agree.terms import SAME_DATA, Fingerprint, differing_data, differing_settings
from potluck.composition import Composition, Wanted, compose
from potluck.engine.compiling import Compiling
from potluck.engine.fingerprint import fingerprint
from potluck.engine.loader import Loader, MicroBatch, Position
from potluck.engine.replica import Replica, StepConfig
from potluck.engine.rows import mix, seed_everything
from potluck.engine.scheduled import Scheduled
from potluck.environment import LAST_WORDS, ONLY
from potluck.errors import CheckpointError, ConfigError, Diverged, Interrupted
from potluck.events import EpochDone, EventLog, Noticed, StepDone, StepSkipped
from potluck.fleet.ledger import Ledger
from potluck.link.link import Alone, Link
from potluck.save.kept import Kept
from potluck.save.memory import Recovery
from potluck.save.saves import TENSORS, KeptTensors, Saves, Standing, sharded_of
from potluck.save.state import tensors_json, tensors_of_json
from potluck.shard.strategy import NoShard, ShardingStrategy
from potluck.words import plural, say

if TYPE_CHECKING:
    from potluck.engine.layers import WholeLayers
    from potluck.engine.rounds import Rounds
    from potluck.engine.staged import StagedLayers
    from potluck.shard.sharded import Sharded


@dataclass(slots=True)
class Tally:
    """What this worker has done of the step that is under way."""

    loss_sum: Tensor
    started: float
    samples: float = 0.0
    rows: int = 0
    is_last: bool = False
    """Whether its last backward is done."""
    is_untouched: bool = False
    """Batches are the caller's own, and there was no backward yet."""


class RunState:
    rounds: "Rounds"
    layers: "WholeLayers | StagedLayers"
    tally: Tally

    def __init__(
        self,
        link: Link | None = None,
        device: torch.device | None = None,
        *,
        policy: ApplyPolicy = Sync(),
        strategy: ShardingStrategy = NoShard(),
        step: StepConfig = StepConfig(),
        composition: Composition | None = None,
    ) -> None:
        self.link = link or Alone()
        self.device = device or torch.device("cpu")
        self.policy = policy
        self.strategy = strategy
        self.config = step
        self.composition = composition or compose(
            Wanted(
                policy=policy,
                strategy=strategy,
                world=self.link.world,
                has_host=self.is_led,
                offload_optimizer=step.offload_optimizer,
                on_gpu=self.device.type == "cuda",
            )
        )
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
        self._version = 0
        """Agreements so far."""
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
        self._ledger = Ledger()
        self._trained: MicroBatch | None = None
        self._saves = Saves(self.link, self.events)
        self._unit = 1.0
        self._stand_in = ExitStack()
        """Puts back what the forward of a row that does not count has changed in buffers."""
        self._start_of_step()

    @property
    def version(self) -> int:
        """Agreements so far."""
        return self._version

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

    def interrupted(self, sentence: str) -> Interrupted:
        """An error to raise. Our launcher says its sentence; where there is none, it is said here."""
        if self.speaks and LAST_WORDS not in os.environ:
            say(sentence)
        return Interrupted(sentence)

    def notice(self, sentence: str) -> None:
        """Something is not as a person may think, and goes on."""
        self.events.emit(Noticed(sentence=sentence))
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        if self.speaks:
            say(sentence)

    def _prepared(self) -> Replica:
        if self.replica is None:
            raise ConfigError("Call prepare(model, optimizer, ...) first.")
        return self.replica

    def _sharded(self) -> "Sharded":
        sharded = sharded_of(self._prepared())
        assert sharded is not None
        return sharded

    def _position(self) -> Position:
        """Where the run stands; a place at an epoch's end is the beginning of the next."""
        assert self.loader is not None
        position = self.loader.position
        return Position(position.epoch + 1) if position.row >= self.loader.rows else position

    def seed_random(self, seed: int) -> None:
        """Every worker draws its own numbers, the same in every run of this seed and this many workers."""
        seed_everything(mix(seed, self.step_number, self.rank))

    def request_stop(self) -> None:
        """Asks all workers to stop together after the step in which they hear of it."""
        self._wants_stop = True

    def _start_of_step(self) -> None:
        self.tally = Tally(torch.zeros((), device=self.device), time.perf_counter(), is_untouched=self.loader is None)
        if self.replica is not None:
            self.replica.remember_buffers()

    def start(self) -> None:
        """What was done since init(), such as loading data and weights, is no part of the first step."""
        self._start_of_step()

    def _advance(self, rows: int) -> None:
        self.step_number += 1
        self.rows_seen += rows
        if self.loader is not None and self.loader.current is not None:
            self.loader.position.row = self.loader.current.step_end

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

    def _set_lr(self, replica: Replica) -> None:
        if self._scheduled is not None:
            self._scheduled.go_to(self._step_of_schedule())
        if self.lr_factor is not None:
            for group in replica.optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.lr_factor(self._rows_of_schedule())

    def _rows_of_schedule(self) -> int:
        """Rows of all workers, at the end of the step that is being applied."""
        return self.rounds.rows_of_schedule()

    def _step_of_schedule(self) -> int:
        """Which step of the run is being applied, counted from 0: the one in which its rows end."""
        if self.loader is None:
            return self.step_number - 1
        row, size = self.loader.position.row, self.loader.batch.size
        end = row + self._rows_of_schedule() - self.rows_seen
        return self.step_number + -(-end // size) - -(-row // size) - 1

    def _whole_steps(self) -> int:
        """Steps of the run that are done: one of which some rows are still to do counts for step_number alone."""
        if self.loader is None or self.policy.steps_together:
            return self.step_number
        row, size = self.loader.position.row, self.loader.batch.size
        return self.step_number - (row % size > 0 and row < self.loader.rows)

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

    def _insist_on_progress(self, event: StepDone | StepSkipped) -> None:
        if isinstance(event, StepSkipped) and event.in_a_row >= self.config.nonfinite_limit:
            raise Diverged(
                f"Stopped after {event.in_a_row} skipped steps in a row, at step {event.step}: {event.reason}."
                " The weights are those of the last good step. Try a lower learning rate, a longer warm-up, step.clip,"
                f" or fp32, and look at the data around there.{self._prepared().suspicion()}"
            )

    def _shares(self, batch_size: int | None) -> tuple[float, ...]:
        lanes = self.layers.lanes
        shares = self.composition.shares or (1.0,) * lanes
        if batch_size is not None and 0 in (parts := share_out(batch_size, shares)):
            raise ConfigError(
                f"A batch of {batch_size} does not fit {plural(lanes, 'worker')}: each needs at least one row, and"
                f" they would have {', '.join(map(str, parts))}. Use a larger batch, fewer workers, or more even"
                " shares."
            )
        return shares

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
            **self.rounds.standing(),
            **self.layers.standing(),
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
        self.rounds.stand()
        # What was trained before the checkpoint is rank 0's to tell, since those workers may be gone.
        self._ledger = Ledger([(0, standing["row"])] if self.rank == 0 else [])


def _terms(told: bytes) -> tuple[str, Fingerprint, dict[str, Any]]:
    """What a worker says of its data; one of an older version, whose words a store has kept, said but the first."""
    try:
        rows, data, training = json.loads(told)
    except ValueError:
        return told.decode(), {}, {}
    return rows, data, training
