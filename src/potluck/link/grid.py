"""Grid: who holds which stage, of which replica, for whose rows; and what each of them reports, as one. Knows no model.

A replica is cut over `workers` places, and each place may be held by several ranks that split it. Of 2 replicas of 3
stages, each split over 2 ranks, rank 0 and 1 are stage 0 of the first, 2 and 3 stage 1, and so on. Ranks of one number
within their places compute the same rows: they are a *pipeline*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from potluck.agree.records import Report
from potluck.events import WorkerStep
from potluck.link.link import Alone, Link

Row = TypeVar("Row", bound=NamedTuple)

LONGEST = {"busy_s", "sync_s", "wants_stop"}
"""Figures of which the largest counts: times, and whether anybody wants to stop."""


@dataclass(frozen=True, slots=True)
class Grid:
    link: Link
    workers: int
    """The places of each replica."""
    each: int
    """Ranks that hold one place together."""
    stage_group: Link
    """The ranks of our pipeline, in the order of their stages."""
    replica_group: Link
    """All who hold the same stages as we do, of any replica."""
    shards: Link
    """Link of the ranks that hold the same stages of our replica as we do: each some part."""
    is_cut: bool = True

    @property
    def size(self) -> int:
        """Ranks of a replica."""
        return self.workers * self.each

    @property
    def pipelines(self) -> int:
        return self.link.world // self.workers

    def pipeline_of(self, rank: int) -> int:
        return rank // self.size * self.each + rank % self.each

    def place_of(self, rank: int) -> int:
        return rank // self.each % self.workers

    @property
    def pipeline(self) -> int:
        return self.pipeline_of(self.link.rank)

    @property
    def place(self) -> int:
        return self.place_of(self.link.rank)

    @property
    def is_last(self) -> bool:
        return self.place == self.workers - 1

    def name_of(self, rank: int) -> str:
        """The stage that a rank holds, and of which pipeline; nothing where models are not cut."""
        pipeline = f" of {self.pipeline_of(rank)}" if self.pipelines > 1 else ""
        return f"stage {self.place_of(rank)}{pipeline}" if self.is_cut else ""

    def merge(self, rows: Sequence[Row], per: Literal["pipeline", "replica"]) -> list[Row]:
        """One report for each pipeline or replica, from those of the ranks of one replica or of all, in order.

        The last stage's figures are the pipeline's, and those of any rank the replica's where each tells the sum; but
        the longest time counts, and a wish to stop of any.
        """
        groups: dict[int, list[Row]] = {}
        for rank, row in enumerate(rows):
            groups.setdefault(self.pipeline_of(rank) if per == "pipeline" else rank // self.size, []).append(row)
        return [groups[number][-1]._replace(**_longest(groups[number])) for number in sorted(groups)]

    def own(self, rows: Sequence[Row]) -> Row:
        """Our pipeline's report, from those of the ranks of our replica or of all."""
        return self.merge(rows, "pipeline")[self.pipeline_of(self.link.rank % len(rows))]

    def worker_steps(self, reports: Sequence[Report], took_s: float) -> tuple[WorkerStep, ...]:
        """Report what each rank did of a step that all began together and finished after `took_s`."""
        pipelines = self.merge(reports, "pipeline")
        return tuple(
            WorkerStep(
                rank=rank,
                rows=int(pipelines[self.pipeline_of(rank)].rows),
                samples=pipelines[self.pipeline_of(rank)].samples,
                busy_s=report.busy_s,
                wait_s=max(0.0, took_s - report.busy_s - report.send_s),
                name=self.name_of(rank),
                send_s=report.send_s,
            )
            for rank, report in enumerate(reports)
        )


def _longest(rows: Sequence[Row]) -> dict[str, Any]:
    return {name: max(getattr(row, name) for row in rows) for name in LONGEST.intersection(rows[0]._fields)}


def whole_grid(link: Link, each: int) -> Grid:
    """Models are not cut: each rank has rows of its own. `each`: ranks that hold one replica together."""
    return Grid(link, 1, each, Alone(), link, Alone(), is_cut=False)


def make_grid(link: Link, workers: int, each: int) -> Grid:
    """Every rank of the link calls this alike. `workers`: places of each replica; `each`: ranks of each place."""
    alone = Grid(link, workers, each, Alone(), Alone(), Alone())
    if link.world == 1:
        return alone
    ranks = range(link.world)
    stage_groups = [[rank for rank in ranks if alone.pipeline_of(rank) == n] for n in range(alone.pipelines)]
    replica_groups = [[rank for rank in ranks if alone.place_of(rank) == place] for place in range(workers)]
    shards = link.part([ranks[first : first + each] for first in ranks[::each]]) if each > 1 else Alone()
    return Grid(link, workers, each, link.part(stage_groups), link.part(replica_groups), shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    link: Link
    """All ranks of all nodes."""
    size: int
    """Ranks of each node."""
    within: Link
    """The ranks of our node."""
    across: Link
    """One rank of each node: those who hold the same part of a replica as we do."""

    @property
    def count(self) -> int:
        return self.link.world // self.size

    @property
    def number(self) -> int:
        """Number of our node."""
        return self.link.rank // self.size

    @property
    def names(self) -> list[str]:
        return [f"node {number}" if self.size > 1 else f"worker {number}" for number in range(self.count)]


def make_nodes(link: Link, size: int) -> Nodes:
    """Every rank of the link calls this alike."""
    if size == 1:
        return Nodes(link=link, size=1, within=Alone(), across=link)
    ranks = range(link.world)
    return Nodes(
        link=link,
        size=size,
        within=link.part([ranks[first : first + size] for first in ranks[::size]]),
        across=link.part([ranks[place::size] for place in ranks[:size]]),
    )
