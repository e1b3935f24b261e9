"""HybridShard under a host: nodes of two ranks, each one worker, against plain replicas in one process."""

from pathlib import Path
from typing import Any

import pytest

from potluck.agree.policy import Async, Cadence, Windowed
from tests.fleet.fleet import Fleet
from tests.fleet.test_fleet_windows import SHORT, assert_close, judge, rows_of

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("policy", "nodes", "options"),
    [
        (Cadence(**SHORT), 1, {}),
        (Cadence(**SHORT), 2, {}),
        (Async(**SHORT), 2, {"shared": True}),
    ],
    ids=["cadence alone", "cadence", "async"],
)
def test_nodes_compute_what_plain_replicas_and_their_mean_do(
    policy: Windowed, nodes: int, options: dict[str, Any], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=nodes)
    for number in range(nodes):
        fleet.add_node(f"n{number}", policy=policy, bare=True, **options)
    weights = fleet.finish()
    # As between plain workers: sums of floats in another order, here also over a node's ranks.
    assert_close(weights, judge(fleet))
    assert all(rows_of(fleet, f"n{number}") for number in range(nodes))
    assert {row["name"] for record in fleet.records for row in record.workers} == {f"n{n}" for n in range(nodes)}
    assert fleet.server.core.refused.total() == 0
