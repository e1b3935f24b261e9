"""What the next step consists of, and who computes which part of it: from what workers told of the last ones. Pure."""

import math
from dataclasses import dataclass, field, replace

from potluck.agree.shares import without_singles
from potluck.agree.windows import Decision, Report, Windows
from potluck.events import Decided
from potluck.fleet.effects import Emit
from potluck.fleet.ledger import Range
from potluck.fleet.membership import Member, labels
from potluck.fleet.run_state import RunState
from potluck.fleet.tree import Node, decide_quotas, share_nodes, sized_rows, slice_rows
from potluck.wire.messages import Applied

MOST_WINDOW = (1 << 32) - 1
"""Rows of a window: the size of a slice is a u32."""


@dataclass
class Slice:
    samples: float
    loss_sum: float
    worker_id: int


@dataclass(frozen=True)
class Plan:
    """What a step consists of, and who computes it."""

    bounds: list[Range]
    """Of each slice."""
    nodes: list[list[Node]]
    """For each worker."""
    batch: int = 0
    """Rows of a step that a worker takes by itself; 0: it takes none."""
    decision: Decision | None = None
    """Why, where workers step by themselves: then this step is a window."""


@dataclass
class StepUnderWay:
    """Where workers step by themselves, a window: one agreement, whatever it is over."""

    step: int
    bounds: list[Range]
    """Of each slice."""
    started: float
    batch: int = 0
    decision: Decision | None = None
    workers: tuple[int, ...] = ()
    """Ids, in the order of the decision."""
    reports: dict[int, Slice] = field(default_factory=dict)
    computed_by: dict[int, int] = field(default_factory=dict)
    """slice -> worker id, once its payload is wholly in the sums."""
    orphans: list[Node] = field(default_factory=list)
    """Nodes that nobody has: there was no worker to take them."""
    bad: dict[int, str] = field(default_factory=dict)
    """slice -> who computed it badly."""
    granted: set[int] = field(default_factory=set)
    """Slices of a plain peer that is gone: the report of whoever computes them next takes the place of what was taken
    for granted. Until then that stays, so that a step never lacks a report."""
    used: bytearray = field(default_factory=bytearray)
    buffers: bytes = b""
    """What the first slice changed in buffers that have no mean, as the first who computed it told."""
    busy: dict[int, float] = field(default_factory=dict)
    """worker id -> seconds"""
    batches: dict[int, int] = field(default_factory=dict)
    """worker id -> steps that it took by itself"""
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

    @property
    def is_reported(self) -> bool:
        """Of every slice somebody has told its samples and its loss."""
        return len(self.reports) >= self.slices

    def rows_of(self, node: Node) -> Range:
        return self.bounds[node[0]][0], self.bounds[node[1] - 1][1]


class Planner:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self._last: tuple[list[int], list[int]] | None = None
        """The peers of the last step, and how many slices each had."""
        self._windows: Windows | None = None
        self._worked: tuple[int, ...] = ()
        """Who took part in the last window."""
        self._committed_at = 0.0
        self._applying_s = 0.0
        """How long the last of them needed to apply it, from the moment when it was formed."""
        self._divergence: dict[int, float] = {}
        """worker id -> what it told when it applied the last window"""
        self._drift = 0.0
        """The largest of them when they were last counted in."""

    def plan(self, working: list[Member]) -> Plan | None:
        """None: the run is over."""
        return self._plan_window(working) if self._run.described.windowed is not None else self._plan_step(working)

    def _plan_step(self, working: list[Member]) -> Plan:
        """One batch, in as many slices as ever, to each as many as its speed allows."""
        described, standing = self._run.described, self._run.standing
        rows = min(described.batch, described.rows - standing.row)
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
        return Plan(slice_rows(standing.row, rows, slices), shared)

    def _plan_window(self, working: list[Member]) -> Plan | None:
        """One slice for each worker, as large as its speed allows; none if the run is over."""
        run, described, standing = self._run, self._run.described, self._run.standing
        policy = described.windowed
        assert policy is not None
        rows_left = min(described.rows - standing.row, MOST_WINDOW)
        if run.rows_limit:
            rows_left = min(rows_left, run.rows_limit - standing.rows_seen)
        if rows_left <= 0:
            return None
        names = labels(working)
        if self._windows is None:
            self._windows = Windows(policy, names, may_be_alone=True)
        self._windows.change(names)
        batch = min(-(-described.batch // len(working)), MOST_WINDOW)
        decision = self._windows.decide(rows_left, batch, least=described.batch)
        if described.in_pairs and batch > 1:
            decision = replace(decision, rows=tuple(without_singles(decision.rows)))
        nodes: list[list[Node]] = []
        sizes: list[int] = []
        for rows in decision.rows:
            nodes.append([(len(sizes), len(sizes) + 1)] if rows else [])
            sizes += [rows] if rows else []
        return Plan(sized_rows(standing.row, sizes), nodes, batch, decision)

    def tell(self, decision: Decision) -> Emit:
        return Emit(
            Decided(
                step=self._run.steps_done,
                rows=decision.rows,
                reason=decision.reason,
                version=self._run.standing.step,
                anchor=decision.anchor,
                divergence=self._drift,
            )
        )

    def measure(self, under: StepUnderWay) -> None:
        """What the next window is planned by. How long the last took to be applied is known only now, and so counts
        here: the next is handed out before this one is applied."""
        assert self._windows is not None
        now = self._run.clock
        reports = [
            Report(
                wall_s=under.busy.get(who, 0.0) if who in under.batches else 0.0,
                batches=under.batches.get(who, 0),
                divergence=self._divergence.get(who, 0.0),
            )
            for who in under.workers
        ]
        if any(report.batches for report in reports):
            self._windows.report(reports, max(0.0, now - under.last_report) + self._applying_s)
        self._worked, self._committed_at, self._applying_s = under.workers, now, 0.0
        self._drift = max(self._divergence.values(), default=0.0)
        self._divergence = {}

    def on_applied(self, member: Member, applied: Applied) -> None:
        """For the first time, by this worker."""
        if member.worker_id in self._worked and applied.step == self._run.standing.step:
            self._applying_s = max(self._applying_s, self._run.clock - self._committed_at)
            self._divergence[member.worker_id] = applied.divergence if applied.divergence >= 0 else math.inf


def _give_each_plain_peer_one(working: list[Member], quotas: list[int]) -> None:
    """The published worker expects rows in every step; one of ours bears a step without any."""
    for index, member in enumerate(working):
        if member.plain and not quotas[index]:
            giver = max(range(len(quotas)), key=lambda other: (not working[other].plain, quotas[other]))
            if not quotas[giver]:
                giver = max(range(len(quotas)), key=lambda other: quotas[other])
            if quotas[giver] > working[giver].plain:  # a plain peer keeps its last
                quotas[giver], quotas[index] = quotas[giver] - 1, 1


def _spare_plain_peers(working: list[Member], shared: list[list[Node]]) -> None:
    """A plain peer sends one payload per step: of several nodes it keeps the largest, and ours take the others."""
    ours = [index for index, member in enumerate(working) if not member.plain]
    for index, member in enumerate(working):
        if member.plain and len(shared[index]) > 1:
            kept = max(shared[index], key=lambda node: node[1] - node[0])
            shared[ours[0]] += [node for node in shared[index] if node != kept]
            shared[index] = [kept]
