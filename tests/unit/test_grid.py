"""Grid: who holds which stage, and what their reports are as one."""

import pytest

from potluck.agree.records import Report
from potluck.link.grid import Grid, whole_grid
from potluck.link.link import Alone


class Of(Alone):
    """A link of which nothing is asked but who we are."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world  # type: ignore[misc]


def reports(*samples: float) -> list[Report]:
    return [
        Report(samples=each, loss_sum=each, rows=each, busy_s=10.0 - rank, has_unused=0.0, wants_stop=float(rank == 1))
        for rank, each in enumerate(samples)
    ]


def test_a_pipeline_reports_what_its_last_stage_tells_and_the_time_of_its_busiest() -> None:
    # Two replicas of two stages, each held by two ranks: ranks 0 and 2 are one pipeline, 1 and 3 the next.
    grid = Grid(Of(5, 8), 2, 2, Alone(), Alone(), Alone())
    found = grid.merge(reports(0, 0, 3, 4, 0, 0, 5, 6), "pipeline")
    assert [(each.samples, each.busy_s, each.wants_stop) for each in found] == [
        (3, 10, 0),
        (4, 9, 1),
        (5, 6, 0),
        (6, 5, 0),
    ]
    assert grid.own(reports(0, 0, 3, 4, 0, 0, 5, 6)).samples == 6
    assert grid.own(reports(0, 0, 5, 6)).samples == 6, "from those of our replica alone"
    assert [step.samples for step in grid.worker_steps(reports(0, 0, 3, 4, 0, 0, 5, 6), 12.0)] == [
        3,
        4,
        3,
        4,
        5,
        6,
        5,
        6,
    ]
    assert [grid.name_of(rank) for rank in (0, 3, 6)] == ["stage 0 of 0", "stage 1 of 1", "stage 1 of 2"]


@pytest.mark.parametrize("per", ["pipeline", "replica"])
def test_of_whole_models_on_one_rank_each_report_stands_for_itself(per: str) -> None:
    grid = whole_grid(Of(2, 3), each=1)
    told = reports(1, 2, 3)
    assert grid.merge(told, per) == told  # type: ignore[arg-type]
    assert grid.own(told).samples == 3 and grid.name_of(2) == ""


def test_a_node_reports_once_and_any_of_its_ranks_may_want_to_stop() -> None:
    grid = whole_grid(Of(3, 4), each=2)
    found = grid.merge(reports(7, 7, 8, 8), "replica")
    assert [(each.samples, each.busy_s, each.wants_stop) for each in found] == [(7, 10, 1), (8, 8, 0)]
    assert [each.samples for each in grid.merge(reports(1, 2, 3, 4), "pipeline")] == [1, 2, 3, 4], (
        "each has rows of its own"
    )
    assert grid.own(reports(3, 4)).samples == 4
