"""Windows: replicas step by themselves, and agree once a window. Cadence and Async among the workers of one group.

The loader gives this replica's batches; each
step() is one of its own optimizer. The last step() of its part of the window agrees with the others: parameters are
averaged by samples, and everybody decides alike what the next window is.
A replica is one rank, or under HybridShard a node of several: they take each step as one, and each averages its part.
`step_number` counts whole batches of the run, as it does when all step together; there are several to a window.
"""

import itertools
import math
import time
from collections.abc import Iterator

from torch import Tensor

from potluck.agree.records import Report
from potluck.agree.step_report import StepDecision, decide_step
from potluck.agree.windows import RowPool, WindowPlan, make_planner, rows_left_after, stretch_of
from potluck.coded_numbers import Coding, coding_of
from potluck.data.loader import Loader, SliceLoader
from potluck.data.plan import BatchConfig, MicroBatch, even_batches, plan_step
from potluck.data.rows import mix
from potluck.data.source import DataSource
from potluck.devices import synchronize
from potluck.engine.common_steps import apply_step, report_of
from potluck.engine.figures import WindowFigures
from potluck.engine.local_steps import backward, end_batch, is_batch_done, step_alone
from potluck.engine.means import CodedLinkMean, LinkMean
from potluck.engine.moments import Moments, are_averaged
from potluck.engine.replica import Replica
from potluck.engine.rounds import check_same_data
from potluck.engine.run_state import RunState
from potluck.engine.window_delta import WindowDelta
from potluck.errors import ConfigError
from potluck.events import Decided, StepDone, StepSkipped, WorkerStep
from potluck.link.grid import make_nodes
from potluck.link.link import Alone, Rows

NEARLY = 0.9
"""The share of its part after which a replica that may continue beyond it says that nobody need wait for it."""


class Windows:
    has_fixed_shares = True

    def __init__(self, run: RunState) -> None:
        composed = run.composition
        assert composed.window is not None
        self._run = run
        self._policy = composed.window
        self.nodes = make_nodes(run.link, composed.stages * composed.node_size)
        self._planner = make_planner(self._policy, self.nodes.names)
        self._pool = RowPool([])
        self._taken: list[list[tuple[int, int]]] = []
        self._decision: WindowPlan | None = None
        self._window = Report()
        self._window_started = 0.0
        self._all_done: Rows | None = None
        self._is_open = False
        """Whether a window is open: its last step closes it."""
        self._has_more = False
        """Whether the batch that is under way is not the last of this replica's part."""
        self._sync_s = 0.0
        self._weight = 1 / self.nodes.count
        self._lr = self._norm = 0.0
        self._batch_rows = 0
        """Of the batch that is under way, over all ranks of this node."""
        self._node_is_over = False
        self._coding: Coding | None = None
        self._moments: Moments | None = None
        self._figures = WindowFigures(composed.window.figures)
        self._stretch = 1.0
        """Of this replica's own steps, in the window that is open."""
        run.kept.add("left", lambda tensors: self._rows_left(), lambda saved, tensors: self._stand())

    # Preparing

    def begin(self, replica: Replica) -> None:
        policy, nodes = self._policy, self.nodes
        coding = self._coding = coding_of(self._run.composition.wire) if nodes.count > 1 else None
        mean = LinkMean(nodes.across) if coding is None else CodedLinkMean(nodes.across, coding)
        self._delta = WindowDelta(replica, mean, within=nodes.within)
        notice, steps_whole = self._run.notice, replica.steps_whole
        if are_averaged(policy.averages_moments, replica.optimizer, notice, steps_whole=steps_whole):
            self._moments = Moments(replica.optimizer, replica.outer.names, self._delta.runs)
        if self._may_step_together:
            replica.prepare_sums()

    @property
    def _may_step_together(self) -> bool:
        """Where replicas are split or cut, they step by themselves from the start."""
        composed = self._run.composition
        is_whole = not self._run.grid.is_cut and composed.split is None
        return self._policy.may_step_together and is_whole and self.nodes.count > 1

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        loader = self._loader = SliceLoader(source, batch, device=self._run.device, seed=seed)
        check_same_data(self._run, loader)
        loader.plan = self._plan
        loader.seed_of = lambda micro: mix(loader.seed, loader.position.epoch, micro.start)
        return loader

    # A window

    def _plan(self) -> Iterator[MicroBatch]:
        """This replica's micro-batches of the rest of the epoch, or until the run stops."""
        loader = self._loader
        if not self._pool.rows:  # else a pass before stopped in the middle of the epoch
            self._pool = _rest_of_epoch(loader)
        while self._pool.rows and not self._run.stopping:
            yield from self._open_window(loader)
            if self._is_open:  # this replica had no rows of it
                self._end_without_rows(loader)
        self.settle()

    def _open_window(self, loader: SliceLoader) -> Iterator[MicroBatch]:
        rows_left = min(self._pool.rows, (self._run.caller.rows_limit or 1 << 62) - self._run.rows_seen)
        nodes = self.nodes
        own_rows = self._own_rows = -(-loader.batch.size // nodes.count)
        is_first = self._is_first_share()
        is_together = self._planner.is_best_together(is_early=is_first, may=self._may_step_together)
        is_together |= self._run.turns.now > 0  # a batch in the middle of its turns, which only such a step leaves
        if is_together:
            first, end = self._pool.ranges[0]
            step_rows = min(rows_left, end - first, loader.batch.size - loader.position.row % loader.batch.size)
            decision = self._planner.decide_together(step_rows, is_first=is_first)
        else:
            decision = self._planner.decide(rows_left, own_rows)
        in_pairs = self._run.batch_norm is not None and own_rows > 1
        if in_pairs:
            decision, self._taken = self._pool.take_in_pairs(decision, rows_left)
        else:
            self._taken = [self._pool.take(a + b) for a, b in zip(decision.rows, decision.spare, strict=True)]
        if self._decision is not None and self._decision.together != is_together:
            self._sync_s = 0.0  # what a step costs says nothing of a window's end
        self._decision = decision
        self._emit_decision(decision)
        self._window, self._window_started = Report(), time.perf_counter()
        self._all_done = None
        if self._may_step_together:  # elsewhere it steps with those who hold the same stage, and no others
            self._run.prepared().step_with(self._run.link if is_together else nodes.within)
        if not is_together:
            self._delta.begin()
            self._figures.begin()
            is_stretched = self._moments is not None and self._moments.are_divided_by
            self._stretch = stretch_of(decision.rows, own_rows, loader.batch.size) if is_stretched else 1.0
        if self._run.scheduled is not None:
            self._run.scheduled.begin_window()
        self._run.start_of_step()
        batches = [
            batch
            for part in self._taken[nodes.number]
            for batch in even_batches(
                *part, loader.batch.size if is_together else own_rows, loader.batch.size, in_pairs=in_pairs
            )
        ]
        planned = [self._plan_batch(start, end, loader.batch) for start, end in batches]
        loader.expect(itertools.chain.from_iterable(planned))
        self._is_open = True
        for number, ((start, end), micros) in enumerate(zip(batches, planned, strict=True), start=1):
            self._has_more = number < len(batches)
            done, self._batch_rows = self._window.rows, end - start
            for _ in range(self._run.turns.now, self._run.turns.count):
                yield from micros
            if self._window.rows == done:
                raise ConfigError(
                    f"The batch of rows {start} to {end} was given out, but step() was not called after it."
                    " Call backward() and step() for every batch of the loader."
                )
            if not self._is_open:
                return

    def _plan_batch(self, start: int, end: int, batch: BatchConfig) -> list[MicroBatch]:
        """This worker's part of one of its replica's batches: of those who hold the same stage of it, each has one."""
        run, size = self._run, self._run.composition.node_size
        together = {"in_step": size > 1, "in_pairs": run.batch_norm is not None}
        return plan_step(start, end, batch, (1.0,) * size, run.link.rank % size, **together)

    @property
    def is_under_way(self) -> bool:
        return self._is_open

    def _is_over(self, decision: WindowPlan) -> bool:
        """After each batch. The ranks of a node have heard it with their last step."""
        if self.nodes.size > 1:
            return self._node_is_over
        return self._sees_end(decision, self._window.batches, self._window.rows)

    def _sees_end(self, decision: WindowPlan, batches: float, rows: float) -> bool:
        """Whether the window's end is nearer than the middle of another batch; or whether all have done their parts."""
        if decision.until_s is not None:
            spent = time.perf_counter() - self._window_started
            return spent + 0.5 * spent / batches > decision.until_s
        node = self.nodes.number
        part = decision.rows[node] * (NEARLY if decision.spare[node] else 1)
        return rows >= part and self._own_part_done(decision).is_here()

    def _own_part_done(self, decision: WindowPlan) -> Rows:
        """Tells the others so, once in each window in which some may continue while others are not done."""
        if self._all_done is None:
            among = self.nodes.across if any(decision.spare) else Alone()
            self._all_done = among.start_gather([1.0])
        return self._all_done

    def backward(self, loss: Tensor, samples: float, last: bool | None) -> None:
        backward(self._run, loss, samples, last)

    def step(self) -> StepDone | StepSkipped | None:
        """Steps this replica's optimizer once its batch is done, and agrees with the others if it is a window's last.

        So a loop that takes just as many batches as there are has agreed on all of them.
        """
        run, decision, before = self._run, self._decision, self._window
        if not is_batch_done(run):
            return None
        assert decision is not None
        if decision.together:
            return self._step_together()
        nodes, rows = self.nodes, before.rows + self._batch_rows
        is_last = run.turns.is_last
        tells_end = is_last and nodes.size > 1 and nodes.within.rank == 0
        tells_end = tells_end and self._sees_end(decision, before.batches + 1, rows)
        done, own_samples, step_decision = end_batch(run, nodes.within, is_over=tells_end)
        self._node_is_over = bool(done.is_over)
        self._figures.add(done)
        is_good = step_decision.fault is None
        self._window = (
            before._replace(skipped=before.skipped + (not is_good))
            if not is_last
            else before._replace(
                samples=before.samples + done.samples * is_good,
                loss_sum=before.loss_sum + (done.loss_sum if is_good else 0.0),
                rows=before.rows + done.rows,
                batches=before.batches + 1,
                skipped=before.skipped + (not is_good),
                skipped_rows=before.skipped_rows + (0 if is_good else done.rows),
            )
        )
        where, by_now = nodes.names[nodes.number], self._rows_of_schedule(decision)
        event = step_alone(run, step_decision, own_samples, by_now, where, stretch=self._stretch)
        if is_good:
            self._lr, self._norm = run.lr, step_decision.norm
        run.next_turn()
        if not is_last:
            return event
        if not self._has_more or self._is_over(decision):
            self._end_window(self._loader)
        return event

    def _is_first_share(self) -> bool:
        """Whether the run is in the share of it in which most is learned, if it is known how long it is."""
        limit = self._run.caller.rows_limit
        return limit is not None and self._run.rows_seen < self._policy.together * limit

    def _step_together(self) -> StepDone | StepSkipped:
        """A window that is one step: of the mean gradient of all replicas, as under Sync."""
        run, replica = self._run, self._run.prepared()
        replica.unseal()
        synchronize(run.device)
        busy_s = time.perf_counter() - self._window_started
        replica.start_sums()
        tally = run.tally
        told = run.link.start_gather(report_of(run, busy_s, sync_s=self._sync_s).to_row())
        wait_s, norm, _ = replica.reduce(run.tally.loss_sum)
        reports = [Report.from_row(row) for row in told.wait()]
        if any(report.has_unused for report in reports):
            replica.drop_unused()
        found = decide_step(reports, norm, run.samples_per_gradient, run.config.clip)
        rows, is_last = [int(report.rows) for report in reports], run.turns.is_last
        self._is_open, self._window = not is_last, self._window._replace(rows=tally.rows * is_last)
        run.stopping = any(report.wants_stop for report in reports) and is_last
        steps_before = run.step_number - run.turns.now
        run.agreed(sum(rows) * is_last)
        agreed = time.perf_counter()
        event: StepDone | StepSkipped | None = apply_step(run, found, reports, tally.samples)
        own_s = time.perf_counter() - agreed  # a replica that stepped by itself would need that, too
        if event is None:
            event = run.step_done(found, run.lr, busy_s + wait_s, run.grid.worker_steps(reports, busy_s + wait_s))
        run.tell(event)
        busy = [report.busy_s for report in reports]
        self._planner.observe(rows, busy, self._own_rows, max(report.sync_s for report in reports))
        self._sync_s = max(0.0, time.perf_counter() - self._window_started - max(busy) - own_s)
        run.next_turn()
        if is_last:
            run.tell_agreed(steps_before)
        self._window_started = time.perf_counter()
        run.start_of_step()
        return event

    def _end_without_rows(self, loader: SliceLoader) -> None:
        assert self._decision is not None
        if not self._decision.together:
            self._end_window(loader)
        while self._is_open:
            self._step_together()

    def _rows_of_schedule(self, decision: WindowPlan) -> int:
        """Count rows as if all replicas were as far in the window as this one."""
        mine, whole = decision.rows[self.nodes.number], sum(decision.rows)
        done = min(1.0, self._window.rows / mine) if mine else 1.0
        return self._run.rows_seen + round(done * whole)

    def _end_window(self, loader: SliceLoader) -> None:
        self._is_open = False
        self._close_window(loader)
        if not self._pool.rows or self._run.stopping:
            self.settle()

    def _close_window(self, loader: SliceLoader) -> None:
        assert self._decision is not None
        synchronize(self._run.device)
        busy_s = time.perf_counter() - self._window_started
        mine = self._window._replace(
            busy_s=busy_s,
            sync_s=self._sync_s,
            wants_stop=self._run.wants_stop,
            loss_scale=self._run.scale.value,
            figures=self._figures.of_window(self._delta.drift),
        )
        if self._decision.until_s is None:
            self._own_part_done(self._decision).wait()
        names = self._policy.figures
        told = [Report.from_row(row, names) for row in self._run.link.gather_rows(mine.to_row(names))]
        reports = self._run.grid.merge(told, "replica")
        started = time.perf_counter()
        samples = sum(report.samples for report in reports)
        self._weight = mine.samples / samples if samples else 1 / self.nodes.count
        self._merge()
        self._sync_s = time.perf_counter() - started
        for report, taken in zip(reports, self._taken, strict=True):
            self._pool.give_back(rows_left_after(taken, int(report.rows)))
        self._planner.report(reports, max(report.sync_s for report in reports))
        steps_before, rows = self._run.step_number, sum(int(report.rows) for report in reports)
        self._run.scale.agree([report.loss_scale for report in reports])
        self._run.scale.learn(samples, sum(report.rows - report.skipped_rows for report in reports))
        skipped, skipped_rows = sum(report.skipped for report in reports), sum(r.skipped_rows for r in reports)
        self._run.skipped_steps(int(skipped), int(skipped_rows))
        self._run.agreed(rows)
        self._run.stopping = any(report.wants_stop for report in reports)
        self._run.events.emit(self._tell_window(reports, samples))
        self._run.tell_agreed(steps_before)

    def _merge(self) -> None:
        """The mean of all replicas takes their place."""
        self._delta.end(self._weight)
        across, weight = self.nodes.across, self._weight
        moving = self._moments.start(across, weight, self._coding) if self._moments is not None else []
        self._delta.apply()
        for pending in moving:
            pending.wait()
        if self._moments is not None:
            self._moments.take()

    def settle(self) -> None:
        """Make what replicas keep for the next mean the same everywhere. Called on every worker alike."""
        self._delta.settle()

    def _emit_decision(self, decision: WindowPlan) -> None:
        self._run.events.emit(
            Decided(
                step=self._run.step_number,
                rows=decision.rows,
                reason=decision.reason,
                version=self._run.at.version,
                anchor=decision.anchor,
                divergence=self._delta.drift,
            )
        )

    def _tell_window(self, reports: list[Report], samples: float) -> StepDone:
        longest = max(report.busy_s for report in reports)
        loss = sum(report.loss_sum for report in reports) / samples if samples else math.nan
        workers = tuple(
            WorkerStep(
                rank=rank,
                rows=int(report.rows),
                samples=report.samples,
                busy_s=report.busy_s,
                wait_s=longest - report.busy_s + self._sync_s,
            )
            for rank, report in enumerate(reports)
        )
        seconds = time.perf_counter() - self._window_started
        return self._run.step_done(StepDecision(samples, loss, self._norm, 1.0, None), self._lr, seconds, workers)

    # Where the run stands

    def _rows_left(self) -> list[list[int]]:
        return [list(part) for part in self._loader.left_after(self._pool.ranges)]

    def _stand(self) -> None:
        self._delta.start_anew()
        self._loader.forget()
        self._pool = _rest_of_epoch(self._loader)


def _rest_of_epoch(loader: SliceLoader) -> RowPool:
    return RowPool([(loader.position.row, loader.rows)])
