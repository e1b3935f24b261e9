"""Plans the next step, and who computes which part of it, from what workers told of the last ones. Pure."""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from potluck.agree.decider import Decider
from potluck.agree.records import Range, Report
from potluck.agree.shares import without_singles
from potluck.agree.windows import WindowPlan
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.membership import WorkerRecord, unique_names
from potluck.fleet.tree import Node, decide_quotas, share_nodes, sized_rows, slice_rows
from potluck.wire.messages import Applied, Work

MOST_WINDOW = (1 << 32) - 1
"""Rows of a window: the size of a slice is a u32."""


@dataclass(kw_only=True)
class StepUnderWay:
    """One agreement: a step of all, or a window, in which workers step by themselves. How it is planned, who computes
    it, and what came back so far."""

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
    by_worker: dict[int, Report] = field(default_factory=dict)
    """worker id -> its seconds; and of a window the steps that it took by itself or skipped, and its figures."""
    first_report: float | None = None
    last_report: float = 0.0
    loss: float = math.nan
    samples: float = 0.0

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

    def report_of(self, worker_id: int) -> Report:
        return self.by_worker.get(worker_id, Report())

    @property
    def is_reported(self) -> bool:
        """Whether somebody has told the samples and the loss of every slice."""
        return len(self.reports) >= self.slices


class StepPlanner:
    def __init__(self, run: CoordinatorState) -> None:
        self._run = run
        self._last: tuple[list[int], list[int]] | None = None
        """The peers of the last step, and how many slices each had."""
        self._drifts: dict[int, float] = {}
        """For each worker that took part in the last agreement: how far it was from the mean, once it has told."""
        self._committed_at = 0.0
        self._applying_s = 0.0
        """How long the last of them needed to apply it, from the moment when it was formed."""
        self._more_s = 0.0
        """What the last step that all took together cost beyond computing; 0: the last one was a window."""
        is_new = run.description is None and not run.standing.version
        # Before the first step all optimizers hold the same, but not where the run was led before: it may have gone
        # back to its beginning, and in a window that is begun again they may have moved.
        self.decider = Decider(alike_at=0 if is_new else -1)

    def plan(self, working: list[WorkerRecord]) -> StepUnderWay:
        """The next step, or window."""
        run, standing, described = self._run, self._run.standing, self._run.described
        if (policy := described.windowed) is None:
            return self._plan_step(working, min(described.batch, described.rows - standing.row))
        rows = self.decider.begin(
            policy,
            unique_names(working),
            standing,
            described.terms,
            [(standing.row, min(described.rows, standing.row + MOST_WINDOW))],
            rows_limit=run.rows_limit,
        )
        if not rows:
            return self._plan_window(working)
        under = self._plan_step(working, rows)
        parts = [sum(end - start for start, end in map(under.rows_of, nodes)) for nodes in under.nodes]
        under.decision = self.decider.together(rows, parts, [m.speed or 0.0 for m in working])
        return under

    def _plan_step(self, working: list[WorkerRecord], rows: int) -> StepUnderWay:
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
        return self._under_way(working, slice_rows(standing.row, rows, slices), shared)

    def _plan_window(self, working: list[WorkerRecord]) -> StepUnderWay:
        """For each worker a slice as large as its speed allows, and an empty one for what it may leave undone."""
        described, batch = self._run.described, min(self.decider.own_rows, MOST_WINDOW)
        decision = self.decider.alone(least=described.batch)
        if described.in_pairs and batch > 1:
            decision = replace(decision, rows=tuple(without_singles(decision.rows)))
        nodes: list[list[Node]] = []
        sizes: list[int] = []
        for rows in decision.rows:
            nodes.append([(len(sizes), len(sizes) + 2)] if rows else [])
            sizes += [rows, 0] if rows else []
        under = self._under_way(working, sized_rows(self._run.standing.row, sizes), nodes)
        under.batch, under.decision = batch, decision
        return under

    def _under_way(self, working: list[WorkerRecord], bounds: list[Range], nodes: list[list[Node]]) -> StepUnderWay:
        standing, workers = self._run.standing, tuple(m.worker_id for m in working)
        return StepUnderWay(
            step=standing.version + 1,
            epoch=standing.epoch,
            bounds=bounds,
            nodes=nodes,
            workers=workers,
            started=self._run.clock,
        )

    def measure(self, under: StepUnderWay) -> None:
        """Learn what the next window is planned by. How long the last took to be applied is known only now, and so
        counts here: the next is handed out before this one is applied."""
        rows = Counter[int]()
        for number, who in under.computed_by.items():
            rows[who] += under.amount([number])
        reports = []
        for who in under.workers:
            report, drift = under.report_of(who), {"divergence": self._drifts.get(who, 0.0)}
            reports.append(report._replace(rows=rows[who], figures={**report.figures, **drift}))
        cost_s = self._cost_s(under, max(report.busy_s for report in reports))
        self.decider.observe(reports, cost_s, averages_moments=bool(self._run.described.moments))
        self._drifts = dict.fromkeys(under.workers, 0.0)
        self._committed_at, self._applying_s = self._run.clock, 0.0

    def _cost_s(self, under: StepUnderWay, longest_s: float) -> float:
        """Return what agreeing cost. In a step that all took together, that is what it lasted beyond the longest
        computing; of two such steps it is the lesser, as an evaluation may lie before one of them."""
        before_s, self._more_s = self._more_s, 0.0
        if under.batch:
            return max(0.0, self._run.clock - under.last_report) + self._applying_s
        self._more_s = max(0.0, self._run.clock - under.started - longest_s)
        return min(before_s, self._more_s)

    def on_applied(self, member: WorkerRecord, applied: Applied) -> None:
        """This worker has applied a step for the first time."""
        if member.worker_id in self._drifts and applied.step == self._run.standing.version:
            self._applying_s = max(self._applying_s, self._run.clock - self._committed_at)
            self._drifts[member.worker_id] = applied.divergence if applied.divergence >= 0 else math.inf


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
