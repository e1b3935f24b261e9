"""The engine of a worker that a host's coordinator leads: it may come and go, and computes the slices it is given.

The same two doors, Trainer and your own loop, run on it unchanged. The loader gives one slice at a time; its random
numbers come from (seed, step, slice), so that it does not matter who computes it. step() waits once this worker's
slices are done: for the average, or for slices of a worker that was lost.
"""

import atexit
import contextlib
import json
import math
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.agree.policy import ApplyPolicy, Sync
from potluck.agree.pulse import Verdict, decide_mean
from potluck.engine.buckets import Allocate
from potluck.engine.engine import STEP_TOO_EARLY, Engine, _insist_on_mean, loss_and_samples
from potluck.engine.loader import BatchConfig, Loader, MicroBatch, Position, SliceLoader, plan_step
from potluck.engine.node_client import NodeClient
from potluck.engine.replica import Replica, StepConfig
from potluck.engine.rows import as_dataset, mix
from potluck.engine.slices import SliceSums, describe_model, digest_and_glance, glance
from potluck.environment import PATIENCE_S, QUIET
from potluck.errors import ConfigError, Diverged, Interrupted, PotluckError
from potluck.events import EpochDone, RunEnded, RunStarted, StepDone, StepSkipped, WorkerStep
from potluck.fleet.client import Client, Lost, Means, position_of
from potluck.fleet.coordinator import SAVE
from potluck.fleet.description import Description, Part, settings_of
from potluck.fleet.invite import Invite
from potluck.fleet.parcel import Unpacker, chunks, files_in, most_bytes, pack
from potluck.fleet.tree import Node, sized_rows, slice_rows
from potluck.link.link import Alone, Link, choose_device
from potluck.link.link import connect as join_group
from potluck.link.ranks import is_later_rank, meet
from potluck.save import checkpoint
from potluck.save.saves import take_snapshot
from potluck.shard.blocks import find_blocks
from potluck.shard.strategy import FullShard, HybridShard, NoShard, ShardingStrategy
from potluck.signals import on_interrupt
from potluck.wire.messages import (
    Admitted,
    Applied,
    Committed,
    Evaluated,
    EvaluateNext,
    EvaluateRange,
    Leave,
    Message,
    Ready,
    Refusal,
    Saved,
    SaveDue,
    Shutdown,
    SliceReport,
    StateBegin,
    StateChunk,
    StateRequest,
    Work,
)
from potluck.wire.words import clean_all

if TYPE_CHECKING:
    from potluck.show.progress import Progress

DRIFTS, DRIFT_STEPS = 4, 40
"""A worker whose weights had to be replaced more often than that within so many steps ends."""
KEEP_FIRST_S, KEEP_EVERY_S = 10.0, 60.0
"""A loop of one's own has its run saved on the host after this long, and then about this often."""
KEEP_SHARE = 20
"""And not before this many times as long as the last save took."""


class ElasticEngine(Engine):
    @classmethod
    def join(
        cls,
        invite: Invite,
        device: torch.device,
        *,
        policy: ApplyPolicy = Sync(),
        strategy: ShardingStrategy = NoShard(),
        step: StepConfig = StepConfig(),
    ) -> "ElasticEngine":
        kind, ranks = engine_for(policy, strategy), ranks_of(strategy)
        client = connect(invite, device) if ranks == 1 or not is_later_rank() else None
        return kind(*as_one_worker(client, device, ranks), policy=policy, strategy=strategy, step=step)

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
        self.version = 0
        """Agreements so far, which is what the host calls a step; here all take each of them together."""
        self.left = False
        """This worker has left the run, which goes on."""
        self._joined = False
        self._over = False
        self._is_in = False
        """Since it joined, or joined again: the host has said that its weights are the run's, or has sent it those."""
        self._passes = 0
        """That a loop which counts epochs by itself has begun."""
        self._drifts: list[int] = []
        """The steps at which this worker's weights were not the others'."""
        self._was_moved = False
        """Into another epoch than that in which it was, or from which it began to count."""
        self._kept_at = self._keeping_s = 0.0
        """When the host last had a checkpoint, and how long it took to get there."""
        self._progress: Progress | None = None
        self._shown_at = 0.0
        self._description: Description | None = None
        self._work: Work | None = None
        self._slices: list[int] = []
        self._bounds: list[tuple[int, int]] = []
        self._reports: dict[int, tuple[float, float]] = {}
        self._slice_loss = 0.0
        self._slice_samples = 0.0
        self._slice_done = True
        self._work_started = 0.0
        self._divergence = 0.0
        """Of this worker from the last agreement, where workers step by themselves."""
        self._later: deque[Message] = deque()
        self._asked: list[StateRequest] = []
        self._told = torch.zeros(0)
        """What a glance at the weights gave when the host was told their digest."""
        self._changed_at = -1
        """The version whose weights were last found changed. At two in a row, the loop itself changes them."""
        self._changes_itself = False
        self._is_damaged = False
        """They changed while no code of the loop ran."""
        self._committed: Committed | None = None
        self._save_due = 0
        self._due_at = 0.0
        self._saved = Saved(0, "", "")
        """The last checkpoint that is on the host's disk."""
        self._unsaved = Saved(0, "", "")
        """The last that the host could not write, and why."""
        self._world = 1
        self._stream: torch.cuda.Stream | None = None
        self._hosted: list[Tensor] = []
        self._threads: list[threading.Thread] = []
        self._parcels: list[Path] = []
        """Folders that are being sent."""
        atexit.register(self._close_at_exit)

    @property
    def rank(self) -> int:
        """0 for the one who speaks for all, such as to print; it may change when workers go."""
        return 0 if self._leads and self.link.rank == 0 else self.client.worker_id + 1

    @property
    def _leads(self) -> bool:
        """Whether this worker is the one who speaks for all of them."""
        return self._committed is None or self._committed.leader == self.client.worker_id

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
            state_bytes=_bytes_of(replica.model),
            in_pairs=self._batch_norm is not None,
            data=self.data or {},
            told={},
        )
        loader.plan = self._plan
        loader.seed_of = self._seed_of
        return loader

    def _make_parts(self, replica: Replica) -> tuple[Part, ...]:
        """What is sent of a step, and in which order."""
        room = self._make_room(replica)
        self._sums = SliceSums(replica.model, find_blocks(replica.model), self._send_part, room)
        self._sums.before_last_part = self._send_used
        self._sums.send_exact = self._send_exact
        return self._sums.described

    def _make_room(self, replica: Replica) -> Allocate | None:
        """For tensors that a host on this machine can read where they are."""
        if self.device.type != "cpu":
            return None
        self.client.make_room(sum(p.numel() for p in replica.model.parameters() if p.requires_grad))
        return lambda total, like: torch.from_numpy(self.client.allocate(total))

    def _seed_of(self, micro: MicroBatch) -> int:
        return mix(self._loader().seed, self.version + 1, self._slices[micro.number])

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
            if self._work is None:
                self._check_weights()
                self._await_step()
                continue
            work, self._work = self._work, None
            self._begin_work(work)
            yield from self._parts_of(work)

    @property
    def _is_at_the_end(self) -> bool:
        return self.rows_limit is not None and self.rows_seen >= self.rows_limit

    def _parts_of(self, work: Work) -> Iterator[MicroBatch]:
        """What goes through the model at once, until the work is done or of no use any more."""
        session = self.client.session
        for index in range(len(self._slices)):
            if session is not self.client.session or self.stopping or self.version >= work.step:
                break
            start, end = self._bounds[self._slices[index]]
            self._sums.start_slice()
            self._prepared().disarm()
            self._slice_loss = self._slice_samples = 0.0
            self._slice_done = False
            is_last = index == len(self._slices) - 1
            yield MicroBatch(start, end, is_last, work.row + work.rows, number=index)
            if not self._slice_done:
                raise ConfigError(
                    f"The slice of rows {start} to {end} was given out, but step() was not called after it."
                    " Call backward() and step() for every batch of the loader."
                )

    def _begin_work(self, work: Work) -> None:
        self.replaying = False
        self.client.flush()  # what was sent before must not change under the sender's hands
        nodes = [(int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True)]
        self._bounds = slice_rows(work.row, work.rows, work.slices)
        if len(work.sizes):
            self._bounds = sized_rows(work.row, map(int, work.sizes))
        self._reports = {}
        self._hosted = []
        self._begin_nodes(nodes)
        self._work_started = time.perf_counter()

    def _begin_nodes(self, nodes: list[Node]) -> None:
        self._slices = self._sums.begin(nodes)

    def backward(self, loss: Tensor, *, samples: float, last: bool | None = None) -> None:
        replica, micro = self._prepared(), self._loader().current
        loss = _insist_on_mean(loss, samples)
        if micro is None or not self._joined:
            raise ConfigError("Under a host, batches come from the loader that prepare() gave. Iterate over that.")
        last = True if last is None else last
        replica.arm(last=last)
        if samples:
            self._slice_loss += loss.detach().item() * samples
            self._slice_samples += samples
        if last:
            self._reports[self._slices[micro.number]] = (self._slice_samples, self._slice_loss)
            if micro.last:
                self._send_report()
        self._sums.arm(communicate=last)
        if samples:
            (loss * (samples * self._unit)).backward()  # type: ignore[no-untyped-call]
        if last:
            self._sums.finish_slice(self._slice_samples * self._unit)
            self._trained = micro
        replica.seal()

    def step(self) -> StepDone | StepSkipped | None:
        micro = self._loader().current
        if micro is None or micro is not self._trained:
            raise ConfigError(STEP_TOO_EARLY)
        self._prepared().unseal()
        self._slice_done = True
        if not micro.last:
            return None
        return self._await_step()

    def _send_report(self) -> None:
        numbers = np.array(list(self._reports), "<u4")
        found = np.array(list(self._reports.values()), "<f8").reshape(-1, 2)
        self.client.send(SliceReport(self.version + 1, numbers, found[:, 0].copy(), found[:, 1].copy(), 0.0, b""))

    def _send_used(self) -> None:
        """Which parameters the slices used is known when the last part is; so is how long they took."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # else busy would be the time to launch kernels
        busy_s = time.perf_counter() - self._work_started
        self._check_weights(in_step=True)  # before the last part, without which nothing is committed
        empty = np.zeros(0)
        self.client.send(
            SliceReport(self.version + 1, empty.astype("<u4"), empty, empty, busy_s, self._sums.used_bits())
        )

    def _send_exact(self, exact: bytes) -> None:
        none = np.zeros(0)
        self.client.send(SliceReport(self.version + 1, none.astype("<u4"), none, none, 0.0, b"", buffers=exact))

    def _send_part(self, part: int, gradients: Tensor) -> None:
        if gradients.device.type == "cpu":
            self.client.send_part(self.version + 1, part, gradients.numpy())
            return
        # The copy runs beside the backward; the sender waits for it, and the backward does not.
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        host = torch.empty(gradients.shape, dtype=gradients.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(gradients, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
        gradients.record_stream(stream)
        self._hosted.append(host)
        self.client.send_part(self.version + 1, part, host.numpy(), before=copied.synchronize)

    # Waiting

    def _await_step(self) -> StepDone | StepSkipped | None:
        """Until a step is committed and applied, or there are slices to compute, or the run stops."""
        while True:
            self._serve_requests()
            message = self._later.popleft() if self._later else self._receive()
            match message:
                case None:
                    return None
                case Committed() if message.step == self.version + 1:
                    means = self.client.take_means(message.step)
                    return self._commit(message, means) if means is not None else None
                case Work():
                    if message.step == self.version + 1:
                        self._work = message
                        return None
                case Shutdown():
                    self.stopping = self._over = True
                    return None

    def _receive(self) -> Message | None:
        """The next message that is for the training thread; none after a loss that was mended, or a wish to leave."""
        while True:
            message = self.client.receive(timeout_s=0.2)
            match message:
                case None:
                    if self._wants_stop and self._is_idle:
                        self._leave_politely()
                        return None
                case Lost():
                    self._mend(message.why)
                    return None
                case Refusal():
                    if message.code == 4:
                        raise Diverged(message.sentence + self._prepared().suspicion())
                    raise PotluckError(message.sentence)
                case StateRequest():
                    self._asked.append(message)
                    self._serve_requests()
                case Saved() if message.error:
                    self._unsaved = message
                    return message
                case Saved():
                    self._saved = message
                    self._kept_at = time.monotonic()
                    self._keeping_s = self._kept_at - self._due_at if self._due_at else 0.0
                    self._due_at = 0.0
                    return message
                case Admitted() if message.wait:
                    self._insist_on_same_loop()
                    self._fetch_state(message)
                    return None
                case Admitted():
                    pass
                case _:
                    return message

    def _insist_on_same_loop(self) -> None:
        """Weights that have drifted are sent anew; where they do so again and again, that mends nothing."""
        self._drifts = [step for step in self._drifts if step > self.version - DRIFT_STEPS] + [self.version]
        if len(self._drifts) > DRIFTS:
            raise ConfigError(
                f"This worker's weights have differed from the others' {len(self._drifts)} times in"
                f" {self.version - self._drifts[0] + 1} steps, so its loop does something else than theirs. Often it is"
                " a learning-rate scheduler that starts anew here: give it to prepare(..., scheduler=scheduler), which"
                " sends it to whoever joins."
            )

    @property
    def _is_idle(self) -> bool:
        return self._work is None and self._joined

    def _mend(self, why: str) -> None:
        """The connection is lost: joins again, and goes on from wherever the run stands then."""
        if self._over:
            self.stopping = True
            return
        self.client.say(f"Lost the host ({why}); joining again.")
        self._work = None
        self._later.clear()
        self._asked.clear()
        self._forget_work()
        self.client.connect(again=True)
        self._present()
        if self._saved.step < self._save_due and not self._over:  # the answer may have been lost with the connection
            self.client.send(SaveDue(self._save_due, 2))

    def _forget_work(self) -> None:
        """The model is again as it was agreed on."""
        self._sums.reset()
        self._sums.restore_buffers()

    # Joining

    def _join(self) -> None:
        if not self._joined:
            self._joined = True
            self._present()
            self._kept_at = time.monotonic()
            if not self.has_trainer and self.speaks and not self._over:
                self._show()

    def _show(self) -> None:
        """The run, to whoever has joined it with a script."""
        from potluck.show.progress import Progress

        self._progress, self._shown_at = Progress(), time.monotonic()
        self.events.listeners.append(self._progress)
        loader = self._loader()
        self.events.emit(
            RunStarted(
                name=Path(sys.argv[0]).stem,
                folder="the host's run folder",
                workers=self.world,
                device=str(self.device),
                parameters=self.parameters,
                unit="rows",
                batch_size=loader.batch.size,
                steps_total=self.told.get("steps_total", 0),
                from_step=self.step_number,
            )
        )

    def _run_ended(self) -> RunEnded:
        last = self.events.last_step
        return RunEnded(
            reason="interrupted" if self.stopping else "finished",
            step=self.step_number,
            rows_seen=self.rows_seen,
            seconds=time.monotonic() - self._shown_at,
            loss=last.loss if last is not None else None,
            validation_loss=None,
            skipped=self.skipped,
        )

    def _begin_run(self) -> None:
        """Where the run stands is the host's to say."""
        self._join()

    def _present(self) -> None:
        """Says what this worker has built and holds, and gets what it lacks."""
        assert self._description is not None
        loader = self._loader()
        described = Description(
            **{
                name: getattr(self._description, name)
                for name in self._description.__slots__
                if name not in ("told", "rows_limit", "training")
            },
            training=self.training,
            rows_limit=self.rows_limit or 0,
            told=self.told,
        )
        self.client.description = described
        holds, self._is_in = int(self.version > 0), False
        self.client.pass_over_until(self.version)
        before = self._told
        digest, self._told = self._hash_weights()
        is_changed = self._is_damaged or (self._changed_at == self.version and not self._changes_itself)
        if holds and (is_changed or not torch.equal(before, self._told)):
            digest = ""  # this host may not have heard the one that was told before
            self.client.say("The weights changed in this worker's memory since their last step; it gets them anew.")
        self.client.send(Ready(described.to_json(), self.version, digest, holds))
        while True:
            message = self.client.receive()
            match message:
                case Lost():
                    self._mend(message.why)
                    return
                case Refusal():
                    raise ConfigError(message.sentence)
                case Admitted() if message.wait:
                    self._fetch_state(message)
                    return
                case Admitted():
                    where = position_of(message.position)
                    if not holds and message.step == where["step"]:
                        loader.position = Position(where["epoch"], where["row"])
                    self._is_in = True
                    return
                case Shutdown():
                    self.stopping = self._over = True
                    return
                case None:
                    pass
                case _:
                    self._later.append(message)

    def _fetch_state(self, admitted: Admitted) -> None:
        """The run's weights from a worker that has them, or from the host's disk; the averages since then wait."""
        replica = self._prepared()
        self._work, self._is_in = None, False
        self._later.clear()
        limit = most_bytes(_bytes_of(replica.model))
        folder = self._new_folder()
        unpacker: Unpacker | Counter | None = None
        transfer = -1
        try:
            while unpacker is None or not unpacker.is_complete:
                message = self.client.receive()
                match message:
                    case Lost():
                        self._mend(message.why)
                        return
                    case Refusal():
                        raise PotluckError(message.sentence)
                    case Shutdown():
                        self.stopping = self._over = True
                        return
                    case StateBegin():
                        place = folder / f"step-{message.step:08d}"
                        if self.link.rank == 0:
                            shutil.rmtree(place, ignore_errors=True)
                            unpacker = Unpacker(place, message.header, limit)
                        else:
                            unpacker = Counter(message.header)
                        transfer = message.transfer
                    case StateChunk() if unpacker is not None and message.transfer == transfer:
                        unpacker.feed(message.data)
                    case Committed() | Work():
                        self._later.append(message)
                    case Admitted():  # from somebody else, or from the disk, and maybe of an earlier step
                        self._later.clear()
            standing = self._saves.load(folder, replica, self._check_standing)
            assert standing is not None
            self.link.gather_rows([0.0])  # until all ranks have read it
            self._start_anew()
            self._stand_at(standing)
        finally:
            if unpacker is not None:
                unpacker.close()
            if self.link.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        self._save_due = self._saved.step  # what was due before is of a state that this worker no longer has
        self._changed_at, self._is_damaged = -1, False
        self.client.pass_over_until(self.version)
        self._later = deque(m for m in self._later if getattr(m, "step", 0) > self.version)
        self.replaying = self._is_in = True
        self.client.say(f"Got the weights of step {self.step_number}.")
        self._tell_applied(0.0, "")

    def _new_folder(self) -> Path:
        """Of this worker, for a while. Of several ranks it is the first that makes it, and removes it."""
        folder = tempfile.mkdtemp(prefix="potluck-state-") if self.link.rank == 0 else ""
        return Path(self.link.gather_bytes(folder.encode())[0].decode())

    def _hash_weights(self) -> tuple[str, Tensor]:
        """The digest of what all workers agreed on last, as it is in this worker's memory, and a glance at it."""
        return digest_and_glance(self._agreed_tensors())

    def _glance(self) -> Tensor:
        return glance(self._agreed_tensors())

    def _agreed_tensors(self) -> list[Tensor]:
        return [*self._prepared().model.parameters(), *self._sums.agreed_buffers]

    def _check_weights(self, *, in_step: bool = False) -> None:
        """Tells the host if they are no longer what it was told: a bit that flipped must not reach the others.

        `in_step`: nothing has run since the last look that may change them.
        """
        if not torch.equal(self._glance(), self._told):
            self._is_damaged |= in_step
            self._changes_itself |= self._changed_at == self.version - 1
            self._changed_at = self.version
            self._tell_applied(0.0, "")

    def _start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""
        self._sums.start_anew()

    # A step

    def _commit(self, committed: Committed, means: Means) -> StepDone | StepSkipped:
        started = time.perf_counter()
        told = clean_all(json.loads(committed.workers))
        self._committed = committed
        self._world = max(1, len(told["workers"]))
        tensors = [torch.from_numpy(part) for part in means.parts]
        self.client.flush()
        self._check_weights(in_step=True)  # after this step nobody could say whose weights went wrong before it
        self.version = committed.step
        steps_before = self.step_number
        self.rows_seen += committed.rows
        self._count_rows(committed.rows)
        event, verdict = self._agree(committed, tensors, told, started)
        self.client.give_back(means)
        self._tell_applied(verdict.norm, verdict.fault or "")
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
            self._leave_politely()
        return event

    def _count_rows(self, rows: int) -> None:
        self.step_number = self.version
        self._loader().position.row += rows

    def _agree(
        self, committed: Committed, means: list[Tensor], told: dict[str, Any], started: float
    ) -> tuple[StepDone | StepSkipped, Verdict]:
        """The mean gradient goes to the optimizer, or all skip it."""
        replica = self._prepared()
        self._sums.load(means, bytes(committed.used))
        norm = replica.norm().item()
        verdict = decide_mean(committed.samples, committed.loss, norm, 1.0, self.config.clip)
        if verdict.fault is None:
            self._sums.apply_buffers(means, bytes(committed.buffers))
        return self._apply_mean(replica, verdict, told, started), verdict

    def _apply_mean(
        self, replica: Replica, verdict: Verdict, told: dict[str, Any], started: float
    ) -> StepDone | StepSkipped:
        if verdict.fault is not None:
            replica.drop()
            self._sums.restore_buffers()
            self.skipped += 1
            self._skipped_in_a_row += 1
            return StepSkipped(
                step=self.step_number, loss=verdict.loss, in_a_row=self._skipped_in_a_row, reason=verdict.fault
            )
        self._skipped_in_a_row = 0
        self._set_lr(replica)
        replica.apply(verdict.scale)
        self._sums.reset()
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

    def _tell_applied(self, norm: float, fault: str) -> None:
        replica = self._prepared()
        lr = float(replica.optimizer.param_groups[0]["lr"])
        digest, self._told = self._hash_weights()
        self.client.send(Applied(self.version, digest, lr, norm, fault, self._divergence))

    def _end_of_epoch(self) -> None:
        """The host has proved it, and told so with the epoch's last step."""
        if self.last_epoch is not None and self.last_epoch.epoch == self._loader().position.epoch:
            self.events.emit(self.last_epoch)

    # Looking, saving, leaving

    def evaluate(self, loss_of: Callable[[nn.Module, Any], Any], dataset: Any, batch_size: int) -> float:
        """The mean loss over a dataset, in ranges that the host hands out; the same whoever computes them."""
        self._join()
        rows = as_dataset(dataset)
        if self.replaying or self.left or (self.stopping and self._over) or not len(rows):
            return math.nan
        model = self._prepared().model
        looker = SliceLoader(
            rows, BatchConfig(size=len(rows)), shares=(1.0,), rank=0, device=self.device,
            collate=self._loader().collate,
        )  # fmt: skip
        looker._ordered = (0, 0, ()), torch.arange(len(rows))
        size, step = min(len(rows), max(1, batch_size)), self.version
        were_training = [module for module in model.modules() if module.training]
        model.eval()
        ask = EvaluateNext(step, len(rows), size, 0, 0, 0.0, 0.0)
        try:
            while True:
                self.client.send(ask)
                answer = self._await_evaluation(step)
                if isinstance(answer, Evaluated):
                    return answer.loss_sum / answer.samples if answer.samples else math.nan
                if answer is None:
                    if self._over or self.version != step:
                        return math.nan
                    ask = EvaluateNext(step, len(rows), size, 0, 0, 0.0, 0.0)  # joined again: anew
                    continue
                total, samples = self._look_at(loss_of, looker, answer)
                ask = EvaluateNext(step, len(rows), size, answer.start, answer.end, total, samples)
        finally:
            for module in were_training:
                module.training = True

    def _look_at(
        self, loss_of: Callable[[nn.Module, Any], Any], rows: SliceLoader, asked: EvaluateRange
    ) -> list[float]:
        """The sum of the losses of some rows, and how many samples they are. Of a node, each rank looks at its own."""
        replica, total, count = self._prepared(), 0.0, 0.0
        shares = (1.0,) * self.link.world
        for micro in plan_step(asked.start, asked.end, rows.batch, shares, self.link.rank, in_step=replica.in_step):
            batch = rows.take(micro.start, micro.end)
            with torch.no_grad():
                loss, samples = loss_and_samples(replica.loss(loss_of, batch), batch)
            if samples and micro.counts:
                total, count = total + loss.item() * samples, count + samples
        return [sum(column) for column in zip(*self.link.gather_rows([total, count]), strict=True)]

    def _await_evaluation(self, step: int) -> EvaluateRange | Evaluated | None:
        while True:
            message = self._receive()
            match message:
                case EvaluateRange() | Evaluated() if message.step == step:
                    return message
                case Shutdown():
                    self.stopping = self._over = True
                    return None
                case None:
                    return None
                case Work() | Committed():
                    self._later.append(message)

    def save(self, folder: str | Path, *, keep_last: int = 2) -> None:
        """The host keeps checkpoints, in its own run folder: one worker sends its state, and training goes on."""
        self._join()
        # Whoever has just caught up with the end would else be gone before it is saved, and end the run for all.
        is_past = self.replaying and not self._is_at_the_end
        if is_past or self.left or self._over:
            return
        if self._leads:
            self._await_saves(until_kept=False)  # one at a time
        self._save_due, self._due_at = self.version, time.monotonic()
        self.client.send(SaveDue(self.version, keep_last))
        if self._leads:
            self._send_state(StateRequest(SAVE, self.version))

    def _keep(self) -> None:
        """A loop of one's own need not think of it: the host gets a checkpoint as often as that costs little.

        The worker that speaks for all decides; should it be lost, the host asks another.
        """
        if self.has_trainer or self.replaying or self.left or self._over or self.stopping:
            return
        since_s = time.monotonic() - self._kept_at
        every_s = KEEP_EVERY_S if self._saved.step else KEEP_FIRST_S
        is_due = self._saved.step >= self._save_due and since_s > max(every_s, KEEP_SHARE * self._keeping_s)
        if self.link.gather_rows([float(self._leads and is_due)])[0][0]:
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
        fault = self._unsaved.error if self._unsaved.step > self._saved.step else ""
        if self.left:
            lost = f" {fault.removesuffix('.')}, and this worker may have had the only weights." if fault else ""
            return f"Left the run after step {self.step_number}; it goes on without this worker.{lost}"
        return f"The host stopped the run after step {self.step_number}, {fault or 'and has saved it.'}"

    def wait_for_saves(self) -> None:
        """Until the host has the last checkpoint on its disk. Where it cannot write, it is tried again until it can."""
        self._await_saves(until_kept=True)

    def _await_saves(self, *, until_kept: bool) -> None:
        told = ""
        while not self.left and not self._over:
            answered = self._saved.step if until_kept else max(self._saved.step, self._unsaved.step)
            if answered >= self._save_due:
                return
            message = self._receive()
            if isinstance(message, Saved) and message.error not in ("", told) and until_kept and self.speaks:
                told = message.error
                self.client.say(f"{told.removesuffix('.')}. It is tried again. Ctrl-C leaves all the same.")
            if isinstance(message, Shutdown):
                self.stopping = self._over = True
            elif isinstance(message, Work | Committed):
                self._later.append(message)
            elif message is None and not self.left and self.client.worker_id >= 0:
                self.client.send(SaveDue(self._save_due, 2))

    def load(self, folder: str | Path) -> bool:
        """Whether the run that was joined is past its beginning; its weights are here then."""
        self._join()
        return self.version > 0

    def seed_random(self, seed: int) -> None:
        """Each slice draws its own numbers: nothing to do."""

    def _serve_requests(self) -> None:
        for request in [asked for asked in self._asked if asked.step <= self.version]:
            self._asked.remove(request)
            self._send_state(request)

    def _send_state(self, request: StateRequest) -> None:
        """A copy in host memory now; written aside and sent while training goes on."""
        folder, version = self._new_folder(), self.version
        write = self._start_snapshot(folder)
        if self.link.rank == 0:
            self._parcels = [place for place in self._parcels if place.exists()] + [folder]
        session = self.client.session

        def work() -> None:
            try:
                place = write()
                if place is None:
                    return
                header = pack(place)
                begin = StateBegin(request.transfer, version, header)
                self.client.send_parcel(
                    session,
                    begin,
                    request.transfer,
                    chunks(place, header),
                    done=lambda: shutil.rmtree(folder, ignore_errors=True),
                )
            except Exception as error:
                self.client.say(f"Could not send the state of step {version}: {error}")
                shutil.rmtree(folder, ignore_errors=True)

        thread = threading.Thread(target=work, name="state sender")
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _start_snapshot(self, folder: Path) -> Callable[[], Path | None]:
        """A copy in host memory now. What is returned writes it below the folder, and says where, if that is ours."""
        standing, kept = self._take_standing()
        snapshot = take_snapshot(self._prepared(), standing, [], kept)
        self._check_weights()
        return lambda: checkpoint.write(folder, snapshot)

    def _leave_politely(self) -> None:
        """After a step, or while there is nothing to do: nothing is computed again."""
        self.left = True
        self.client.send(Leave(0, "asked to stop"))
        self._await_goodbye(self.client.patience_s)
        self.stopping = self._over = True

    def _await_goodbye(self, patience_s: float) -> None:
        deadline, was_asked = time.monotonic() + patience_s, False
        while True:  # until nothing came in time: each rank of a node has a clock of its own, and all hear the same
            message = self.client.receive(timeout_s=max(0.0, deadline - time.monotonic()))
            match message:
                case Lost() | Shutdown() | None:
                    return
                case StateRequest():
                    self._asked.append(message)
                    self._serve_requests()
                    if not was_asked:  # it may be asked again and again, where the host cannot write
                        deadline, was_asked = time.monotonic() + 10 * patience_s, True
                case Saved() if message.error:
                    self._unsaved = message
                    self.client.say(f"{message.error.removesuffix('.')}. It is tried again before this worker goes.")

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
        if self._joined and not self._over and finished:
            self.client.send(Leave(1, "finished"))
            self._await_goodbye(self.client.patience_s)
        self._over = True
        if self._progress is not None:
            self._progress(self._run_ended())
            self._progress = None
        for thread in self._threads:
            thread.join(timeout=1.0)
        self.client.close()
        for folder in self._parcels:
            shutil.rmtree(folder, ignore_errors=True)
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
        self.version = standing.get("version", standing["step"])


def connect(invite: Invite, device: torch.device) -> Client:
    client = Client(invite, name=name_of_worker(), kind=kind_of(device), say=_say)
    client.connect()
    return client


def name_of_worker() -> str:
    return os.environ.get("POTLUCK_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def as_one_worker(
    client: Client | None, device: torch.device, ranks: int
) -> tuple[Client | NodeClient, torch.device, Link]:
    """What an engine is made of: of one process, its client; of several, what makes them one worker of the host.

    `client`: the first rank's, which has joined. The others come when it asks for them, and have none.
    """
    if ranks == 1:
        assert client is not None
        return client, device, Alone()
    try:
        meet(ranks)
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))  # a worker's threads are its ranks' together
        device = choose_device()
        link = join_group(device, PATIENCE_S)
        return NodeClient(client, link, name=name_of_worker()), device, link
    except BaseException:
        if client is not None:
            client.close()
        raise


class Counter:
    """In place of an Unpacker, where another rank writes the parcel down: only knows when it is whole."""

    def __init__(self, header: str) -> None:
        self._left = sum(size for _, size in files_in(header))

    @property
    def is_complete(self) -> bool:
        return self._left <= 0

    def feed(self, data: bytes | memoryview) -> None:
        self._left -= len(data)

    def close(self) -> None:
        pass


def engine_for(policy: ApplyPolicy, strategy: ShardingStrategy = NoShard()) -> type[ElasticEngine]:
    """Whether workers take each step together, or step by themselves; and whether each is a node of several ranks."""
    name = type(strategy).__name__
    if not isinstance(strategy, NoShard | HybridShard):
        raise ConfigError(
            f"{name} splits one replica over all workers, and under a host each may go at any time. Use HybridShard,"
            " whose replicas are each split over the ranks of one machine, with the policy Cadence or Async; or start"
            " the workers as one group, with potluck run or torchrun."
        )
    is_node = ranks_of(strategy) > 1
    if isinstance(policy, Sync):
        if is_node:
            raise ConfigError(
                f"{name} works with a host under Cadence and Async, where a node steps by itself. Under Sync each"
                " slice's gradient is one process's. Choose another policy, or set strategy to no_shard."
            )
        return ElasticEngine
    from potluck.engine.elastic_windows import ElasticWindowEngine, insist_on_what_a_host_can_do

    insist_on_what_a_host_can_do(policy)
    if not is_node:
        return ElasticWindowEngine
    from potluck.engine.elastic_nodes import NodeEngine, insist_on_few_files

    insist_on_few_files(ranks_of(strategy))
    return NodeEngine


def ranks_of(strategy: ShardingStrategy) -> int:
    """How many processes of one machine are one worker."""
    return strategy.intra_node_size if isinstance(strategy, HybridShard) else 1


def kind_of(device: torch.device) -> str:
    """Workers of one kind compute the same bits from the same bits.

    Those of which only what follows the semicolon is the same do so in an update: threads and the make of a processor
    change the bits of gradients, and nothing that an optimizer computes number by number (decision 0033).
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    fused = "" if torch.backends.cpu.get_cpu_capability() != "DEFAULT" else " without AVX2"
    update = f"{platform.machine()}{fused}, torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"{processor}, {threads} thread{'s' if threads > 1 else ''}; {update}"


def _bytes_of(model: nn.Module) -> int:
    """Of its weights and buffers, whole."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def _say(sentence: str) -> None:
    print(f"potluck: {sentence}", file=sys.stderr, flush=True)
