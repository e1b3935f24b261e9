"""Plans the next step, and who computes which part of it, from what workers told of the last ones. Pure."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from potluck.agree.policy import Windowed
from potluck.agree.records import Report
from potluck.agree.shares import without_singles
from potluck.agree.windows import WindowPlan, WindowPlanner, make_planner
from potluck.events import Decided
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.effects import Emit
from potluck.fleet.ledger import Range
from potluck.fleet.membership import WorkerRecord, unique_names
from potluck.fleet.tree import Node, decide_quotas, share_nodes, sized_rows, slice_rows
from potluck.wire.messages import Applied, Work

MOST_WINDOW = (1 << 32) - 1
"""Rows of a window: the size of a slice is a u32."""


@dataclass(kw_only=True)
class StepPlan:
    """The plan of a step, and of who computes it. Where workers step by themselves, it is a window."""

    step: int
    epoch: int
    bounds: list[Range]
    """The first and the last + 1 row of each slice."""
    nodes: list[list[Node]]
    """The nodes of each worker."""
    workers: tuple[int, ...]
    """Their ids."""
    batch: int = 0
    """Rows of a step that a worker takes by itself; 0: it takes none."""
    decision: WindowPlan | None = None
    """Where workers step by themselves, or would if they did not step together now: why it is so."""

    @property
    def row(self) -> int:
        return self.bounds[0][0]

    @property
    def rows(self) -> int:
        return self.bounds[-1][1] - self.bounds[0][0]

    @property
    def slices(self) -> int:
        return len(self.bounds)

    def amount(self, numbers: Collection[int]) -> int:
        """How much these slices are, as speeds are measured: slices; or rows, where some steps are windows, whose
        slices are of many sizes."""
        if self.decision is None:
            return len(numbers)
        return sum(self.bounds[number][1] - self.bounds[number][0] for number in numbers)

    def rows_of(self, node: Node) -> Range:
        return self.bounds[node[0]][0], self.bounds[node[1] - 1][1]

    def work(self, nodes: list[Node]) -> Work:
        flat = np.array([edge for node in nodes for edge in node], "<u4")
        sizes = np.array([end - start for start, end in self.bounds] if self.batch else [], "<u4")
        return Work(self.step, self.epoch, self.row, self.rows, self.slices, flat, sizes, self.batch)


@dataclass(kw_only=True)
class StepUnderWay(StepPlan):
    """One agreement, whatever it is over."""

    started: float
    reports: dict[int, Report] = field(default_factory=dict)
    computed_by: dict[int, int] = field(default_factory=dict)
    """slice -> worker id, once its payload is wholly in the sums."""
    bad: dict[int, str] = field(default_factory=dict)
    """slice -> who computed it badly."""
    granted: set[int] = field(default_factory=set)
    """Slices of a plain peer that is gone: the report of the worker that computes them next replaces what was assumed.
    Until then that stays, so that a step never lacks a report."""
    used: bytearray = field(default_factory=bytearray)
    buffers: bytes = b""
    """Changes of the first slice to buffers that have no mean, as the first who computed it told."""
    overflowed: list[str] = field(default_factory=list)
    """Whose gradients had no room in fp16, as they told."""
    busy: dict[int, float] = field(default_factory=dict)
    """worker id -> seconds"""
    batches: dict[int, int] = field(default_factory=dict)
    """worker id -> steps that it took by itself"""
    skipped: dict[int, int] = field(default_factory=dict)
    """worker id -> steps of its own that it skipped"""
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    """worker id -> what else it told of its part of a window"""
    first_report: float | None = None
    last_report: float = 0.0
    loss: float = math.nan
    samples: float = 0.0

    def note_used(self, bits: bytes) -> None:
        """Note the parameters that somebody's slices gave a gradient to."""
        if len(self.used) < len(bits):
            self.used.extend(bytes(len(bits) - len(self.used)))
        for index, byte in enumerate(bits):
            self.used[index] |= byte

    def find_cut(self, nodes: Collection[Node], told: list[int], row: int) -> Node | None:
        """The part of a window in whose middle a worker can have stopped, if it tells of that part and no other. What
        is left of such a part cannot be cut again."""
        for node in nodes if self.batch else ():
            start, end = self.bounds[node[0]]
            if node[1] - node[0] == 2 and told == [node[0]] and start < row < end == self.bounds[node[0] + 1][0]:
                return node
        return None

    def cut(self, node: Node, row: int, *, ended_by: int | None = None) -> tuple[Node, Node]:
        """The part that was done, and the rest. `ended_by`: with this worker the window ends there, without a rest."""
        first, second = node[0], node[0] + 1
        start, end = self.bounds[first]
        self.bounds[first], self.bounds[second] = (start, row), (row, end if ended_by is None else row)
        for number in (first, second):  # what somebody who was lost told of the whole
            self.reports.pop(number, None)
        if ended_by is not None:
            self.reports[second] = Report(worker=ended_by)
        return (first, second), (second, second + 1)

    @property
    def is_reported(self) -> bool:
        """Whether somebody has told the samples and the loss of every slice."""
        return len(self.reports) >= self.slices


class StepPlanner:
    def __init__(self, run: CoordinatorState) -> None:
        self._run = run
        self._last: tuple[list[int], list[int]] | None = None
        """The peers of the last step, and how many slices each had."""
        self._windows: WindowPlanner | None = None
        self._planned: tuple[int, ...] = ()
        """Whom the last window was planned for, in the order of their names there."""
        self._worked: tuple[int, ...] = ()
        """Who took part in the last window."""
        self._committed_at = 0.0
        self._applying_s = 0.0
        """How long the last of them needed to apply it, from the moment when it was formed."""
        self._divergence: dict[int, float] = {}
        """worker id -> what it told when it applied the last window"""
        self._drift = 0.0
        """The largest of them when they were last counted in."""
        self._more_s = 0.0
        """What the last step that all took together cost beyond computing; 0: the last one was a window."""
        is_new = run.description is None and not run.standing.version
        self._alike_at = 0 if is_new else -1
        """The step after which all workers' optimizers are known to hold the same; in a window they part. Before the
        first step they do, but not where the run was led before: it may have gone back to its beginning."""

    def part(self) -> None:
        """A worker takes part whose optimizer is not known to hold what the others' do."""
        self._alike_at = -1

    def plan(self, working: list[WorkerRecord]) -> StepPlan | None:
        """The next step. None: the run is over."""
        run, standing, policy = self._run, self._run.standing, self._run.described.windowed
        if policy is None:
            return self._plan_step(working, min(run.described.batch, run.described.rows - standing.row))
        rows_left = min(run.described.rows - standing.row, MOST_WINDOW)
        if run.rows_limit:
            rows_left = min(rows_left, run.rows_limit - standing.rows_seen)
        if rows_left <= 0:
            return None
        windows = self._planner(policy, working)
        is_first = standing.rows_seen < policy.together * run.rows_limit
        # In a window that is begun again, or was before this host was started, optimizers may have moved; and after one
        # they hold the same only where they are averaged.
        is_alike = self._alike_at == standing.version
        if standing.turn or windows.is_best_together(is_early=is_first, may=is_alike or not policy.chooses):
            return self._plan_together(working, rows_left, is_first=is_first)
        return self._plan_window(working, rows_left)

    def _planner(self, policy: Windowed, working: list[WorkerRecord]) -> WindowPlanner:
        names = unique_names(working)
        if self._windows is None:
            self._windows = make_planner(policy, names)
        self._windows.change(names)
        self._planned = tuple(m.worker_id for m in working)
        return self._windows

    def _plan_together(self, working: list[WorkerRecord], rows_left: int, *, is_first: bool) -> StepPlan:
        """Up to the end of a batch of the run, as under Sync."""
        assert self._windows is not None
        size = self._run.described.batch
        plan = self._plan_step(working, min(rows_left, size - self._run.standing.row % size))
        parts = [sum(end - start for start, end in map(plan.rows_of, nodes)) for nodes in plan.nodes]
        plan.decision = self._windows.together(parts, is_first=is_first)
        return plan

    def _plan_step(self, working: list[WorkerRecord], rows: int) -> StepPlan:
        """In as many slices as ever, to each as many as its speed allows."""
        described, standing = self._run.described, self._run.standing
        slices = min(described.slices, rows)
        if described.in_pairs and described.batch > described.slices:  # also where an epoch's last batch is short
            slices = min(slices, max(1, rows // 2))
        peers = [m.peer for m in working]
        before = self._last[1] if self._last is not None and self._last[0] == peers else None
        quotas = decide_quotas(slices, [m.speed for m in working], before)
        _give_each_plain_peer_one(working, quotas)
        shared = share_nodes(slices, quotas)
        _spare_plain_peers(working, shared)
        self._last = peers, quotas
        return StepPlan(
            step=standing.version + 1,
            epoch=standing.epoch,
            bounds=slice_rows(standing.row, rows, slices),
            nodes=shared,
            workers=tuple(m.worker_id for m in working),
        )

    def _plan_window(self, working: list[WorkerRecord], rows_left: int) -> StepPlan:
        """For each worker a slice as large as its speed allows, and an empty one for what it may leave undone."""
        described, standing = self._run.described, self._run.standing
        assert self._windows is not None
        self._alike_at = -1
        batch = self._own_batch(len(working))
        decision = self._windows.decide(rows_left, batch, least=described.batch)
        if described.in_pairs and batch > 1:
            decision = replace(decision, rows=tuple(without_singles(decision.rows)))
        nodes: list[list[Node]] = []
        sizes: list[int] = []
        for rows in decision.rows:
            nodes.append([(len(sizes), len(sizes) + 2)] if rows else [])
            sizes += [rows, 0] if rows else []
        return StepPlan(
            step=standing.version + 1,
            epoch=standing.epoch,
            bounds=sized_rows(standing.row, sizes),
            nodes=nodes,
            workers=self._planned,
            batch=batch,
            decision=decision,
        )

    def _own_batch(self, workers: int) -> int:
        """Rows of a step that a worker takes by itself."""
        return min(-(-self._run.described.batch // workers), MOST_WINDOW)

    def tell(self, decision: WindowPlan) -> Emit:
        return Emit(
            Decided(
                step=self._run.steps_done,
                rows=decision.rows,
                reason=decision.reason,
                version=self._run.standing.version,
                anchor=decision.anchor,
                divergence=self._drift,
            )
        )

    def measure(self, under: StepUnderWay) -> None:
        """Learn what the next window is planned by. How long the last took to be applied is known only now, and so
        counts here: the next is handed out before this one is applied."""
        assert under.decision is not None
        (self._measure_step if under.decision.together else self._measure_window)(under)
        if under.decision.together or self._run.described.moments:
            self._alike_at = under.step
        self._worked, self._committed_at, self._applying_s = under.workers, self._run.clock, 0.0
        self._drift = max(self._divergence.values(), default=0.0)
        self._divergence = {}

    def _measure_step(self, under: StepUnderWay) -> None:
        """A step that all took together: all that it lasted beyond the longest computing is the price of agreeing. Of
        two it is the lesser, as an evaluation may lie before one of them."""
        assert self._windows is not None
        rows = dict.fromkeys(self._planned, 0)
        for number, who in under.computed_by.items():
            rows[who] = rows.get(who, 0) + under.amount([number])
        busy = [under.busy.get(who, 0.0) for who in self._planned]
        before_s, self._more_s = self._more_s, max(0.0, self._run.clock - under.started - max(busy))
        if max(busy) > 0:
            own = self._own_batch(len(busy))
            self._windows.observe([rows[who] for who in self._planned], busy, own, min(before_s, self._more_s))

    def _measure_window(self, under: StepUnderWay) -> None:
        assert self._windows is not None
        self._more_s = 0.0
        sync_s = max(0.0, self._run.clock - under.last_report) + self._applying_s
        reports = [
            Report(
                busy_s=under.busy.get(who, 0.0) if who in under.batches else 0.0,
                batches=under.batches.get(who, 0),
                figures=under.figures.get(who, {}) | {"divergence": self._divergence.get(who, 0.0)},
            )
            for who in self._planned
        ]
        if any(report.batches for report in reports):
            self._windows.report(reports, sync_s)

    def on_applied(self, member: WorkerRecord, applied: Applied) -> None:
        """This worker has applied a step for the first time."""
        if member.worker_id in self._worked and applied.step == self._run.standing.version:
            self._applying_s = max(self._applying_s, self._run.clock - self._committed_at)
            self._divergence[member.worker_id] = applied.divergence if applied.divergence >= 0 else math.inf


def _give_each_plain_peer_one(working: list[WorkerRecord], quotas: list[int]) -> None:
    """The published worker expects rows in every step; one of ours bears a step without any."""
    for index, member in enumerate(working):
        if member.plain and not quotas[index]:
            giver = max(range(len(quotas)), key=lambda other: (not working[other].plain, quotas[other]))
            if not quotas[giver]:
                giver = max(range(len(quotas)), key=lambda other: quotas[other])
            if quotas[giver] > working[giver].plain:  # a plain peer keeps its last
                quotas[giver], quotas[index] = quotas[giver] - 1, 1


def _spare_plain_peers(working: list[WorkerRecord], shared: list[list[Node]]) -> None:
    """A plain peer sends one payload per step: of several nodes it keeps the largest, and ours take the others."""
    ours = [index for index, member in enumerate(working) if not member.plain]
    for index, member in enumerate(working):
        if member.plain and len(shared[index]) > 1:
            kept = max(shared[index], key=lambda node: node[1] - node[0])
            shared[ours[0]] += [node for node in shared[index] if node != kept]
            shared[index] = [kept]
