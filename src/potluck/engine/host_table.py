"""HostTable: a host leads the run: it has the folder, hands out work, and takes checkpoints. Workers come and go.

What is said to it and heard from it passes through Member, which asks HostHolder for what a run's state is.
"""

import atexit
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch

from potluck.agree.step_report import StepDecision
from potluck.agree.windows import stretch_of
from potluck.coded_numbers import coding_of
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, MicroBatch, even_batches, plan_step
from potluck.data.rows import arrived, read_batch
from potluck.data.source import DataSource, HeldOut
from potluck.engine.alone import StepAlone, WindowSide
from potluck.engine.host_holder import HostHolder
from potluck.engine.node_listener import NodeListener
from potluck.engine.part_sender import PartSender
from potluck.engine.prepare import check_same_data
from potluck.engine.run_parts import RunParts
from potluck.engine.slice_steps import SliceSteps
from potluck.engine.table import Outcome, RoundPlan, RoundWork, Table, Took, Waits, Works, drive
from potluck.environment import QUIET, TAKEN_BACK, why_leaving
from potluck.errors import ConfigError, Interrupted, PotluckError
from potluck.events import EpochDone, Sampled, WorkerStep
from potluck.fleet.description import Description, Part, settings_of
from potluck.fleet.gathering import MOST_BYTES
from potluck.fleet.listener import Listener, Means
from potluck.fleet.member import overflow_of
from potluck.fleet.tree import sized_rows, slice_rows
from potluck.machine_use import UseWatch
from potluck.replica.buffers import SavedBuffers
from potluck.replica.evaluate import Figures, LookSums, LossFunction, add_up, looking, means_of
from potluck.replica.model_checks import describe_model, state_specs
from potluck.replica.moments import are_averaged
from potluck.replica.replica import Replica
from potluck.save.parts import saved_part, whole_state
from potluck.signals import is_taken_back, on_interrupt
from potluck.sums.means import HostMean
from potluck.sums.node_sums import CollectParts, SplitGradients
from potluck.sums.slices import Gradients, WholeGradients
from potluck.sums.window_delta import WindowDelta
from potluck.tensor_bytes import join_bytes, split_bytes
from potluck.wire.messages import SliceReport, Using, Work, Wrote
from potluck.wire.words import clean_all

if TYPE_CHECKING:
    from potluck.engine.joined_view import JoinedView
    from potluck.replica.buckets import Allocate
    from potluck.replica.sharded import ShardedReplica


class HostTable(Table):
    def __init__(self, run: RunParts, listener: Listener) -> None:
        self.run = run
        self.listener = listener
        self.client = client = listener.client
        self.holder = HostHolder(run, listener)
        self.member = self.holder.member
        self._sender = PartSender(self.holder, run.device)
        self._alone: StepAlone | None = None
        self._mean: HostMean | None = None
        self._parts: tuple[Part, ...] = ()
        """Parts of a round that are sent, in their order."""
        self._turn = 0
        """The member's when the round was planned."""
        self._means: Means | None = None
        self._heard_at = 0.0
        """When the host told what was agreed on."""
        self._passes = 0
        """Passes over the loader that a loop which counts its own epochs has begun."""
        self._place, self._places = 0, 1
        """Which of the workers this is, and how many there are, as of the last agreement."""
        self._view: JoinedView | None = None
        run.speak(QUIET not in os.environ and run.link.rank == 0, client.say)
        run.events.on(Sampled, self._send_sample)
        self._uses = UseWatch(on_card=run.device.type == "cuda") if run.link.rank == 0 else None
        listener.on_stop = self._on_stop
        atexit.register(self._close_at_exit)

    # Preparing

    def begin(self, replica: Replica) -> Works:
        window, collect = self.run.composition.window, self._collector(replica)
        room = self._sender.make_room(replica.model) if collect is None else None
        if window is None:
            steps = self._make_steps(replica, room, collect, None)
            self._parts = steps.parts
            return Works(steps, None)
        alone, mean = self._make_alone(replica, room, collect)
        self._parts = mean.described
        if not window.may_step_together:
            return Works(None, alone)
        steps = self._make_steps(replica, room, collect, mean)
        steps.sums.buffers_at = len(mean.described) - 1
        return Works(steps, alone, lambda is_together: steps.set_idle(not is_together))

    def _collector(self, replica: Replica) -> CollectParts | None:
        """How parts are put together, where several ranks hold the replica; with norms, where gradients travel."""
        window = self.run.composition.window
        if not isinstance(self.listener, NodeListener):
            return None
        has_norms = window is None or window.may_step_together
        return partial(self.listener.collect_parts, norms_on=replica.device if has_norms else None)

    def _make_steps(
        self, replica: Replica, room: "Allocate | None", collect: CollectParts | None, mean: HostMean | None
    ) -> SliceSteps:
        """`mean`: of the windows between, which travel in the same parts."""
        gradients: Gradients
        coding = coding_of(self.run.composition.wire)
        if collect is None:
            gradients = WholeGradients(replica, room, coding)
        else:
            buffers, collected = SavedBuffers(replica.model).parts, mean.collected if mean is not None else None
            gradients = SplitGradients(cast("ShardedReplica", replica), collect, buffers, collected, coding)
        return SliceSteps(self.run, replica, self.holder, self._sender, gradients)

    def _make_alone(
        self, replica: Replica, room: "Allocate | None", collect: CollectParts | None
    ) -> tuple[StepAlone, HostMean]:
        run, sender, window = self.run, self._sender, self.run.composition.window
        assert window is not None
        coding = coding_of(run.composition.wire)
        wanted, steps_whole = window.averages_moments, replica.steps_whole
        has_moments = are_averaged(wanted, replica.optimizer, run.notice, steps_whole=steps_whole)
        options: dict[str, Any] = {"has_moments": has_moments, "collect_parts": collect}
        self._mean = mean = HostMean(sender.send, sender.begin, room, coding, **options)
        delta = WindowDelta(replica, mean, within=run.link)
        side = WindowSide(
            name=lambda: self.client.name,
            # The rest of a part that was cut is not cut again.
            sees_end=lambda plan, batches, rows: self.listener.wants_stop and plan.nodes[0][1] - plan.nodes[0][0] > 1,
            seeds=lambda plan, micro: (plan.version, micro.start),
            apply=self._take_mean,
            on_batch=lambda done: self.holder.announce("batch", done=done),
        )
        self._alone = StepAlone(run, replica, delta, side)
        return self._alone, mean

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        run = self.run
        loader = Loader(source, batch, None, device=run.device, seed=seed)
        check_same_data(run, loader)  # the ranks of a worker among themselves
        if loader.order.digest(0, seed):  # of workers that come and go, the host compares it
            run.loop.training["order of rows"] = loader.order.tell(seed)
        model, policy = run.prepared().model, run.wanted.policy
        split = saved_part(run.prepared()).split
        self.holder.description = Description(
            parts=self._parts,
            model=describe_model(model, split),
            rows=loader.rows,
            batch=batch.size,
            slices=batch.slice_count if run.batch_norm is None else batch.slices_in_pairs,
            seed=seed,
            unit=run.step.unit,
            samples_per_row=run.loop.samples_per_row,
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
        if run.loop.counts_epochs or run.loop.has_trainer:
            yield
            return
        if self.holder.was_moved and self._passes:
            raise ConfigError(
                f"This worker was put into epoch {loader.position.epoch + 1} of the run, and its loop counts epochs by"
                " itself: it would train more of them than the run has. Write `for epoch in fleet.epochs(n):` around"
                " `for batch in loader:`, in the script of every worker."
            )
        self._passes += 1
        with on_interrupt(self.request_stop):
            yield
            if run.progress.stopping and loader.position.row < loader.rows:
                self.end_early(None)

    # A round

    def plan(self) -> Waits[RoundPlan | None]:
        run, loader, member = self.run, self.run.loader, self.member
        assert loader is not None
        if loader.position.row < loader.rows:  # what a loop does after a step, or an epoch, may have marked it the best
            yield from self._keep()
        while True:
            # A worker that is given the last weights may be put at an epoch's beginning that nobody will train.
            while not run.progress.stopping and loader.position.row < loader.rows and not run.progress.is_at_the_end:
                if not (yield from member.leave_if_asked()):
                    return self._next_plan()
            if not run.progress.is_at_the_end:
                return None
            yield from self._keep_the_end()
            if run.progress.stopping or run.progress.is_at_the_end:
                return None

    def _next_plan(self) -> RoundPlan:
        """The work that this worker was given; or a plan without rows, for a round of which it hears the outcome."""
        run, member = self.run, self.member
        self._turn = member.turn
        work = member.begin()
        if work is None:
            self.member.check_weights()
            return RoundPlan(version=member.version + 1, epoch=run.progress.at.epoch, row=0, rows=0, is_together=None)
        self.holder.announce("computing", work.step)
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
        return self._with_batches(plan, work) if work.batch else plan

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

    def is_void(self, plan: RoundPlan) -> bool:
        member = self.member
        return self._turn != member.turn or self.run.progress.stopping or member.version >= plan.version

    def parts_ways(self, plan: RoundPlan, micro: MicroBatch | None) -> bool:
        return plan.version > self.member.version

    def agree(self, plan: RoundPlan, work: RoundWork) -> Waits[Outcome | RoundPlan | None]:
        """Waits until a step is committed, there is more work, or the run stops."""
        member = self.member
        if plan.has_rows and not plan.is_together:
            self._send_change(plan)
        if (found := (yield from member.await_step())) is None:
            has_more = member.work is not None and not self.run.progress.stopping
            if not has_more or (yield from member.leave_if_asked()):
                return None
            return self._next_plan()
        committed, self._means = found
        self._heard_at = time.perf_counter()
        details = clean_all(json.loads(committed.workers))
        self._take_place(details["ranks"])
        self.client.flush()
        member.check_weights(in_step=True)  # after this step nobody could say whose weights went wrong before it
        member.agree(committed)
        workers = [{name: row[name] for name in WorkerStep.__slots__ if name in row} for row in details["workers"]]
        is_window = self._alone is not None and not details.get("together")
        return Outcome(
            is_together=not is_window,
            rows=committed.rows,
            rows_computed=committed.rows,
            samples=committed.samples,
            loss=committed.loss,
            skipped=int(details.get("skipped", 0)),
            fault=overflow_of(details) if self.run.step.scale.is_on else None,
            stops=bool(committed.stop),
            workers=tuple(WorkerStep(**row) for row in workers),
            seconds=details["seconds"],
            epoch=EpochDone(**details["epoch"]) if details.get("epoch") is not None else None,
            means=tuple(torch.from_numpy(part) for part in self._means.parts),
            used=bytes(committed.used),
            buffers=bytes(committed.buffers),
        )

    def _send_change(self, plan: RoundPlan) -> None:
        """A window's part is done: what it came to, and then what it changed."""
        run, work, member = self.run, self._alone, self.member
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
            member.check_weights(in_step=True)  # what the window began with, which its change is counted from
        work.delta.end(samples * run.step.unit)
        self.holder.announce("sent")

    def _take_mean(self, outcome: Outcome) -> None:
        assert self._mean is not None and self._alone is not None
        self._mean.take(outcome.means, outcome.buffers)
        self._alone.delta.apply()
        if outcome.samples:  # else there is no mean, and nobody has stepped
            self._mean.finish_moments()

    def applied(self, outcome: Outcome, decision: StepDecision) -> Waits[Took]:
        assert self._means is not None
        self.listener.give_back(self._means)
        self._means = None
        yield from self.member.tell_applied(decision.norm, decision.fault or "")
        if self._uses is not None and (use := self._uses.take()) is not None:
            self.client.send(Using(*astuple(use)))
        return outcome.seconds + time.perf_counter() - self._heard_at, outcome.workers

    def end_round(self) -> Waits[None]:
        run = self.run
        if run.progress.wants_stop and not run.progress.stopping:
            yield from self.member.leave()

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
    def is_replaying(self) -> bool:
        return self.member.is_replaying

    # The run

    def join(self) -> None:
        run = self.run
        if not self.member.has_joined:
            drive(self.member.join())
            if others := self.member.others:  # else each newcomer would be rank 0, and print as if it were alone
                self._place, self._places = others, others + 1
            if not run.loop.has_trainer and run.speaks and not self.member.is_over:
                from potluck.engine.joined_view import JoinedView  # only a person who looks waits for rich

                self._view = JoinedView(run, run.prepared().parameter_count, self._places)

    def begin_run(self, epochs: int) -> None:
        """The host says where the run stands."""
        self.join()
        drive(self._keep_the_end())

    def _keep_the_end(self) -> Waits[None]:
        """The last agreement is on the host's disk before any loop is over with it. Until it is kept, the run may go
        back, and this worker with it: one whose loop was over would keep the weights of an earlier step. Nor can
        anybody be made to compute a window again, which would have other bits.
        """
        run = self.run
        if not run.progress.is_at_the_end:
            return
        yield from self._save(keep_last=1)
        yield from self._await_saves()
        if self.member.left or not self.member.is_in:  # the run may yet end elsewhere, or has
            ended = "The run has ended without this worker; the host has its weights."
            words = self.last_words() if self.member.left else ended
            self.close(None)
            raise run.interrupted(words)
        if not run.progress.is_at_the_end and not self.member.is_over:
            run.progress.continue_()  # the stop came after the end

    def end_of_epoch(self) -> None:
        """The host has proved the epoch, and reported that with its last step."""
        run = self.run
        assert run.loader is not None
        if run.progress.last_epoch is not None and run.progress.last_epoch.epoch == run.loader.position.epoch:
            run.events.emit(run.progress.last_epoch)

    def end_early(self, folder: Path | None) -> NoReturn:
        """Saves what is done if needed, tells the host that this worker leaves, and says so."""
        if not self.member.left:
            self.end_well(folder)
        words = self.last_words()
        self.close(None)
        raise self.run.interrupted(words)

    def end_well(self, folder: Path | None) -> None:
        self.save(Path(), keep_last=2)
        self.wait_for_saves()

    def end_with_script(self) -> None:
        """The last weights are on the host's disk before this worker says that it has finished."""
        if self.member.has_joined and not self.client.is_closed:
            self.end_well(None)

    def end_for_all(self) -> None:
        self.member.ends_for_all = True

    def last_words(self) -> str:
        saves, step, never = self.member.saves, self.run.progress.step_number, not self.member.version
        fault = saves.failed.error if saves.failed.step > saves.kept.step else ""
        if self.member.left:
            lost = f" {fault.removesuffix('.')}, and this worker may have had the only weights." if fault else ""
            when = "before it had a part in it" if never else f"after step {step}"
            return f"Left the run {when}; it continues without this worker.{lost}"
        if never:
            return "The run ended before this worker had a part in it."
        return f"The host stopped the run after step {step}, {fault or 'and has saved it.'}"

    def _send_sample(self, sample: Sampled) -> None:
        self.client.send(Wrote(sample.step, sample.prompt, sample.text))

    def request_stop(self) -> None:
        self.listener.ask_to_stop()

    def stop_all(self) -> None:
        self.join()
        self.member.end_run(finished=False)

    def finish_all(self) -> None:
        self.join()
        self.member.end_run(finished=True)

    def finishes(self) -> bool:
        """The ranks of a worker hear the same, and may have asked for it each by itself."""
        if self.member.left:
            return False
        asked = self.run.progress.finishes or self.member.finishes
        return any(each for (each,) in self.run.link.gather_rows([float(asked)]))

    def _on_stop(self) -> None:
        self.run.progress.ask_to_stop()
        self.member.wants_stop = why_leaving(TAKEN_BACK if is_taken_back() else "asked to stop")

    # Looking, saving

    def evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        """The means over a dataset, in ranges that the host hands out; they do not depend on who computes which.

        Where this worker has no part in it since it catches up, they are no numbers: it looks at one row, to know which
        there are. Once the run is done and its host hands out nothing more, it looks at all of them by itself.
        """
        self.join()
        self._check_has_part("fleet.evaluate()")
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

        is_alone = self.member.is_over and run.progress.stopping
        has_part = not (self.is_replaying or self.member.left or is_alone)
        with run.looking.in_place(), run.works.now.as_agreed(), looking(replica.model):
            figures, size = None, min(len(rows), max(1, looked_at.batch_size))
            if has_part:
                evaluation = drive(self.holder.evaluate(len(rows), size, sum_of))
                if evaluation.samples:  # else this worker had no part in it
                    figures = means_of(evaluation.names, evaluation.figures, evaluation.samples)
            if figures is None and is_alone and not self.member.left:
                total = add_up(sum_of(at, min(at + size, len(rows))).to_bytes() for at in range(0, len(rows), size))
                figures = means_of(total.names, total.figures, total.samples)
            if figures is None:
                one = sum_of(0, 1)
                figures = means_of(one.names, [math.nan] * len(one.figures), 1.0)
        return figures

    def exchange(self, data: bytes) -> list[bytes]:
        """Through the host. Of a worker that is not where the others are: its own alone."""
        self.join()
        self._check_has_part("fleet.mean() or fleet.gather()")
        own = join_bytes(self.run.link.gather_bytes(data))
        if len(own) > MOST_BYTES:
            raise ConfigError(
                f"Under a host, a worker may give {MOST_BYTES:,} bytes to fleet.mean() or fleet.gather(), and these are"
                f" {len(own):,}. Give fewer at a time."
            )
        try:
            return [each for worker in drive(self.member.gather(own)) for each in split_bytes(worker)]
        except ValueError as error:
            raise PotluckError(f"What a worker gave to all cannot be read: {error}.") from None

    def _check_has_part(self, call: str) -> None:
        """A loop of one's own would show what a worker that has left finds by itself as if it were the run's: its loop
        ends here."""
        run = self.run
        is_cut = self.member.left or (run.progress.stopping and self.member.is_over and not self.finishes())
        if is_cut and not run.loop.has_trainer:
            raise run.interrupted(f"{self.last_words()} {call} has no part in the run any more.")

    def save(self, folder: Path, keep_last: int) -> None:
        """The host keeps checkpoints in its own run folder: one worker sends its state while training continues."""
        self.join()
        drive(self._save(keep_last))

    def _save(self, keep_last: int) -> Waits[None]:
        asked, is_best = self.member.saves, self.run.best_loss() is not None
        if self.member.version > 0 and (self.member.version, is_best) <= (asked.due, asked.is_best):
            return  # it is asked for, or kept: a window has many steps and one agreement, and the end is kept anyway
        # A worker that has just caught up with the end would leave before it is saved, and end the run for all.
        is_past = self.is_replaying and not self.run.progress.is_at_the_end
        if not (is_past or self.member.left or self.member.is_over):
            yield from self.member.save(keep_last, is_best=is_best)

    def state_dict(self) -> dict[str, Any]:
        """On the worker that speaks for all; where several ranks are one worker, on the first of its."""
        self.join()
        run = self.run
        with run.works.now.as_agreed(), run.looking.in_place():
            found = whole_state(run.link, run.prepared(), run.names)
        return found if self.rank == 0 else {}

    def _keep(self) -> Waits[None]:
        """A user's own loop need not think of saving: the host gets a checkpoint as often as that costs little."""
        run, member = self.run, self.member
        if run.loop.has_trainer or member.is_replaying or member.left or member.is_over or run.progress.stopping:
            return
        if run.link.gather_rows([float(member.is_keep_due())])[0][0]:
            yield from self._save(keep_last=2)

    def load(self, folder: Path) -> bool:
        """Whether the run that was joined is past its beginning; its weights are here then."""
        self.join()
        return self.member.version > 0

    def wait_for_saves(self) -> None:
        """Waits until the host has the last checkpoint on its disk, however often it has to try."""
        drive(self._await_saves())

    def _await_saves(self) -> Waits[None]:
        yield from self.member.await_saves(until_kept=True, on_error=self._say_unsaved)

    def _say_unsaved(self, error: str) -> None:
        if self.run.speaks:
            self.client.say(f"{error.removesuffix('.')}. It is tried again. Ctrl-C leaves all the same.")

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
        if self._uses is not None:
            self._uses.close()
        if self.client.is_closed:
            return
        if finished:
            drive(self.member.finish())
        self.member.end()
        self.holder.close()
        if self._view is not None:
            self._view.close()
        if finished:
            self.run.link.close()
