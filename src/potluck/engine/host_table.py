"""HostTable: a host leads the run: it has the folder, hands out work, and takes checkpoints. Workers come and go.

What is said to it and heard from it passes through MemberDriver, which calls here for what a run's state is.
"""

import atexit
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from potluck.agree.records import Position
from potluck.agree.step_report import StepDecision
from potluck.agree.windows import stretch_of
from potluck.coded_numbers import coding_of
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, MicroBatch, even_batches, plan_step
from potluck.data.rows import arrived, read_batch
from potluck.data.source import DataSource, HeldOut
from potluck.engine.alone import StepAlone, WindowSide
from potluck.engine.buffers import SavedBuffers
from potluck.engine.checkpointing import check_position, restore_position, take_position
from potluck.engine.eval_weights import LookingWeights
from potluck.engine.evaluate import Figures, LookSums, LossFunction, add_up, looking, means_of
from potluck.engine.means import HostMean, NodeMean
from potluck.engine.moments import are_averaged
from potluck.engine.node_client import NodeClient
from potluck.engine.node_sums import SplitGradients
from potluck.engine.part_sender import PartSender
from potluck.engine.prepare import check_same_data
from potluck.engine.replica import Replica
from potluck.engine.run_state import RunState
from potluck.engine.slice_steps import SliceSteps
from potluck.engine.slices import Gradients, WholeGradients, describe_model, state_specs
from potluck.engine.state_transfer import StateTransfer
from potluck.engine.table import Outcome, RoundPlan, RoundWork, Took, Waits, Works, drive
from potluck.engine.window_delta import WindowDelta
from potluck.environment import QUIET, TAKEN_BACK, why_leaving
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.events import EpochDone, Sampled, WorkerStep
from potluck.fleet.client import Client, Means
from potluck.fleet.description import Description, Part, settings_of
from potluck.fleet.gathering import MOST_BYTES
from potluck.fleet.member import ConnectionLost, overflow_of
from potluck.fleet.member_driver import Looked, MemberDriver
from potluck.fleet.phases import enter_phase
from potluck.fleet.tree import sized_rows, slice_rows
from potluck.link.grid import Nodes
from potluck.save.saves import Saves, saved_part
from potluck.save.whole_state import whole_state
from potluck.signals import is_taken_back, on_interrupt
from potluck.tensor_bytes import join_bytes, split_bytes
from potluck.wire.messages import Applied, Message, SliceReport, Welcome, Work, Wrote
from potluck.wire.words import clean_all

if TYPE_CHECKING:
    from potluck.engine.buckets import Allocate
    from potluck.engine.joined_view import JoinedView


@dataclass(frozen=True, slots=True)
class Hearing:
    """The next message of the host."""

    client: Client | NodeClient
    timeout_s: float

    def wait(self) -> Message | ConnectionLost | None:
        return self.client.receive(timeout_s=self.timeout_s)


@dataclass(frozen=True, slots=True)
class Connecting:
    """The host, where the connection to it was lost."""

    client: Client | NodeClient

    def wait(self) -> Welcome:
        return self.client.connect(again=True)


@dataclass(frozen=True, slots=True)
class Averaging:
    """The means of a step, but for some parts."""

    client: Client | NodeClient
    step: int
    without: frozenset[int]

    def wait(self) -> Means | None:
        return self.client.take_means(self.step, self.without)


class HostTable:
    is_led = True
    keeps_folder = False
    has_fixed_shares = True
    nodes: Nodes | None = None
    works: Works
    """Compute this worker's part, once there is a replica."""
    description: Description
    """Once there is a loader."""
    looking: LookingWeights
    """Once there is a replica."""

    def __init__(self, run: RunState, client: Client | NodeClient) -> None:
        self.run = run
        self.client = client
        self.driver = MemberDriver(self)
        self._states = StateTransfer(client, run.link)
        self._sender = PartSender(self, run.device)
        self._glance: torch.Tensor | None = None
        """The quick digest of the weights when the host was last told their digest."""
        self._sum_of: Callable[[int, int], LookSums] | None = None
        """Evaluates rows, while all evaluate some."""
        self._alone: StepAlone | None = None
        self._mean: HostMean | None = None
        self._parts: tuple[Part, ...] = ()
        """Parts of a round that are sent, in their order."""
        self._turn = 0
        """The member's when the round was planned."""
        self._plan: RoundPlan | None = None
        self._means: Means | None = None
        self._heard_at = 0.0
        """When the host told what was agreed on."""
        self._passes = 0
        """Passes over the loader that a loop which counts its own epochs has begun."""
        self._place, self._places = 0, 1
        """Which of the workers this is, and how many there are, as of the last agreement."""
        self.was_moved = False
        """Whether the run was moved to another epoch than the loop was in."""
        self._view: JoinedView | None = None
        run.speak(QUIET not in os.environ and run.link.rank == 0, client.say)
        self._saves = Saves(run.link, run.events, is_gone=lambda: self.driver.member.is_over)
        run.events.on(Sampled, self._send_sample)
        client.on_stop = self._on_stop
        atexit.register(self._close_at_exit)

    # Preparing

    @property
    def is_repeatable(self) -> bool:
        """Whether work that is done again has the same bits, no matter who does it."""
        return self.run.composition.window is None

    @property
    def divergence(self) -> float:
        """How far this worker was from the others at the last agreement, where each steps by itself."""
        return self._alone.delta.drift if self._alone is not None and self.works.now is self._alone else 0.0

    def begin(self, replica: Replica) -> Works:
        run, window = self.run, self.run.composition.window
        room = self._sender.make_room(replica.model) if run.composition.split is None else None
        if window is None:
            steps = self._make_steps(replica, room, None)
            self._parts = steps.parts
            self.works = Works(steps, None)
            return self.works
        alone, mean = self._make_alone(replica, room)
        self._parts = mean.described
        if not window.may_step_together:
            self.works = Works(None, alone)
            return self.works
        steps = self._make_steps(replica, room, mean)
        steps.sums.buffers_at = len(mean.described) - 1
        self.works = Works(steps, alone, lambda is_together: steps.set_idle(not is_together))
        return self.works

    def _make_steps(self, replica: Replica, room: "Allocate | None", mean: HostMean | None) -> SliceSteps:
        """`mean`: of the windows between, which travel in the same parts."""
        gradients: Gradients
        coding = coding_of(self.run.composition.wire)
        if self.run.composition.split is None:
            gradients = WholeGradients(replica, room, coding)
        else:
            buffers, collected = SavedBuffers(replica.model).parts, mean.collected if mean is not None else None
            gradients = SplitGradients(replica, self.client, buffers, collected, coding)  # type: ignore[arg-type]
        return SliceSteps(self.run, replica, self, self._sender, gradients)

    def _make_alone(self, replica: Replica, room: "Allocate | None") -> tuple[StepAlone, HostMean]:
        run, sender, window = self.run, self._sender, self.run.composition.window
        assert window is not None
        coding = coding_of(run.composition.wire)
        wanted, steps_whole = window.averages_moments, replica.steps_whole
        has_moments = are_averaged(wanted, replica.optimizer, run.notice, steps_whole=steps_whole)
        mean = HostMean(sender.send, sender.begin, room, coding, has_moments=has_moments)
        if run.composition.split is not None:
            norms_on = replica.device if window.may_step_together else None
            options: dict[str, Any] = {"coding": coding, "has_moments": has_moments, "norms_on": norms_on}
            mean = NodeMean(sender.send, sender.begin, self.client, **options)  # type: ignore[arg-type]
        self._mean = mean
        delta = WindowDelta(replica, mean, within=run.link)
        side = WindowSide(
            name=lambda: self.client.name,
            within=run.link,
            # The rest of a part that was cut is not cut again.
            sees_end=lambda work, batches, rows: self.client.wants_stop and self._can_be_cut,
            seeds=lambda plan, micro: (plan.version, micro.start),
            apply=self._take_mean,
            on_batch=lambda done: self.announce("batch", done=done),
        )
        self._alone = StepAlone(run, replica, delta, side)
        return self._alone, mean

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        run = self.run
        loader = Loader(source, batch, None, device=run.device, seed=seed)
        check_same_data(run, loader)  # the ranks of a worker among themselves
        if loader.order.digest(0, seed):  # of workers that come and go, the host compares it
            run.caller.training["order of rows"] = loader.order.tell(seed)
        model, policy = run.prepared().model, run.wanted.policy
        split = saved_part(run.prepared()).split
        self.description = Description(
            parts=self._parts,
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
        return loader

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        run, loader = self.run, self.run.loader
        assert loader is not None
        self.join()
        if run.caller.counts_epochs or run.caller.has_trainer:
            yield
            return
        if self.was_moved and self._passes:
            raise ConfigError(
                f"This worker was put into epoch {loader.position.epoch + 1} of the run, and its loop counts epochs by"
                " itself: it would train more of them than the run has. Write `for epoch in fleet.epochs(n):` around"
                " `for batch in loader:`, in the script of every worker."
            )
        self._passes += 1
        with on_interrupt(self.request_stop):
            yield
            if run.stopping and loader.position.row < loader.rows:
                self.end_early(None)

    def refuse_own_rows(self) -> NoReturn:
        raise ConfigError("Under a host, batches come from the loader that prepare() gave. Iterate over that.")

    # A round

    def plan(self) -> Waits[RoundPlan | None]:
        run, loader, driver = self.run, self.run.loader, self.driver
        assert loader is not None
        while True:
            # A worker that is given the last weights may be put at an epoch's beginning that nobody will train.
            while not run.stopping and loader.position.row < loader.rows and not run.is_at_the_end:
                if not (yield from driver.leave_if_asked()):
                    return self._next_plan()
            if self.is_repeatable or not run.is_at_the_end:
                return None
            yield from self._keep_the_end()
            if run.stopping or run.is_at_the_end:
                return None

    def _next_plan(self) -> RoundPlan:
        """The work that this worker was given; or a plan without rows, for a round of which it hears the outcome."""
        run, member = self.run, self.driver.member
        self._turn = member.turn
        work = member.begin()
        if work is None:
            self.driver.check_weights()
            return RoundPlan(version=member.version + 1, epoch=run.at.epoch, row=0, rows=0, is_together=None)
        self.announce("computing", work.step)
        nodes = tuple((int(a), int(b)) for a, b in zip(work.nodes[::2], work.nodes[1::2], strict=True))
        bounds = tuple(
            sized_rows(work.row, map(int, work.sizes))
            if len(work.sizes)
            else slice_rows(work.row, work.rows, work.slices)
        )
        plan = RoundPlan(
            version=work.step,
            epoch=work.epoch,
            row=work.row,
            rows=work.rows,
            is_together=not work.batch,
            bounds=bounds,
            nodes=nodes,
        )
        self._plan = self._with_batches(plan, work) if work.batch else plan
        return self._plan

    def _with_batches(self, plan: RoundPlan, work: Work) -> RoundPlan:
        """The rows over which this worker steps by itself, in its own batches."""
        run, loader = self.run, self.run.loader
        assert loader is not None
        (node,) = plan.nodes
        first, end = plan.bounds[node[0]][0], plan.bounds[node[1] - 1][1]
        shares, in_pairs = (1.0,) * run.link.world, run.batch_norm is not None
        together = {"in_step": run.prepared().in_step, "in_pairs": in_pairs}
        stretch = 1.0
        if self._mean is not None and self._mean.moments is not None and self._mean.moments.are_divided_by:
            stretch = stretch_of([last - at for at, last in plan.bounds], work.batch, loader.batch.size)
        batches = tuple(
            (rows, tuple(plan_step(*rows, loader.batch, shares, run.link.rank, **together)))
            for rows in even_batches(first, end, work.batch, loader.batch.size, in_pairs=in_pairs)
        )
        return replace(plan, batches=batches, part=end - first, stretch=stretch)

    @property
    def _can_be_cut(self) -> bool:
        plan = self._plan
        return plan is not None and plan.nodes[0][1] - plan.nodes[0][0] > 1

    def is_void(self, plan: RoundPlan) -> bool:
        member = self.driver.member
        return self._turn != member.turn or self.run.stopping or member.version >= plan.version

    def parts_ways(self, plan: RoundPlan, micro: MicroBatch | None) -> bool:
        return plan.version > self.driver.member.version

    def agree(self, plan: RoundPlan, work: RoundWork) -> Waits[Outcome | RoundPlan | None]:
        """Waits until a step is committed, there is more work, or the run stops."""
        driver = self.driver
        if plan.has_rows and not plan.is_together:
            self._send_change(plan)
        if (found := (yield from driver.await_step())) is None:
            has_more = driver.member.work is not None and not self.run.stopping
            if not has_more or (yield from driver.leave_if_asked()):
                return None
            return self._next_plan()
        committed, self._means = found
        self._heard_at = time.perf_counter()
        told = clean_all(json.loads(committed.workers))
        self._take_place(told["ranks"])
        self.client.flush()
        driver.check_weights(in_step=True)  # after this step nobody could say whose weights went wrong before it
        driver.member.agree(committed)
        workers = [{name: row[name] for name in WorkerStep.__slots__ if name in row} for row in told["workers"]]
        is_window = not self.is_repeatable and not told.get("together")
        return Outcome(
            is_together=not is_window,
            rows=committed.rows,
            rows_computed=committed.rows,
            samples=committed.samples,
            loss=committed.loss,
            skipped=int(told.get("skipped", 0)),
            overflow=overflow_of(told),
            stops=bool(committed.stop),
            workers=tuple(WorkerStep(**row) for row in workers),
            seconds=told["seconds"],
            epoch=EpochDone(**told["epoch"]) if told.get("epoch") is not None else None,
            means=tuple(torch.from_numpy(part) for part in self._means.parts),
            used=bytes(committed.used),
            buffers=bytes(committed.buffers),
        )

    def _send_change(self, plan: RoundPlan) -> None:
        """A window's part is done: what it came to, and then what it changed."""
        run, work, driver = self.run, self._alone, self.driver
        assert work is not None
        window, numbers = work.window, range(*plan.nodes[0])
        samples = window.samples + work.bad_samples
        # Skipped steps weigh what they would have, so that a part weighs the same no matter who does it. Where all of
        # it is done, nothing is left for the slice behind it.
        numbers = numbers[:1] if work.stopped else numbers
        none = [0.0] * (len(numbers) - 1)
        report = SliceReport(
            plan.version,
            np.array(numbers, "<u4"),
            np.array([samples, *none], "<f8"),
            np.array([work.mean_loss * samples, *none], "<f8"),
            work.busy_s,
            b"",
            int(window.batches),
            stopped=work.stopped,
            figures=work.figures.to_json(work.delta.drift),
            skipped=int(window.skipped),
        )
        if report.slices[0] == 0:
            report = replace(report, buffers=work.delta.exact())
        self.client.send(report)
        if run.link.world == 1:  # to look costs ranks a sum, and they look before they agree
            driver.check_weights(in_step=True)  # what the window began with, which its change is counted from
        work.delta.end(samples * run.unit)
        self.announce("sent")

    def _take_mean(self, outcome: Outcome) -> None:
        assert self._mean is not None and self._alone is not None
        self._mean.take(outcome.means, outcome.buffers)
        self._alone.delta.apply()
        if outcome.samples:  # else there is no mean, and nobody has stepped
            self._mean.finish_moments()

    def applied(self, outcome: Outcome, decision: StepDecision) -> Waits[Took]:
        assert self._means is not None
        self.client.give_back(self._means)
        self._means = None
        yield from self.driver.tell_applied(decision.norm, decision.fault or "")
        return outcome.seconds + time.perf_counter() - self._heard_at, outcome.workers

    def end_round(self) -> Waits[None]:
        run = self.run
        yield from self._keep()
        if run.wants_stop and not run.stopping:
            yield from self.driver.leave()

    def settle(self) -> None:
        """Nothing to do: as_agreed() has what was agreed on last."""

    # Where this worker is among the others

    @property
    def rank(self) -> int:
        """0 on the worker that speaks for all, for instance to print. It may change with each agreement."""
        return self._place + self.run.link.rank * self._places

    @property
    def world(self) -> int:
        """How many processes there are, where all workers are of as many as this one is."""
        return self._places * self.run.link.world

    def _take_place(self, ids: list[int]) -> None:
        """All that take part in an agreement hear the same list of ids, in order of rank, the leader's first."""
        if self.client.worker_id in ids:
            self._place, self._places = ids.index(self.client.worker_id), len(ids)

    @property
    def version(self) -> int:
        """Agreements so far, which is what the host calls a step; under Sync all take each of them together."""
        return self.driver.member.version

    @property
    def is_replaying(self) -> bool:
        return self.driver.member.is_replaying

    @property
    def _is_over(self) -> bool:
        return self.driver.member.is_over

    @property
    def _has_left(self) -> bool:
        """This worker has left the run, which continues."""
        return self.driver.member.left

    # The run

    def join(self) -> None:
        run = self.run
        if not self.driver.has_joined:
            drive(self.driver.join())
            if not run.caller.has_trainer and run.speaks and not self._is_over:
                from potluck.engine.joined_view import JoinedView  # only a person who looks waits for rich

                self._view = JoinedView(run, run.prepared().parameter_count, self._places)

    def begin_run(self, epochs: int) -> None:
        """The host says where the run stands."""
        self.join()
        if not self.is_repeatable:
            drive(self._keep_the_end())

    def _keep_the_end(self) -> Waits[None]:
        """The last agreement is on the host's disk before any loop is over with it: nobody can be made to compute that
        window again then, which would have other bits. Until it is kept, the run may go back, and this worker with it.
        """
        run = self.run
        if not run.is_at_the_end:
            return
        yield from self._save(keep_last=1)
        yield from self._await_saves()
        if self._has_left or not self.driver.member.is_in:  # the run may yet end elsewhere, or has
            ended = "The run has ended without this worker; the host has its weights."
            words = self.last_words() if self._has_left else ended
            self.close(None)
            raise run.interrupted(words)
        if not run.is_at_the_end and not self._is_over:
            run.continue_()  # the stop came after the end

    def end_of_epoch(self) -> None:
        """The host has proved the epoch, and reported that with its last step."""
        run = self.run
        assert run.loader is not None
        if run.last_epoch is not None and run.last_epoch.epoch == run.loader.position.epoch:
            run.events.emit(run.last_epoch)

    def end_early(self, folder: Path | None) -> NoReturn:
        """Saves what is done if needed, tells the host that this worker leaves, and says so."""
        if not self._has_left:
            self.end_well(folder)
        words = self.last_words()
        self.close(None)
        raise self.run.interrupted(words)

    def end_well(self, folder: Path | None) -> None:
        self.save(Path(), keep_last=2)
        self.wait_for_saves()

    def end_with_script(self) -> None:
        """The last weights are on the host's disk before this worker says that it has finished."""
        if self.driver.has_joined and not self.client.is_closed:
            self.end_well(None)

    def end_for_all(self) -> None:
        self.driver.member.ends_for_all = True

    def as_agreed(self) -> AbstractContextManager[None]:
        return self.works.now.as_agreed()

    def last_words(self) -> str:
        member, step = self.driver.member, self.run.step_number
        fault = member.unsaved.error if member.unsaved.step > member.saved.step else ""
        if self._has_left:
            lost = f" {fault.removesuffix('.')}, and this worker may have had the only weights." if fault else ""
            return f"Left the run after step {step}; it continues without this worker.{lost}"
        return f"The host stopped the run after step {step}, {fault or 'and has saved it.'}"

    def _send_sample(self, sample: Sampled) -> None:
        self.client.send(Wrote(sample.step, sample.prompt, sample.text))

    def request_stop(self) -> None:
        self.client.ask_to_stop()

    def _on_stop(self) -> None:
        self.run.ask_to_stop()
        self.driver.member.wants_stop = why_leaving(TAKEN_BACK if is_taken_back() else "asked to stop")

    def seed_random(self, seed: int) -> None:
        """Work that is handed out draws its own numbers: nothing to do."""

    # Looking, saving

    def evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        """The means over a dataset, in ranges that the host hands out; they do not depend on who computes which.

        Where this worker has no part in it they are no numbers: then it looks at one row, to know which there are.
        """
        self.join()
        run, rows = self.run, looked_at.rows
        if not len(rows):
            return math.nan
        replica, link, collate = run.prepared(), run.link, looked_at.collate
        whole, shares = BatchConfig(size=len(rows)), (1.0,) * link.world

        def sum_of(start: int, end: int) -> LookSums:
            """Sum up these rows; each rank evaluates its own part."""
            total = LookSums()
            # Only here: between two ranges this worker may be asked for its state.
            with run.looks_with(), torch.no_grad():
                for micro in plan_step(start, end, whole, shares, link.rank, in_step=replica.in_step):
                    batch = arrived(read_batch(rows, list(range(micro.start, micro.end)), collate), run.device)
                    total.add(replica.loss(loss_of, batch), batch, counts=micro.counts)
            return add_up(link.gather_bytes(total.to_bytes()))

        has_part = not (self.is_replaying or self._has_left or (run.stopping and self._is_over))
        with self.works.now.as_agreed(), looking(replica.model):
            found = None
            if has_part:
                size = min(len(rows), max(1, looked_at.batch_size))
                self._sum_of = sum_of
                evaluation = drive(self.driver.evaluate(len(rows), size))
                self._sum_of = None
                if evaluation.samples:  # else this worker had no part in it
                    found = means_of(evaluation.names, evaluation.figures, evaluation.samples)
            if found is None:
                one = sum_of(0, 1)
                found = means_of(one.names, [math.nan] * len(one.figures), 1.0)
        return found

    def exchange(self, data: bytes) -> list[bytes]:
        """Through the host. Of a worker that is not where the others are: its own alone."""
        self.join()
        own = join_bytes(self.run.link.gather_bytes(data))
        if len(own) > MOST_BYTES:
            raise ConfigError(
                f"Under a host, a worker may give {MOST_BYTES:,} bytes to fleet.mean() or fleet.gather(), and these are"
                f" {len(own):,}. Give fewer at a time."
            )
        try:
            return [each for worker in drive(self.driver.gather(own)) for each in split_bytes(worker)]
        except ValueError as error:
            raise PotluckError(f"What a worker gave to all cannot be read: {error}.") from None

    def save(self, folder: Path, keep_last: int) -> None:
        """The host keeps checkpoints in its own run folder: one worker sends its state while training continues."""
        self.join()
        drive(self._save(keep_last))

    def _save(self, keep_last: int) -> Waits[None]:
        if not self.is_repeatable and self.version and self.driver.member.save_due >= self.version:
            return  # a window has many steps, and one agreement
        # A worker that has just caught up with the end would leave before it is saved, and end the run for all.
        is_past = self.is_replaying and not self.run.is_at_the_end
        if not (is_past or self._has_left or self._is_over):
            yield from self.driver.save(keep_last)

    def state_dict(self) -> dict[str, Any]:
        """On the worker that speaks for all; where several ranks are one worker, on the first of its."""
        self.join()
        with self.works.now.as_agreed(), self.looking.in_place():
            found = whole_state(self.run.link, self.run.prepared(), self.run.names)
        return found if self.rank == 0 else {}

    def _keep(self) -> Waits[None]:
        """A user's own loop need not think of saving: the host gets a checkpoint as often as that costs little."""
        run = self.run
        if run.caller.has_trainer or self.is_replaying or self._has_left or self._is_over or run.stopping:
            return
        if run.link.gather_rows([float(self.driver.member.is_keep_due(time.monotonic()))])[0][0]:
            yield from self._save(keep_last=2)

    def load(self, folder: Path) -> bool:
        """Whether the run that was joined is past its beginning; its weights are here then."""
        self.join()
        return self.version > 0

    def wait_for_saves(self) -> None:
        """Waits until the host has the last checkpoint on its disk, however often it has to try."""
        drive(self._await_saves())

    def _await_saves(self) -> Waits[None]:
        yield from self.driver.await_saves(until_kept=True, on_error=self._say_unsaved)

    def _say_unsaved(self, error: str) -> None:
        if self.run.speaks:
            self.client.say(f"{error.removesuffix('.')}. It is tried again. Ctrl-C leaves all the same.")

    # What MemberDriver asks for

    @property
    def rows_seen(self) -> int:
        return self.run.rows_seen

    def now(self) -> float:
        return time.monotonic()

    def send(self, message: Message) -> None:
        self.client.send(message)

    def say(self, sentence: str) -> None:
        self.client.say(sentence)

    def hear(self, timeout_s: float) -> Waits[Message | ConnectionLost | None]:
        heard: Message | ConnectionLost | None = yield Hearing(self.client, timeout_s)
        return heard

    def connect(self) -> Waits[Welcome]:
        welcome: Welcome = yield Connecting(self.client)
        return welcome

    def average(self, step: int, without: frozenset[int]) -> Waits[Means | None]:
        means: Means | None = yield Averaging(self.client, step, without)
        return means

    def pass_over_until(self, step: int) -> None:
        self.client.pass_over_until(step)

    def reach(self, phase: str, step: int) -> Waits[None]:
        yield from ()
        enter_phase(phase, step, worker=self)

    def announce(self, phase: str, step: int = 0, **what: Any) -> None:
        """A phase of the step under way begins, or of the named one."""
        enter_phase(phase, step or self.driver.member.version + 1, worker=self, **what)

    def welcome(self) -> Welcome:
        assert self.client.welcome is not None
        return self.client.welcome

    def describe(self) -> Description:
        caller = self.run.caller
        limit = caller.rows_limit or 0
        described = replace(self.description, training=caller.training, rows_limit=limit, told=caller.about)
        self.client.description = described
        return described

    def digest(self) -> str:
        digest, self._glance = self.works.now.hash_weights()
        return digest

    def is_changed(self) -> bool:
        return self._glance is None or not torch.equal(self.works.now.quick_digest(), self._glance)

    def applied_message(self, version: int, digest: str, norm: float, fault: str) -> Applied:
        return Applied(version, digest, self.run.lr, norm, fault, self.divergence)

    def stand_at(self, position: Position) -> None:
        self.run.seek(position)

    def forget(self) -> None:
        self.works.now.forget()

    def stop(self) -> None:
        self.run.stop()

    def nonfinite_hint(self) -> str:
        return self.run.prepared().nonfinite_hint()

    def look_at(self, start: int, end: int) -> Waits[Looked]:
        yield from ()
        assert self._sum_of is not None
        looked = self._sum_of(start, end)
        return Looked(looked.names, looked.figures, looked.samples)

    def receive_state(self, step: int, header: str) -> None:
        self._states.receive(step, header)

    def take_chunk(self, data: bytes | memoryview) -> Waits[None]:
        yield from ()
        self._states.take_chunk(data)

    def drop_state(self) -> None:
        self._states.drop()

    def load_state(self) -> tuple[int, int]:
        """From a folder that all ranks see."""
        run, folder = self.run, self._states.arrived()
        standing = self._saves.load(folder, run.prepared(), partial(check_position, run))
        assert standing is not None and run.loader is not None
        run.link.gather_rows([0.0])  # until all ranks have read it
        self.works.start_anew()
        self.was_moved |= standing["epoch"] != run.loader.position.epoch
        restore_position(run, standing)
        self._states.drop()
        return run.at.version, run.at.step

    def serve_state(self, transfer: int, version: int) -> Waits[None]:
        yield from ()
        self._states.serve(transfer, version, self._snapshot)

    def _snapshot(self, folder: Path) -> Callable[[], Path | None]:
        """A copy in host memory now. What is returned writes it below the folder, and says where, if that is ours."""
        run = self.run
        with self.looking.aside(), self.works.now.as_agreed():
            standing, kept = take_position(run)
            write = self._saves.take(folder, run.prepared(), standing, kept, with_randoms=False)
            self.driver.check_weights()
        assert write is not None
        return write

    # The end

    def close(self, error: BaseException | None) -> None:
        """Tells the host that this worker has finished; the run ends when all who hold its weights have."""
        self._close(finished=error is None or isinstance(error, Interrupted))
        if self.run.replica is not None:
            self.run.replica.close()

    def _close_at_exit(self) -> None:
        """A script that ended by an exception has finished nothing: its connection breaks, as if it had been killed."""
        self._close(finished=getattr(sys, "last_value", None) is None)

    def _close(self, *, finished: bool) -> None:
        atexit.unregister(self._close_at_exit)
        if self.client.is_closed:
            return
        if finished:
            drive(self.driver.finish())
        self.driver.member.end()
        self._states.close()
        self.client.close()
        self._states.remove()
        if self._view is not None:
            self._view.close()
        if finished:
            self.run.link.close()
