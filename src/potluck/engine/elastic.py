"""The engine of a worker that a host's coordinator leads: it may come and go, and computes the slices it is given.

The same two doors, Trainer and your own loop, run on it unchanged. The loader gives one slice at a time; its random
numbers come from (seed, step, slice), so that it does not matter who computes it. step() waits once this worker's
slices are done: for the average, or for slices of a worker that was lost.
"""

import atexit
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.policy import ApplyPolicy, Sync
from potluck.agree.pulse import Verdict, decide_mean
from potluck.engine.engine import Engine
from potluck.engine.led import Led
from potluck.engine.loader import BatchConfig, Loader, MicroBatch, Position, SliceLoader
from potluck.engine.losses import STEP_TOO_EARLY, insist_on_mean, loss_and_samples
from potluck.engine.node_client import NodeClient
from potluck.engine.part_sender import PartSender
from potluck.engine.range_losses import RangeLosses
from potluck.engine.replica import Replica, StepConfig
from potluck.engine.rows import as_dataset
from potluck.engine.slice_steps import SliceSteps
from potluck.engine.slices import describe_model, digest_and_glance, glance
from potluck.environment import QUIET
from potluck.errors import ConfigError, Interrupted
from potluck.events import EpochDone, StepDone, StepSkipped, WorkerStep
from potluck.fleet.client import Client, Means
from potluck.fleet.description import Description, Part, settings_of
from potluck.fleet.phases import reach
from potluck.fleet.tree import Node, sized_rows, slice_rows
from potluck.link.link import Alone, Link
from potluck.save import checkpoint
from potluck.save.saves import take_snapshot
from potluck.shard.strategy import FullShard, NoShard, ShardingStrategy
from potluck.signals import on_interrupt
from potluck.wire.messages import Committed, Work
from potluck.wire.words import clean_all

if TYPE_CHECKING:
    from potluck.engine.joined_view import JoinedView


class ElasticEngine(Engine):
    def __init__(
        self,
        client: Client | NodeClient,
        device: torch.device,
        link: Link = Alone(),
        *,
        policy: ApplyPolicy = Sync(),
        strategy: ShardingStrategy = NoShard(),
        step: StepConfig = StepConfig(),
    ) -> None:
        """`link`: of the ranks that are this worker together, if it is a node."""
        self.client = client
        super().__init__(link, device, policy=policy, strategy=strategy, step=step)
        self.led = Led(client, self.link, self)
        self._passes = 0
        """That a loop which counts epochs by itself has begun."""
        self._was_moved = False
        """Into another epoch than that in which it was, or from which it began to count."""
        self._view: JoinedView | None = None
        self._description: Description | None = None
        self._sender = PartSender(client, device)
        self._bounds: list[tuple[int, int]] = []
        self._work_started = 0.0
        self._divergence = 0.0
        """Of this worker from the last agreement, where workers step by themselves."""
        self._world = 1
        atexit.register(self._close_at_exit)

    @property
    def rank(self) -> int:
        """0 for the one who speaks for all, such as to print; it may change when workers go."""
        return 0 if self.led.member.leads and self.link.rank == 0 else self.client.worker_id + 1

    @property
    def version(self) -> int:
        """Agreements so far, which is what the host calls a step; under Sync all take each of them together."""
        return self.led.member.version

    @property
    def left(self) -> bool:
        """This worker has left the run, which continues."""
        return self.led.member.left

    @property
    def _is_over(self) -> bool:
        return self.led.member.is_over

    @property
    def world(self) -> int:
        return self._world

    @property
    def keeps_folder(self) -> bool:
        return False

    @property
    def is_led(self) -> bool:
        return True

    @property
    def speaks(self) -> bool:
        return QUIET not in os.environ and self.link.rank == 0

    # Preparing

    def _insist_on_slices(self, slices: int) -> None:
        """Each step's batch is handed out in them."""

    def _make_replica(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        arguments = (model, optimizer, self.link, self.device, self.config)
        if self.link.world == 1:
            return Replica(*arguments)
        from potluck.engine.sharded import ShardedReplica

        return ShardedReplica(*arguments, strategy=FullShard())

    def _make_loader(
        self, dataset: Any, batch: BatchConfig, seed: int, collate: Callable[[list[Any]], Any] | None
    ) -> Loader:
        if batch.fetchers:
            self.notice(
                "batch.fetchers has no effect under a host: which rows are a worker's is known only when it gets them,"
                " and it reads them then."
            )
            batch = replace(batch, fetchers=0)
        loader = SliceLoader(dataset, batch, shares=(1.0,), rank=0, device=self.device, seed=seed, collate=collate)
        self._insist_on_same_data(loader)  # the ranks of a node among themselves
        replica = self._prepared()
        self._description = Description(
            parts=self._make_parts(replica),
            model=describe_model(replica.model),
            rows=loader.rows,
            batch=batch.size,
            slices=batch.slice_count if self._batch_norm is None else batch.slices_in_pairs,
            seed=seed,
            unit=self._unit,
            samples_per_row=self.samples_per_row,
            policy=type(self.policy).kind,
            settings=settings_of(self.policy),
            state_bytes=sum(tensor.nbytes for tensor in replica.model.state_dict().values()),
            in_pairs=self._batch_norm is not None,
            data=self.data or {},
            told={},
        )
        loader.plan = self._plan
        loader.seed_of = self._seed_of
        return loader

    def _make_parts(self, replica: Replica) -> tuple[Part, ...]:
        """What is sent of a step, and in which order."""
        self._steps = SliceSteps(replica, self.led, self._sender, self._send_part)
        return self._steps.sums.described

    def _seed_of(self, micro: MicroBatch) -> int:
        return self._steps.seed_of(micro, self._loader().seed)

    # The loop

    def _plan(self) -> Iterator[MicroBatch]:
        """Slices as they are handed out, until the epoch ends or the run stops."""
        self._join()
        if self._is_counted or self.has_trainer:
            yield from self._rest_of_epoch()
            return
        if self._was_moved and self._passes:
            raise ConfigError(
                f"This worker was put into epoch {self._loader().position.epoch + 1} of the run, and its loop counts"
                " epochs by itself: it would train more of them than the run has. Write `for epoch in fleet.epochs(n):`"
                " around `for batch in loader:`, in the script of every worker."
            )
        self._passes += 1
        with on_interrupt(self.request_stop):
            yield from self._rest_of_epoch()
            if self.stopping and self._loader().position.row < self._loader().rows:
                self._end_early(None)

    def _rest_of_epoch(self) -> Iterator[MicroBatch]:
        loader = self._loader()
        # Whoever is given the last weights may be put at an epoch's beginning that nobody will train.
        while not self.stopping and loader.position.row < loader.rows and not self._is_at_the_end:
            work = self.led.member.begin()
            if work is None:
                self.led.check_weights()
                self._await_step()
                continue
            self._begin_work(work)
            yield from self._parts_of(work)

    @property
    def _is_at_the_end(self) -> bool:
        return self.rows_limit is not None and self.rows_seen >= self.rows_limit

    def _parts_of(self, work: Work) -> Iterator[MicroBatch]:
        """What goes through the model at once, until the work is done or of no use any more."""
        turn = self.led.member.turn
        return self._steps.micro_batches(self._bounds, work.row + work.rows, lambda: self._is_void(work, turn))

    def _is_void(self, work: Work, turn: int) -> bool:
        """Whether what is computed since that turn is of no use any more."""
        return turn != self.led.member.turn or self.stopping or self.version >= work.step

    def _begin_work(self, work: Work) -> None:
        self.replaying = False
        self._sender.begin()
        nodes = [(int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True)]
        self._bounds = slice_rows(work.row, work.rows, work.slices)
        if len(work.sizes):
            self._bounds = sized_rows(work.row, map(int, work.sizes))
        self._begin_nodes(nodes)
        self._work_started = time.perf_counter()
        reach("computing", work.step, engine=self)

    def _begin_nodes(self, nodes: list[Node]) -> None:
        self._steps.begin(nodes)

    def backward(self, loss: Tensor, *, samples: float, last: bool | None = None) -> None:
        replica, micro = self._prepared(), self._loader().current
        loss = insist_on_mean(loss, samples)
        if micro is None or not self.led.has_joined:
            raise ConfigError("Under a host, batches come from the loader that prepare() gave. Iterate over that.")
        if micro.number == 0:
            reach("forward", self.version + 1, engine=self)
        last = True if last is None else last
        self._steps.backward(micro, loss, samples, self._unit, last=last)
        if last:
            self._trained = micro
        replica.seal()

    def step(self) -> StepDone | StepSkipped | None:
        micro = self._loader().current
        if micro is None or micro is not self._trained:
            raise ConfigError(STEP_TOO_EARLY)
        self._prepared().unseal()
        self._steps.is_done = True
        if not micro.last:
            return None
        reach("sent", self.version + 1, engine=self)
        return self._await_step()

    def _send_part(self, part: int, numbers: Tensor) -> None:
        reach("part", self.version + 1, engine=self, part=part, gradients=numbers)
        self._sender.send(self.version + 1, part, numbers)

    def _await_step(self) -> StepDone | StepSkipped | None:
        """Until a step is committed and applied, or there are slices to compute, or the run stops."""
        found = self.led.await_step()
        return self._commit(*found) if found is not None else None

    def forget_work(self) -> None:
        self._steps.forget()

    # Joining

    def _join(self) -> None:
        if not self.led.has_joined:
            self.led.join()
            if not self.has_trainer and self.speaks and not self._is_over:
                from potluck.engine.joined_view import JoinedView  # only a person who looks waits for rich

                self._view = JoinedView(self, self._loader().batch.size)

    def _begin_run(self) -> None:
        """Where the run stands is the host's to say."""
        self._join()

    def describe(self) -> Description:
        assert self._description is not None
        return replace(self._description, training=self.training, rows_limit=self.rows_limit or 0, told=self.told)

    def stand_at(self, epoch: int, row: int) -> None:
        self._loader().position = Position(epoch, row)

    def load_state(self, folder: Path) -> tuple[int, int]:
        standing = self._saves.load(folder, self._prepared(), self._check_standing)
        assert standing is not None
        self.link.gather_rows([0.0])  # until all ranks have read it
        self._start_anew()
        self._stand_at(standing)
        return standing["version"] if "version" in standing else standing["step"], self.step_number

    def told_with_weights(self) -> tuple[float, float]:
        return float(self._prepared().optimizer.param_groups[0]["lr"]), self._divergence

    def suspicion(self) -> str:
        return self._prepared().suspicion()

    def hash_weights(self) -> tuple[str, Tensor]:
        return digest_and_glance(self._agreed_tensors())

    def glance(self) -> Tensor:
        return glance(self._agreed_tensors())

    def _agreed_tensors(self) -> list[Tensor]:
        return self._steps.agreed_tensors()

    def _start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""
        self._steps.sums.start_anew()

    # A step

    def _commit(self, committed: Committed, means: Means) -> StepDone | StepSkipped:
        started = time.perf_counter()
        told = clean_all(json.loads(committed.workers))
        self._world = max(1, len(told["workers"]))
        tensors = [torch.from_numpy(part) for part in means.parts]
        self.client.flush()
        self.led.check_weights(in_step=True)  # after this step nobody could say whose weights went wrong before it
        self.led.member.agree(committed)
        steps_before = self.step_number
        self.rows_seen += committed.rows
        self._count_rows(committed.rows)
        event, verdict = self._agree(committed, tensors, told, started)
        self.client.give_back(means)
        self.led.tell_applied(verdict.norm, verdict.fault or "")
        if told.get("epoch") is not None:
            self.last_epoch = EpochDone(**told["epoch"])
        self.events.emit(event)
        self._insist_on_progress(event)
        if committed.stop:
            self.stopping = True
        self._tell_agreed(steps_before)
        self._keep()
        self._trained = None
        if self._wants_stop and not self.stopping:
            self.led.leave()
        return event

    def _count_rows(self, rows: int) -> None:
        self.step_number = self.version
        self._loader().position.row += rows

    def _agree(
        self, committed: Committed, means: list[Tensor], told: dict[str, Any], started: float
    ) -> tuple[StepDone | StepSkipped, Verdict]:
        """The mean gradient goes to the optimizer, or all skip it."""
        replica = self._prepared()
        norm = self._steps.load(means, bytes(committed.used))
        verdict = decide_mean(committed.samples, committed.loss, norm, 1.0, self.config.clip)
        if verdict.fault is None:
            self._steps.sums.apply_buffers(means, bytes(committed.buffers))
        return self._apply_mean(replica, verdict, told, started), verdict

    def _apply_mean(
        self, replica: Replica, verdict: Verdict, told: dict[str, Any], started: float
    ) -> StepDone | StepSkipped:
        if verdict.fault is not None:
            replica.drop()
            self._steps.sums.restore_buffers()
            self.skipped += 1
            self._skipped_in_a_row += 1
            return StepSkipped(
                step=self.step_number, loss=verdict.loss, in_a_row=self._skipped_in_a_row, reason=verdict.fault
            )
        self._skipped_in_a_row = 0
        self._set_lr(replica)
        replica.apply(verdict.scale)
        self._steps.sums.reset()
        return self._tell_step(verdict, told, started)

    def _tell_step(self, verdict: Verdict, told: dict[str, Any], started: float) -> StepDone:
        workers = [{name: row[name] for name in WorkerStep.__slots__ if name in row} for row in told["workers"]]
        return StepDone(
            step=self.step_number,
            epoch=self._loader().position.epoch,
            rows_seen=self.rows_seen,
            samples=verdict.samples,
            loss=verdict.loss,
            lr=float(self._prepared().optimizer.param_groups[0]["lr"]),
            grad_norm=verdict.norm,
            seconds=told["seconds"] + time.perf_counter() - started,
            workers=tuple(WorkerStep(**row) for row in workers),
        )

    def _end_of_epoch(self) -> None:
        """The host has proved it, and told so with the epoch's last step."""
        if self.last_epoch is not None and self.last_epoch.epoch == self._loader().position.epoch:
            self.events.emit(self.last_epoch)

    # Looking, saving, leaving

    def evaluate(self, loss_of: Callable[[nn.Module, Any], Any], dataset: Any, batch_size: int) -> float:
        """The mean loss over a dataset, in ranges that the host hands out; the same whoever computes them."""
        self._join()
        rows = as_dataset(dataset)
        if self.replaying or self.left or (self.stopping and self._is_over) or not len(rows):
            return math.nan
        replica = self._prepared()

        def mean_of(batch: Any) -> tuple[Tensor, float]:
            return loss_and_samples(replica.loss(loss_of, batch), batch)

        losses = RangeLosses(mean_of, rows, replica, self.link, self._loader().collate)
        with losses.looking():
            return self.led.evaluate(len(rows), min(len(rows), max(1, batch_size)), losses.sum_of)

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        """The host keeps checkpoints, in its own run folder: one worker sends its state, and training goes on."""
        self._join()
        # Whoever has just caught up with the end would else be gone before it is saved, and end the run for all.
        is_past = self.replaying and not self._is_at_the_end
        if not (is_past or self.left or self._is_over):
            self.led.save(keep_last)

    def _keep(self) -> None:
        """A loop of one's own need not think of it: the host gets a checkpoint as often as that costs little."""
        if self.has_trainer or self.replaying or self.left or self._is_over or self.stopping:
            return
        if self.link.gather_rows([float(self.led.member.is_keep_due(time.monotonic()))])[0][0]:
            self.save("")

    def _end_early(self, folder: Path | None) -> NoReturn:
        """What is done is saved where it must be, the host knows that this worker goes, and a sentence says so."""
        if not self.left:
            self.save("")
            self.wait_for_saves()
        words = self.last_words()
        self.close()
        raise self.interrupted(words)

    def _end_well(self, folder: Path | None) -> None:
        self.save("")
        self.wait_for_saves()

    def last_words(self) -> str:
        member = self.led.member
        fault = member.unsaved.error if member.unsaved.step > member.saved.step else ""
        if self.left:
            lost = f" {fault.removesuffix('.')}, and this worker may have had the only weights." if fault else ""
            return f"Left the run after step {self.step_number}; it goes on without this worker.{lost}"
        return f"The host stopped the run after step {self.step_number}, {fault or 'and has saved it.'}"

    def wait_for_saves(self) -> None:
        """Until the host has the last checkpoint on its disk. Where it cannot write, it is tried again until it can."""
        self.led.await_saves(until_kept=True, speaks=self.speaks)

    def load(self, folder: str | Path) -> bool:
        """Whether the run that was joined is past its beginning; its weights are here then."""
        self._join()
        return self.version > 0

    def seed_random(self, seed: int) -> None:
        """Each slice draws its own numbers: nothing to do."""

    def start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        standing, kept = self._take_standing()
        snapshot = take_snapshot(self._prepared(), standing, [], kept)
        self.led.check_weights()
        return lambda: checkpoint.write(folder, snapshot)

    def request_stop(self) -> None:
        super().request_stop()
        self.led.member.wants_stop = True

    def close(self) -> None:
        """Tells the host that this worker has finished; the run ends when all who hold its weights have."""
        self._close(finished=True)

    def _close_at_exit(self) -> None:
        """A script that ended by an exception has finished nothing: its connection breaks, as if it had been killed."""
        self._close(finished=getattr(sys, "last_value", None) is None)

    def _close(self, *, finished: bool) -> None:
        atexit.unregister(self._close_at_exit)
        if self.client.is_closed:
            return
        self.led.close(finished=finished)
        if self._view is not None:
            self._view.close()
        if finished:
            self.link.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(finished=error is None or isinstance(error, Interrupted))

    def _loader(self) -> SliceLoader:
        if self.loader is None:
            raise ConfigError(
                "Under a host, give prepare() the dataset and a batch_size: its rows are shared out there."
            )
        assert isinstance(self.loader, SliceLoader)
        return self.loader

    def _start_of_step(self) -> None:
        """Slices begin one by one; there is nothing to do for a whole step."""

    def _say(self, sentence: str) -> None:
        self.client.say(sentence)

    def _standing(self) -> dict[str, Any]:
        return super()._standing() | {"version": self.version}

    def _stand_at(self, standing: dict[str, Any]) -> None:
        self._was_moved |= standing["epoch"] != self._loader().position.epoch
        super()._stand_at(standing)
