"""Plans of a group: which rows each replica does next. Every rank makes them from the same reports, and so the same.

SyncPlans: one batch after the other, in shares that follow speeds. WindowPlans: rows over which each replica steps by
itself, or a step of all.
"""

from typing import Protocol

from potluck.agree.records import Range, Report
from potluck.agree.shares import Balance, share_out
from potluck.agree.windows import RowPool, WindowPlan, make_planner, rows_left_after, stretch_of
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare, MicroBatch, even_batches, plan_step
from potluck.data.source import DataSource
from potluck.engine.run_state import RunState
from potluck.engine.table import RoundPlan
from potluck.errors import ConfigError
from potluck.events import Decided
from potluck.link.grid import Nodes
from potluck.words import plural


class GroupPlans(Protocol):
    @property
    def has_fixed_shares(self) -> bool:
        """Whether each pipeline's part of a batch stays as it was at first."""

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader: ...

    def plan(self, drift: float) -> RoundPlan | None:
        """The next round, from where the run stands. `drift`: how far this replica was from the last mean."""

    def learn(self, plan: RoundPlan, reports: list[Report]) -> None:
        """All have reported this round: one report for each rank of a step, or for each replica of a window."""

    def seek(self) -> None:
        """The run stands elsewhere."""


class SyncPlans:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self._balance: Balance | None = None
        self._reports: list[Report] = []
        """Of the last step, until the next is planned."""

    @property
    def has_fixed_shares(self) -> bool:
        return self._balance is None

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        run, pipelines = self._run, self._run.grid.pipelines
        replica, shares = run.prepared(), run.composition.shares or (1.0,) * pipelines
        if 0 in (parts := share_out(batch.size, shares)):
            raise ConfigError(
                f"A batch of {batch.size} does not fit {plural(pipelines, 'worker')}: each needs at least one row, and"
                f" they would have {', '.join(map(str, parts))}. Use a larger batch, fewer workers, or more even"
                " shares."
            )
        share = BatchShare(shares, run.grid.pipeline, in_step=replica.in_step, in_pairs=run.batch_norm is not None)
        # Where ranks gather parameters they wait for each other in every layer, and nobody's own speed can be seen.
        if run.composition.is_measured and pipelines > 1 and not replica.gathers:
            self._balance = Balance(batch.size, pipelines)
        return Loader(source, batch, share, device=run.device, seed=seed)

    def plan(self, drift: float) -> RoundPlan | None:
        run, loader, at = self._run, self._run.loader, self._run.at
        if loader is None:  # the loop brings batches of its own
            return RoundPlan(version=at.version + 1, epoch=0, row=0, rows=0, is_together=True, batches=(((0, 0), ()),))
        if at.row >= loader.rows:
            return None
        self._share_anew()
        run.link.note_call()
        micros = tuple(loader.step_at(at.row))
        end = micros[0].step_end
        batches = (((at.row, end), micros),)
        rows = end - at.row
        return RoundPlan(
            version=at.version + 1, epoch=at.epoch, row=at.row, rows=rows, is_together=True, batches=batches
        )

    def learn(self, plan: RoundPlan, reports: list[Report]) -> None:
        self._reports = self._run.grid.merge(reports, "pipeline")

    def _share_anew(self) -> None:
        """Workers of different speeds get parts of different sizes."""
        run, merged = self._run, self._reports
        if self._balance is None or run.loader is None or not merged:
            return
        self._reports = []
        changed = self._balance.report([int(report.rows) for report in merged], [report.busy_s for report in merged])
        if changed is not None:
            parts, reason = changed
            run.loader.shares = tuple(float(part) for part in parts)
            run.events.emit(Decided(step=run.step_number, rows=tuple(parts), reason=reason))

    def seek(self) -> None:
        """Batches follow from the position alone."""


class WindowPlans:
    has_fixed_shares = True

    def __init__(self, run: RunState, nodes: Nodes) -> None:
        policy = run.composition.window
        assert policy is not None
        self._run, self._nodes, self._policy = run, nodes, policy
        self._planner = make_planner(policy, nodes.names)
        self._pool = RowPool([])
        self._taken: list[list[Range]] = []
        self._own_rows = 0
        self.decision: WindowPlan | None = None
        self.are_moments_divided_by = False
        """Whether noise makes the steps of replicas shorter, which have to be stretched then."""

    @property
    def may_step_together(self) -> bool:
        """Where replicas are split or cut, they step by themselves from the start."""
        is_whole = not self._run.grid.is_cut and self._run.composition.split is None
        return self._policy.may_step_together and is_whole and self._nodes.count > 1

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        return Loader(source, batch, None, device=self._run.device, seed=seed)

    def plan(self, drift: float) -> RoundPlan | None:
        run, loader, at = self._run, self._run.loader, self._run.at
        assert loader is not None
        if at.row >= loader.rows:
            return None
        if not self._pool.rows:
            self.seek()
        size, nodes = loader.batch.size, self._nodes
        rows_left = min(self._pool.rows, (run.caller.rows_limit or 1 << 62) - run.rows_seen)
        own_rows = self._own_rows = -(-size // nodes.count)
        decision = self._decide(rows_left, size, own_rows)
        in_pairs = run.batch_norm is not None and own_rows > 1
        if in_pairs:
            decision, self._taken = self._pool.take_in_pairs(decision, rows_left)
        else:
            self._taken = [self._pool.take(a + b) for a, b in zip(decision.rows, decision.spare, strict=True)]
        self.decision = decision
        self._tell(decision, drift)
        step_rows = size if decision.together else own_rows
        ranges = [
            batch
            for part in self._taken[nodes.number]
            for batch in even_batches(*part, step_rows, size, in_pairs=in_pairs)
        ]
        is_stretched = self.are_moments_divided_by and not decision.together
        return RoundPlan(
            version=at.version + 1,
            epoch=at.epoch,
            row=at.row,
            rows=sum(decision.rows),
            is_together=decision.together,
            batches=tuple((rows, self._micros_of(*rows, loader.batch)) for rows in ranges),
            part=decision.rows[nodes.number],
            stretch=stretch_of(decision.rows, own_rows, size) if is_stretched else 1.0,
            until_s=decision.until_s,
        )

    def _decide(self, rows_left: int, size: int, own_rows: int) -> WindowPlan:
        run, planner = self._run, self._planner
        limit = run.caller.rows_limit
        # The share of the run in which most is learned, if it is known how long it is.
        is_first = limit is not None and run.rows_seen < self._policy.together * limit
        is_together = planner.is_best_together(is_early=is_first, may=self.may_step_together)
        if not is_together and not run.turns.now:  # a batch in the middle of its turns is only such a step's
            return planner.decide(rows_left, own_rows)
        first, end = self._pool.ranges[0]
        rows = min(rows_left, end - first, size - run.at.row % size)
        return planner.decide_together(rows, is_first=is_first)

    def _micros_of(self, start: int, end: int, batch: BatchConfig) -> tuple[MicroBatch, ...]:
        """This worker's part of one of its replica's batches: of those who hold the same stage of it, each has one."""
        run, size = self._run, self._run.composition.node_size
        together = {"in_step": size > 1, "in_pairs": run.batch_norm is not None}
        return tuple(plan_step(start, end, batch, (1.0,) * size, run.link.rank % size, **together))

    def learn(self, plan: RoundPlan, reports: list[Report]) -> None:
        sync_s = max(report.sync_s for report in reports)
        if plan.is_together:
            rows, busy = [int(report.rows) for report in reports], [report.busy_s for report in reports]
            self._planner.observe(rows, busy, self._own_rows, sync_s)
            if not self._run.turns.is_last:  # the batch comes again
                for taken in self._taken:
                    self._pool.give_back(taken)
            return
        for report, taken in zip(reports, self._taken, strict=True):
            self._pool.give_back(rows_left_after(taken, int(report.rows)))
        self._planner.report(reports, sync_s)

    def _tell(self, decision: WindowPlan, drift: float) -> None:
        run = self._run
        run.events.emit(
            Decided(
                step=run.step_number,
                rows=decision.rows,
                reason=decision.reason,
                version=run.at.version,
                anchor=decision.anchor,
                divergence=drift,
            )
        )

    def seek(self) -> None:
        assert self._run.loader is not None
        self._pool = RowPool([(self._run.at.row, self._run.loader.rows)])

    def left(self) -> list[list[int]]:
        assert self._run.loader is not None
        return [list(part) for part in self._run.loader.left_after(self._pool.ranges)]
