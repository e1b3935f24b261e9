"""GroupTable: workers that reach each other over a link agree among themselves: nobody leads, and none may be lost.

Each step or window they exchange reports, and from the same reports all reach the same outcome.
"""

import json
import math
import os
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from potluck.agree.records import Report
from potluck.agree.step_report import StepDecision, fault_of
from potluck.agree.terms import UNCOMPARED, Fingerprint, differing_data
from potluck.agree.wire_choice import WireChoice
from potluck.coded_numbers import Coding, Wire, coding_of
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare, MicroBatch
from potluck.data.source import DataSource, HeldOut
from potluck.devices import synchronize
from potluck.engine.alone import StepAlone, WindowSide
from potluck.engine.checkpointing import check_position, restore_position, take_position
from potluck.engine.group_plans import SyncPlans, WindowPlans
from potluck.engine.prepare import check_same_data
from potluck.engine.run_parts import RunParts
from potluck.engine.table import Awaited, Outcome, RoundPlan, RoundWork, Table, Took, Waits, Works
from potluck.engine.together import StepTogether
from potluck.environment import ONLY
from potluck.errors import Interrupted, WorkerLost
from potluck.events import EpochDone, WorkerStep
from potluck.fleet.ledger import prove
from potluck.link.link import Alone, Pending, Rows, loss_of_peer
from potluck.link.whereabouts import LEFT
from potluck.replica.evaluate import Figures, LossFunction, add_up, looking, means_of
from potluck.replica.moments import Moments, are_averaged
from potluck.replica.replica import Replica
from potluck.save.parts import is_in_parts, whole_state
from potluck.save.saves import Saves, Standing
from potluck.sums.means import CodedLinkMean, LinkMean
from potluck.sums.window_delta import WindowDelta
from potluck.words import say

NEARLY = 0.9
"""The share of its part after which a replica that may continue beyond it says that nobody need wait for it."""


class GroupTable(Table):
    def __init__(self, run: RunParts, saves: Saves) -> None:
        self._run = run
        self._saves = saves
        self._plans: SyncPlans | WindowPlans
        if run.nodes is None:
            self._plans = SyncPlans(run)
        else:
            self._plans = windows = WindowPlans(run, run.nodes)
            run.kept.add("left", lambda tensors: windows.left(), lambda saved, tensors: self._stand(windows))
        self._together: StepTogether | None = None
        self._alone: StepAlone | None = None
        self._moments: Moments | None = None
        self._coding: Coding | None = None
        self._moving: list[Pending] = []
        """What optimizers keep, on its way between replicas."""
        self._wire: WireChoice | None = None
        self._moved = self._planned_at = 0
        """How often the run was put elsewhere, and how often that had been when the round was planned."""
        self._all_done: Rows | None = None
        """Whether all replicas have done their parts of the window, where some may continue meanwhile."""
        self._was_together: bool | None = None
        self._started = self._agreed_at = 0.0
        self._sync_s = 0.0
        """What the last agreement took beyond computing."""
        self._reports: list[Report] = []
        """Of all ranks, for the round that is being agreed on."""
        self._folder: Path | None = None
        """The folder that load() was given."""
        self._saved_last: tuple[Path, int] | None = None
        self._kept_last = ""
        """What the loop kept beside the weights then."""
        self._finishes: bool | None = None
        """Whether the run ends as if it were done: asked once, when all stop."""
        speaks = self.rank == 0 or ONLY in os.environ
        run.speak(speaks, say if speaks else lambda sentence: None)

    # Preparing

    def begin(self, replica: Replica) -> Works:
        run = self._run
        together = self._together = StepTogether(run, replica)
        plans = self._plans
        if not isinstance(plans, WindowPlans):
            self._choose_from_here(replica)
            return Works(together, None)
        alone = self._alone = self._make_alone(replica, plans)

        def turn(is_together: bool) -> None:
            """Where replicas are split or cut, each steps with those who hold the same stage, and no others."""
            assert run.nodes is not None
            if is_together and run.link.world > 1:
                replica.prepare_sums()
            replica.step_with(run.link if is_together else run.nodes.within)

        if plans.may_step_together:
            replica.prepare_sums()
        both = (together, alone, turn) if plans.can_step_together else (None, alone)
        return Works(*both)

    def _make_alone(self, replica: Replica, plans: WindowPlans) -> StepAlone:
        run, nodes, policy = self._run, self._run.nodes, self._run.composition.window
        assert nodes is not None and policy is not None
        coding = self._coding = coding_of(run.composition.wire) if nodes.count > 1 else None
        mean = LinkMean(nodes.across) if coding is None else CodedLinkMean(nodes.across, coding)
        delta = WindowDelta(replica, mean, within=nodes.within)
        if are_averaged(policy.averages_moments, replica.optimizer, run.notice, steps_whole=replica.steps_whole):
            self._moments = plans.moments = Moments(replica.optimizer, replica.outer.names, delta.runs)
        side = WindowSide(
            name=lambda: nodes.names[nodes.number],
            sees_end=self._sees_end,
            seeds=lambda plan, micro: (plan.epoch, micro.start),
            apply=self._take_mean,
        )
        return StepAlone(run, replica, delta, side)

    def _choose_from_here(self, replica: Replica) -> None:
        """Where it is measured in which form gradients travel: that is kept in checkpoints."""
        if self._run.composition.wire_is_measured:
            choice = self._wire = WireChoice()

            def resume(saved: Wire | None) -> None:
                choice.resume(saved or "fp32")
                replica.code(coding_of(choice.wire))

            self._run.kept.add("wire", lambda tensors: choice.wire, lambda saved, tensors: resume(saved))

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        loader = self._plans.make_loader(source, batch, seed)
        check_same_data(self._run, loader)
        return loader

    @property
    def has_fixed_shares(self) -> bool:
        return self._plans.has_fixed_shares

    @property
    def rank(self) -> int:
        return self._run.link.rank

    @property
    def world(self) -> int:
        return self._run.link.world

    # A round

    def plan(self) -> Waits[RoundPlan | None]:
        self._choose_wire()
        plan = None if self._run.progress.stopping else self._plans.plan()
        if plan is None:
            self.settle()
            return None
        yield from ()
        if plan.is_together is not self._was_together:
            self._sync_s = 0.0  # what a step costs says nothing of a window's end
        self._planned_at, self._was_together = self._moved, plan.is_together
        self._started, self._all_done = time.perf_counter(), None
        return plan

    def is_void(self, plan: RoundPlan) -> bool:
        return self._planned_at != self._moved

    def parts_ways(self, plan: RoundPlan, micro: MicroBatch | None) -> bool:
        """Under Sync all have rows of every step, and come to its last micro-batch together."""
        if self._run.nodes is not None:
            return True
        return micro is not None and not micro.last

    def _sees_end(self, plan: RoundPlan, batches: float, rows: float) -> bool:
        """Whether the window's end is nearer than the middle of another batch; or whether all have done their parts."""
        if plan.until_s is not None:
            spent = time.perf_counter() - self._started
            return spent + 0.5 * spent / batches > plan.until_s
        plans = self._plans
        assert isinstance(plans, WindowPlans) and plans.decision is not None and self._run.nodes is not None
        part = plan.part * (NEARLY if plans.decision.spare[self._run.nodes.number] else 1)
        return rows >= part and self._own_part_done(plans).is_here()

    def _own_part_done(self, plans: WindowPlans) -> Rows:
        """Tells the others so, once in each window in which some may continue while others are not done."""
        assert plans.decision is not None and self._run.nodes is not None
        if self._all_done is None:
            among = self._run.nodes.across if any(plans.decision.spare) else Alone()
            self._all_done = among.start_gather([1.0])
        return self._all_done

    def agree(self, plan: RoundPlan, work: RoundWork) -> Waits[Outcome | RoundPlan | None]:
        if plan.is_together:
            return (yield from self._agree_on_step(plan))
        return (yield from self._agree_on_window(plan))

    def _agree_on_step(self, plan: RoundPlan) -> Waits[Outcome]:
        """Reports travel while the sums of gradients do."""
        run, replica, work = self._run, self._run.prepared(), self._together
        assert work is not None
        replica.unseal()
        if run.link.world > 1 and not replica.gathers:
            synchronize(run.device)  # else busy would be the time to launch kernels
        busy_s, wait_s = time.perf_counter() - run.step.tally.started + work.optimizer_s, 0.0
        sums, loss_sum = Awaited("The sums of a step's gradients, on their way", work.wait), None
        if work.runs_ahead:
            loss_sum = work.step_ahead()
        else:
            replica.start_sums()
            if run.link.world == 1:  # there is nothing beside which a report could travel
                wait_s, loss_sum = yield sums
        gathering = run.link.start_gather(work.report(busy_s, sync_s=self._sync_s, loss_sum=loss_sum).to_row())
        if loss_sum is None:
            wait_s, _ = yield sums
        rows = yield gathering
        reports = self._reports = [Report.from_row(row) for row in rows]
        if any(report.has_unused for report in reports):
            replica.drop_unused()
        self._agreed_at = time.perf_counter()
        self._plans.learn(plan, reports)
        samples, computed = sum(r.samples for r in reports), sum(int(r.rows) for r in reports)
        current = run.loader.current if run.loader is not None else None
        end = current.step_end if current is not None else run.progress.at.row
        return Outcome(
            is_together=True,
            rows=computed if run.turns.is_last else 0,
            rows_computed=computed,
            samples=samples,
            loss=sum(r.loss_sum for r in reports) / samples if samples else math.nan,
            fault=fault_of(reports),
            end=end if run.nodes is None else None,
            own_samples=run.grid.own(reports).samples,
            stops=any(r.wants_stop for r in reports),
            workers=run.grid.worker_steps(reports, busy_s + wait_s),
        )

    def _agree_on_window(self, plan: RoundPlan) -> Waits[Outcome]:
        run, work, plans, nodes = self._run, self._alone, self._plans, self._run.nodes
        assert work is not None and isinstance(plans, WindowPlans) and nodes is not None
        mine = work.window._replace(
            busy_s=work.busy_s,
            sync_s=self._sync_s,
            wants_stop=run.progress.wants_stop,
            loss_scale=run.step.scale.value,
            figures=work.figures.of_window(work.delta.drift),
        )
        if plan.until_s is None:
            yield self._own_part_done(plans)
        names = run.composition.window.figures if run.composition.window is not None else ()
        rows = yield run.link.start_gather(mine.to_row(names))
        reports = self._reports = run.grid.merge([Report.from_row(row, names) for row in rows], "replica")
        self._agreed_at = time.perf_counter()
        samples = sum(report.samples for report in reports)
        weight = mine.samples / samples if samples else 1 / nodes.count
        work.delta.end(weight)
        self._moving = self._moments.start(nodes.across, weight, self._coding) if self._moments is not None else []
        plans.learn(plan, reports)
        run.step.scale.agree([report.loss_scale for report in reports])
        run.step.scale.learn(samples, sum(report.rows - report.skipped_rows for report in reports))
        return Outcome(
            is_together=False,
            rows=sum(int(report.rows) for report in reports),
            samples=samples,
            loss=sum(report.loss_sum for report in reports) / samples if samples else math.nan,
            skipped=int(sum(report.skipped for report in reports)),
            skipped_rows=int(sum(report.skipped_rows for report in reports)),
            stops=any(report.wants_stop for report in reports),
        )

    def _take_mean(self, outcome: Outcome) -> None:
        """The mean of all replicas takes their place."""
        assert self._alone is not None
        self._alone.delta.apply()
        for pending in self._moving:
            pending.wait()
        if self._moments is not None:
            self._moments.take()

    def applied(self, outcome: Outcome, decision: StepDecision) -> Waits[Took]:
        yield from ()
        now, longest = time.perf_counter(), max(report.busy_s for report in self._reports)
        if outcome.is_together:
            assert self._together is not None
            # A replica that stepped by itself would step its optimizer, too.
            took_s = now - self._run.step.tally.started
            self._sync_s = max(0.0, took_s - longest - self._together.optimizer_s)
            return took_s, outcome.workers
        self._sync_s = now - self._agreed_at
        workers = tuple(
            WorkerStep(
                rank=rank,
                rows=int(report.rows),
                samples=report.samples,
                busy_s=report.busy_s,
                wait_s=longest - report.busy_s + self._sync_s,
            )
            for rank, report in enumerate(self._reports)
        )
        return now - self._started, workers

    def _choose_wire(self) -> None:
        """The slowest waits for the sums alone. Where ranks gather parameters, all of a step may be such waiting."""
        if self._wire is None or not self._reports:
            return
        replica, reports, self._reports = self._run.prepared(), self._reports, []
        busy_s, agree_s = max(report.busy_s for report in reports), min(report.sync_s for report in reports)
        sentence = self._wire.report(agree_s + busy_s * replica.gathers, agree_s + busy_s)
        if sentence is not None:
            replica.code(coding_of(self._wire.wire))
            self._run.notice(sentence)

    def end_round(self) -> Waits[None]:
        """A loop that takes just as many batches as there are never asks for the end."""
        yield from ()
        loader = self._run.loader
        if self._run.progress.stopping or (loader is not None and self._run.progress.at.row >= loader.rows):
            self.settle()

    def settle(self) -> None:
        """Make what replicas keep for the next mean the same everywhere. Called on every worker alike."""
        if self._alone is not None:
            self._alone.delta.settle()

    def _stand(self, plans: WindowPlans) -> None:
        """The run was put elsewhere."""
        if self._run.replica is not None:
            self._run.works.start_anew()
        plans.seek()

    def _within(self, call: str) -> AbstractContextManager[None]:
        """A call that every worker must make: where some have not, the others say so."""
        return self._run.link.within(call, self._run.progress.step_number)

    def begin_run(self, epochs: int) -> None:
        if (done := self._run.progress.position.epoch) >= epochs:
            self._run.notice(
                f"This run has done {done} of its epochs, and {epochs} {'was' if epochs == 1 else 'were'} asked for:"
                " nothing is left to train. Ask for more epochs to continue it."
            )

    def end_of_epoch(self) -> None:
        run = self._run
        assert run.loader is not None
        comes_next = run.loader.digest_of_next()
        weights_now = run.prepared().fingerprint()
        mine = json.dumps([weights_now, run.progress.ledger.ranges, comes_next, run.loader.seen()]).encode()
        with self._within("the end of an epoch"):
            told = [json.loads(data) for data in run.link.gather_bytes(mine)]
        ranges = ((a, b) for _, ranges, _, _ in told for a, b in ranges)
        proof = prove(ranges, run.loader.rows, run.loader.order.counted)
        same = len({row[0] for row in told}) == 1
        self._compare_orders(run.loader, [row[2] for row in told])
        compared = self._compare_streams(run.loader, [row[3] for row in told])
        weights = "all workers hold the same weights"
        if not same:
            run.prepared().align()
            weights = "THE WORKERS' WEIGHTS HAD DRIFTED APART, and are worker 0's again"
        skipped = (
            f", {run.progress.at.skipped_rows:,} of them in steps that were skipped"
            if run.progress.at.skipped_rows
            else ""
        )
        seen = compared or ("" if run.data else UNCOMPARED)
        run.progress.begin_ledger()
        epoch = run.loader.position.epoch
        done = EpochDone(
            epoch=epoch,
            used=proof.used,
            total=proof.total,
            same_weights=same,
            sentence=f"Epoch {epoch + 1}: {proof}{skipped}" + (f"{seen}; {weights}." if self.world > 1 else "."),
        )
        run.progress.prove(done)
        run.events.emit(done)

    def _compare_orders(self, loader: Loader, digests: list[str]) -> None:
        """Compare the orders of the next epoch: none may be begun in different orders."""
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            loader.fault = (
                f"Epoch {loader.position.epoch + 2} comes in another order on worker {other} than on worker 0. Seed the"
                " sampler alike on every worker, and let it draw from its own generator, or from none."
            )

    def _compare_streams(self, loader: Loader, seen: list[Fingerprint]) -> str:
        """Compare what every worker has read of a stream. Returns the end of the proof's sentence; empty for other
        data."""
        if not seen[0]:
            return ""
        for rank, theirs in enumerate(seen):
            where = differing_data(seen[0], theirs, ("worker 0's", f"worker {rank}'s"))
            if where is not None:
                loader.fault = (
                    f"The stream gave worker {rank} other rows than worker 0 in epoch {loader.position.epoch + 1}:"
                    f" {where}. It must give every worker the same rows: seed what it shuffles by."
                )
                return ", but NOT THE SAME ROWS STOOD THERE FOR ALL WORKERS"
        common = set.intersection(*({*each.get("marks", {})} for each in seen))
        return f", and the rows at {len(common)} of them were the same for all workers" if common else ""

    def end_early(self, folder: Path | None) -> NoReturn:
        folder = folder or self._folder
        where = " Nothing was saved: name a folder for that, as in fleet.epochs(3, 'runs/mine')."
        if folder is not None:
            self._save_once(folder)
            where = f" Saved in {folder}, from where fleet.load() continues."
        raise self._run.interrupted(self.last_words() + where)

    def end_well(self, folder: Path | None) -> None:
        if (folder := folder or self._folder) is not None:
            self._save_once(folder)

    def _save_once(self, folder: Path) -> None:
        if self._saved_last != (folder, self._run.progress.step_number) or self._keeps_more():
            self._save(folder, 2, LEFT)
        self.wait_for_saves()

    def _keeps_more(self) -> bool:
        """Whether a loop has changed what it keeps beside the weights since they were saved, on any worker: an epoch's
        code may save, as keep_best() does, and then count on."""
        with self._within(LEFT):
            changed = float(self._kept_in(self._run.kept.save({})) != self._kept_last)
            return any(each for (each,) in self._run.link.gather_rows([changed]))

    def _kept_in(self, standing: Standing) -> str:
        kept = {name: value for name, value in standing.items() if name in self._run.kept}
        return json.dumps(kept, sort_keys=True)

    def last_words(self) -> str:
        return f"Stopped after step {self._run.progress.step_number}."

    def request_stop(self) -> None:
        self._run.progress.ask_to_stop()

    stop_all = finish_all = request_stop

    def finishes(self) -> bool:
        if self._finishes is None:
            with self._within("the end of the loop"):
                asked = self._run.link.gather_rows([float(self._run.progress.finishes)])
            self._finishes = any(each for (each,) in asked)
        return self._finishes

    def evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        with self._within("fleet.evaluate()"):
            self._run.link.note_call()  # a split model's forward asks other ranks before anything else here does
            self.settle()
            with self._run.looking.in_place():
                return self._evaluate(loss_of, looked_at)

    def _evaluate(self, loss_of: LossFunction, looked_at: HeldOut) -> Figures:
        run, pipelines = self._run, self._run.grid.pipelines
        replica, rows = run.prepared(), looked_at.rows
        shares = run.composition.shares or (1.0,) * pipelines
        if run.loader is not None and not self.has_fixed_shares:
            shares = run.loader.shares
        batch = BatchConfig(size=max(1, len(rows)), micro_size=max(1, looked_at.batch_size // pipelines))
        share = BatchShare(shares, run.grid.pipeline, in_step=replica.in_step)
        loader = Loader(rows, batch, share, device=run.device, collate=looked_at.collate)
        with looking(replica.model), run.looks_with(), torch.no_grad():
            mine = replica.evaluate(loss_of, loader)
        total = add_up(run.link.gather_bytes(mine.to_bytes()))
        return means_of(total.names, total.figures, total.samples)

    def exchange(self, data: bytes) -> list[bytes]:
        return self._run.link.gather_bytes(data)

    def save(self, folder: Path, keep_last: int) -> None:
        self._save(folder, keep_last, "fleet.save()")

    def _save(self, folder: Path, keep_last: int, call: str) -> None:
        run = self._run
        with self._within(call):
            self.settle()
            standing, kept = take_position(run)
            self._saves.save(folder, run.prepared(), standing, keep_last, kept)
        self._saved_last, self._kept_last = (folder, standing["step"]), self._kept_in(standing)
        if run.keeper is not None:
            run.keeper.on_saved()

    def state_dict(self) -> dict[str, Any]:
        run, looking = self._run, self._run.looking
        with self._within("fleet.state_dict()"):
            if is_in_parts(run.prepared()) or run.composition.window is not None or looking:
                run.link.meet("fleet.state_dict()", run.notice)
            self.settle()
            with looking.in_place():
                return whole_state(run.link, run.prepared(), run.names)

    def load(self, folder: Path) -> bool:
        self._folder = folder
        run = self._run
        with self._within("fleet.load()"):
            standing = self._saves.load(folder, run.prepared(), partial(check_position, run))
        if standing is None:
            return False
        self._moved += 1
        restore_position(run, standing)
        run.prepared().remember_buffers()
        run.loaded_from = Path(standing["path"])
        self._saved_last = folder, run.progress.step_number
        self._kept_last = self._kept_in(run.kept.save({}))
        if run.loader is not None and run.loader.position.row >= run.loader.rows:
            run.loader.end_epoch()
        if standing["workers"] != self.world:
            run.seed_random(standing["seed"])
        return True

    def wait_for_saves(self) -> None:
        with self._within("fleet.wait_for_saves()"):
            self._saves.wait_together()

    def close(self, error: BaseException | None) -> None:
        run = self._run
        if isinstance(error, WorkerLost) or (error is not None and loss_of_peer(error) is not None):
            self._saves.one_is_gone()
        if run.keeper is not None:
            run.keeper.close(has_failed=error is not None and not isinstance(error, Interrupted))
        if run.replica is not None:
            run.replica.close()
        try:
            self._saves.wait()
            if error is None:
                run.link.end_well()
        finally:
            run.link.close()
