"""Plans of a group: which rows each replica does next. Every rank makes them from the same reports, and so the same.

SyncPlans: one batch after the other, in shares that follow speeds. WindowPlans: rows over which each replica steps by
itself, or a step of all; how many these are says the Decider.
"""

from potluck.agree.decider import Decider
from potluck.agree.records import Range, Report
from potluck.agree.shares import Balance, share_out
from potluck.agree.windows import RowPool, WindowPlan, rows_left_after, stretch_of
from potluck.data.loader import Loader
from potluck.data.plan import BatchConfig, BatchShare, MicroBatch, even_batches, plan_step
from potluck.data.source import DataSource
from potluck.engine.run_parts import RunParts
from potluck.engine.table import RoundPlan
from potluck.errors import CheckpointError, ConfigError
from potluck.events import Decided
from potluck.link.grid import Nodes
from potluck.replica.moments import Moments
from potluck.words import plural


class SyncPlans:
    def __init__(self, run: RunParts) -> None:
        self._run = run
        self._balance: Balance | None = None
        self._reports: list[Report] = []
        """Of the last step, until the next is planned."""

    @property
    def has_fixed_shares(self) -> bool:
        """Whether each pipeline's part of a batch stays as it was at first."""
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

    def plan(self) -> RoundPlan | None:
        """The next round, from where the run stands."""
        run, loader, at = self._run, self._run.loader, self._run.progress.at
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
        """All have reported this round: one report for each rank of a step, or for each replica of a window."""
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
            run.events.emit(Decided(step=run.progress.step_number, rows=tuple(parts), reason=reason))


class WindowPlans:
    has_fixed_shares = True

    def __init__(self, run: RunParts, nodes: Nodes) -> None:
        policy = run.composition.window
        assert policy is not None
        self._run, self._nodes, self._policy = run, nodes, policy
        self._decider = Decider()
        self._pool = RowPool([])
        self._taken: list[list[Range]] = []
        self.decision: WindowPlan | None = None
        self.moments: Moments | None = None
        """What optimizers keep, if that is averaged. Noise may make steps of replicas shorter, so that these have to be
        stretched."""

    @property
    def may_step_together(self) -> bool:
        """Where replicas are split or cut, they step by themselves from the start."""
        return self._policy.may_step_together and self._are_whole and self._nodes.count > 1

    @property
    def can_step_together(self) -> bool:
        """Whether a batch can be finished that a checkpoint has in the middle of its turns: only by a step of all, also
        where there is one worker now, or the policy would have none."""
        return self.may_step_together or (self._are_whole and self._run.turns.count > 1)

    @property
    def _are_whole(self) -> bool:
        return not self._run.grid.is_cut and self._run.composition.split is None

    def make_loader(self, source: DataSource, batch: BatchConfig, seed: int) -> Loader:
        return Loader(source, batch, None, device=self._run.device, seed=seed)

    def plan(self) -> RoundPlan | None:
        run, loader, at = self._run, self._run.loader, self._run.progress.at
        assert loader is not None
        if at.row >= loader.rows:
            return None
        if not self._pool.rows:
            self._pool = RowPool([(at.row, loader.rows)])
        decision = self.decision = self._take()
        own_rows, size = self._decider.own_rows, loader.batch.size
        run.events.emit(self._decider.decided(decision))
        ranges = [
            batch
            for part in self._taken[self._nodes.number]
            for batch in even_batches(*part, size if decision.together else own_rows, size, in_pairs=self._in_pairs)
        ]
        is_stretched = self.moments is not None and self.moments.are_divided_by and not decision.together
        return RoundPlan(
            version=at.version + 1,
            epoch=at.epoch,
            row=at.row,
            rows=sum(decision.rows),
            is_together=decision.together,
            batches=tuple((rows, self._micros_of(*rows, loader.batch)) for rows in ranges),
            part=decision.rows[self._nodes.number],
            stretch=stretch_of(decision.rows, own_rows, size) if is_stretched else 1.0,
            until_s=decision.until_s,
        )

    @property
    def _in_pairs(self) -> bool:
        return self._run.batch_norm is not None and self._decider.own_rows > 1

    def _take(self) -> WindowPlan:
        """Take each replica's rows from those that nobody has done."""
        run, decider, pool = self._run, self._decider, self._pool
        rows = decider.begin(
            self._policy,
            self._nodes.names,
            run.progress.at,
            run.progress.terms,
            pool.ranges,
            rows_limit=run.loop.rows_limit,
            may_step_together=self.may_step_together,
        )
        if rows and not self.can_step_together:
            raise CheckpointError(
                "The checkpoint stands between two turns of a batch, which only a step of all workers can finish, and"
                " replicas that are split or cut step by themselves here. Continue with Sync, or with whole replicas."
            )
        decision = decider.together(rows) if rows else decider.alone()
        if self._in_pairs:
            decision, self._taken = pool.take_in_pairs(decision, decider.rows_left)
        else:
            self._taken = [pool.take(own + more) for own, more in zip(decision.rows, decision.spare, strict=True)]
        return decision

    def _micros_of(self, start: int, end: int, batch: BatchConfig) -> tuple[MicroBatch, ...]:
        """This worker's part of one of its replica's batches: of those who hold the same stage of it, each has one."""
        run, size = self._run, self._run.composition.node_size
        together = {"in_step": size > 1, "in_pairs": run.batch_norm is not None}
        return tuple(plan_step(start, end, batch, (1.0,) * size, run.link.rank % size, **together))

    def learn(self, plan: RoundPlan, reports: list[Report]) -> None:
        sync_s = max(report.sync_s for report in reports)
        self._decider.observe(reports, sync_s, averages_moments=self.moments is not None)
        if plan.is_together and self._run.turns.is_last:
            return
        for report, taken in zip(reports, self._taken, strict=True):
            done = 0 if plan.is_together else int(report.rows)  # in another turn the batch comes again
            self._pool.give_back(rows_left_after(taken, done))

    def seek(self) -> None:
        """The run stands elsewhere."""
        assert self._run.loader is not None
        at = self._run.progress.at
        self._pool = RowPool([(at.row, self._run.loader.rows)])
        self._decider.know_alike(at.version)  # all have loaded one state

    def left(self) -> list[list[int]]:
        assert self._run.loader is not None
        return [list(part) for part in self._run.loader.left_after(self._pool.ranges)]
