"""HostRounds: rounds that a host leads. This worker may come and go, and computes what it is given.

What a piece of work is, its HostWork knows: slices of a step that all take together (slice_steps.py), or rows over
which this worker steps by itself (window_steps.py). Here is what is the same for both: the loader gives the work as it
is handed out; step() waits once it is done: for what all agree on, or for the work of a worker that was lost.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from potluck.agree.step_report import StepDecision
from potluck.data.loader import Loader, SliceLoader
from potluck.data.plan import BatchConfig, MicroBatch
from potluck.data.source import DataSource
from potluck.engine.host_lifecycle import HostLifecycle
from potluck.engine.losses import STEP_TOO_EARLY, check_mean
from potluck.engine.part_sender import PartSender
from potluck.engine.replica import Replica
from potluck.engine.rounds import check_same_data
from potluck.engine.run_state import RunState
from potluck.engine.slices import describe_model, state_specs
from potluck.errors import ConfigError
from potluck.events import EpochDone, StepDone, StepSkipped, WorkerStep
from potluck.fleet.client import Means
from potluck.fleet.description import Description, Part, settings_of
from potluck.fleet.tree import Node, sized_rows, slice_rows
from potluck.save.saves import saved_part
from potluck.signals import on_interrupt
from potluck.wire.messages import Committed, Work
from potluck.wire.words import clean_all


class HostWork(Protocol):
    is_repeatable: bool
    """Whether work that is done again has the same bits, no matter who does it."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of a round that are sent, in their order."""

    @property
    def divergence(self) -> float:
        """Divergence of this worker from the others at the last agreement, where each steps by itself."""

    def begin(self, work: Work, nodes: list[Node], bounds: Sequence[tuple[int, int]]) -> None:
        """`bounds`: the rows of each slice. `nodes`: which of them are ours, as parts of the tree."""

    def micro_batches(self, work: Work, is_void: Callable[[], bool]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the work, until it is done or of no use any more."""

    def expects_from(self, work: Work) -> tuple[int, ...]:
        """Return a key that is equal for two pieces of work if the second is what was expected to follow the first."""

    def expected(self, work: Work, seed: int) -> Iterator[tuple[MicroBatch, int]]:
        """After begin(): the micro-batches of the work, and what is expected to follow them, each with its seed. Asked
        as far as rows are fetched ahead."""

    def seed_of(self, seed: int, micro: MicroBatch) -> int:
        """The seed for these rows, no matter who computes them."""

    def backward(self, micro: MicroBatch, loss: Tensor, samples: float, last: bool | None) -> None: ...

    def step(self, micro: MicroBatch) -> tuple[bool, StepSkipped | None]:
        """Whether all of the work is done, and sent if it is of the round under way; a step of our own that was
        skipped."""

    def agree(self, committed: Committed, means: list[Tensor]) -> StepDecision:
        """Apply the mean of what all sent; or all leave it."""

    def hash_weights(self) -> tuple[str, Tensor]:
        """The digest, and the quick digest, of what all workers agreed on last, as it is in this worker's memory."""

    def quick_digest(self) -> Tensor: ...

    def as_agreed(self) -> AbstractContextManager[None]:
        """The model as all agreed on it last, also in the middle of the work."""

    def forget(self) -> None:
        """Discards what was computed: the model is again as it was agreed on."""

    def start_anew(self) -> None:
        """The model's state has been replaced: what was computed from the old one is of no use."""


class HostRounds:
    has_fixed_shares = True
    nodes = None

    def __init__(
        self,
        run: RunState,
        lifecycle: HostLifecycle,
        make_work: Callable[[Replica, PartSender], HostWork],
    ) -> None:
        self._run = run
        self._lifecycle = lifecycle
        self._driver = lifecycle.driver
        self._make_work = make_work
        self._sender = PartSender(lifecycle.driver, run.device)
        self._working_on = 0
        """The step whose work this worker has begun; 0 where one was agreed on since."""
        self._passes = 0
        """Passes over the loader that a loop which counts its own epochs has begun."""

    # Preparing

    def begin(self, replica: Replica) -> None:
        self._work = self._lifecycle.work = self._make_work(replica, self._sender)

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        run = self._run
        loader = self._loader = SliceLoader(source, batch, device=run.device, seed=seed)
        check_same_data(run, loader)  # the ranks of a worker among themselves
        if loader.order.digest(0, seed):  # of workers that come and go, the host compares it
            run.caller.training["order of rows"] = loader.order.tell(seed)
        model, policy = run.prepared().model, run.wanted.policy
        split = saved_part(run.prepared()).split
        self._lifecycle.description = Description(
            parts=self._work.parts,
            model=describe_model(model, split),
            rows=loader.rows,
            batch=batch.size,
            slices=batch.slice_count if run.batch_norm is None else batch.slices_in_pairs,
            seed=seed,
            unit=run.unit,
            samples_per_row=run.caller.samples_per_row,
            policy=type(policy).kind,
            settings=settings_of(policy),
            wire=run.composition.wire,
            state_bytes=sum(spec.nbytes for spec in state_specs(model, split).values()),
            in_pairs=run.batch_norm is not None,
            turns=run.turns.count,
            data=run.data or {},
            places=loader.order.counted,
            base=run.base.hash if run.base is not None else "",
            told={},
        )
        loader.plan = self._plan
        loader.seed_of = lambda micro: self._work.seed_of(loader.seed, micro)
        return loader

    # The loop

    def _plan(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches that are handed out, until the epoch ends or the run stops."""
        run, lifecycle, loader = self._run, self._lifecycle, self._loader
        lifecycle.join()
        if run.caller.counts_epochs or run.caller.has_trainer:
            yield from self._rest_of_epoch()
            return
        if lifecycle.was_moved and self._passes:
            raise ConfigError(
                f"This worker was put into epoch {loader.position.epoch + 1} of the run, and its loop counts epochs by"
                " itself: it would train more of them than the run has. Write `for epoch in fleet.epochs(n):` around"
                " `for batch in loader:`, in the script of every worker."
            )
        self._passes += 1
        with on_interrupt(lifecycle.request_stop):
            yield from self._rest_of_epoch()
            if run.stopping and loader.position.row < loader.rows:
                lifecycle.end_early(None)

    def _rest_of_epoch(self) -> Iterator[MicroBatch]:
        run, loader, driver = self._run, self._loader, self._driver
        while True:
            # A worker that is given the last weights may be put at an epoch's beginning that nobody will train.
            while not run.stopping and loader.position.row < loader.rows and not run.is_at_the_end:
                if driver.leave_if_asked():
                    continue
                work = driver.member.begin()
                if work is None:
                    driver.check_weights()
                    self._await_step()
                    continue
                yield from self._parts_of(work)
            if self._work.is_repeatable or not run.is_at_the_end:
                return
            self._lifecycle.keep_the_end()
            if run.stopping or run.is_at_the_end:
                return

    def _parts_of(self, work: Work) -> Iterator[MicroBatch]:
        run, member = self._run, self._driver.member
        nodes = [(int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True)]
        bounds = slice_rows(work.row, work.rows, work.slices)
        if len(work.sizes):
            bounds = sized_rows(work.row, map(int, work.sizes))
        self._work.begin(work, nodes, bounds)
        self._loader.follow(
            self._work.expects_from(work), work.row, lambda: self._work.expected(work, self._loader.seed)
        )
        self._working_on = work.step
        self._driver.reach("computing", work.step)
        turn = member.turn
        return self._work.micro_batches(
            work, is_void=lambda: turn != member.turn or run.stopping or member.version >= work.step
        )

    def backward(self, loss: Tensor, samples: float, last: bool | None) -> None:
        self._run.prepared()
        loss = check_mean(loss, samples)
        micro = self._loader.current
        if micro is None or not self._driver.has_joined:
            raise ConfigError("Under a host, batches come from the loader that prepare() gave. Iterate over that.")
        self._work.backward(micro, loss, samples, last)

    def step(self) -> StepDone | StepSkipped | None:
        self._run.prepared()
        micro = self._loader.current
        if micro is None or micro is not self._run.trained:
            raise ConfigError(STEP_TOO_EARLY)
        is_over, skipped = self._work.step(micro)
        return self._await_step() if is_over else skipped

    def _await_step(self) -> StepDone | StepSkipped | None:
        """Waits until a step is committed and applied, there is work, or the run stops."""
        found = self._driver.await_step()
        return self._commit(*found) if found is not None else None

    def _commit(self, committed: Committed, means: Means) -> StepDone | StepSkipped:
        run, driver, lifecycle = self._run, self._driver, self._lifecycle
        started = time.perf_counter()
        told = clean_all(json.loads(committed.workers))
        lifecycle.take_place(told["ranks"])
        tensors = [torch.from_numpy(part) for part in means.parts]
        driver.client.flush()
        driver.check_weights(in_step=True)  # after this step nobody could say whose weights went wrong before it
        driver.member.agree(committed)
        steps_before = run.step_number
        run.agreed(committed.rows)
        decision = self._work.agree(committed, tensors)
        event = self._step_done(decision, told, started)
        driver.client.give_back(means)
        driver.tell_applied(decision.norm, decision.fault or "")
        if told.get("epoch") is not None:
            run.last_epoch = EpochDone(**told["epoch"])
        run.tell(event)
        if committed.stop:
            run.stopping = True
        self._working_on = 0
        run.tell_agreed(steps_before)
        lifecycle.keep()
        run.trained = None
        if run.wants_stop and not run.stopping:
            driver.leave()
        return event

    @property
    def is_under_way(self) -> bool:
        return self._working_on > self._driver.member.version

    def _step_done(self, decision: StepDecision, told: dict[str, Any], started: float) -> StepDone | StepSkipped:
        run = self._run
        if decision.fault is not None:
            run.skipped_steps(1)
            return run.skip(decision, step=run.step_number)
        workers = [{name: row[name] for name in WorkerStep.__slots__ if name in row} for row in told["workers"]]
        seconds = told["seconds"] + time.perf_counter() - started
        return run.step_done(decision, run.lr, seconds, tuple(WorkerStep(**row) for row in workers))

    def settle(self) -> None:
        """Go back to the weights that were agreed on last, for what needs all replicas to be equal."""
