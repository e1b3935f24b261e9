"""Workers that leave in the middle of a window: what they have done of it counts, and others do the rest."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import potluck
from potluck.agree.policy import Cadence
from potluck.events import WorkerWent
from tests.fleet.faults import at
from tests.fleet.fleet import STEPS, Fleet, train, wait_until
from tests.fleet.judges import assert_close, judge
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)
LONG = Cadence.published(anchor=4, max_anchor=4)


def asked_to_leave(place: Path) -> None:
    """While it takes the first of its batches in the first window."""

    def ask(step: int, worker: Any, done: int) -> None:
        if step == 1 and done == 0:
            (place / "asked").touch()
            os.kill(os.getpid(), signal.SIGUSR1)

    at("batch", ask)


def test_what_a_leaver_has_done_of_a_window_counts_and_another_does_the_rest(tmp_path: Path) -> None:
    """As plain PyTorch computes it: each range by a replica of its own, and their mean by rows."""
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("stayer", policy=LONG, bare=True, slow_s=0.15)
    wait_until(lambda: len(fleet.server.core.membership.members) == 1)  # so the judge, too, has the rest after its own
    leaver = fleet.add("leaver", asked_to_leave, policy=LONG, bare=True)
    weights = fleet.finish()
    assert (tmp_path / "asked").exists() and leaver.process.exitcode == 0
    first = fleet.records[0]
    assert [(end - start, who) for start, end, who in first.ranges] == [(32, 0), (16, 1), (16, 0)]
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite and went.reason == "asked to stop"
    assert fleet.server.core.refused.total() == 0
    assert_close(weights, judge(fleet))


def test_the_window_of_a_worker_that_is_alone_ends_where_it_leaves(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    leaver = fleet.add("leaver", asked_to_leave, policy=LONG)
    wait_until(lambda: leaver.process.exitcode is not None)
    assert (tmp_path / "asked").exists()
    (first,) = fleet.records
    assert first.rows == 32  # of 128
    fleet.add("successor", policy=LONG)
    fleet.finish()  # from what it left behind, and each row once
    assert (fleet.records[1].step, fleet.records[1].row) == (2, 32)
    assert fleet.server.core.refused.total() == 0


@pytest.mark.slow
def test_a_node_leaves_in_the_middle_of_a_window_as_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("stayer", policy=LONG, slow_s=0.15)
    fleet.add_node("leaver", 2, {0: asked_to_leave}, policy=LONG)
    fleet.finish()
    assert (tmp_path / "asked").exists()
    assert sorted(end - start for start, end, _ in fleet.records[0].ranges) == [16, 16, 32]
    assert fleet.server.core.refused.total() == 0
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite


def tells_its_rank(place: Path, fleet: Any) -> Any:
    """A loop that writes down after each step which worker it is, of how many."""

    def on_step(engine: Any) -> None:
        process = f"{os.environ['POTLUCK_NAME']}.{os.environ.get('RANK', 0)}"
        with (place / f"{process}.ranks").open("a") as file:
            file.write(f"{json.dumps([engine.step_number, engine.rank, engine.world])}\n")

    return train(fleet, on_step=on_step)


def test_ranks_are_those_of_a_world_while_workers_leave_and_join(tmp_path: Path) -> None:
    """In every step each worker has a rank of its own below the world's size, and one of them is 0."""
    fleet = Fleet(tmp_path, at_least=2)
    first = fleet.add("first", job=partial(tells_its_rank, tmp_path), hold_at=3)
    wait_until(lambda: len(fleet.server.core.membership.members) == 1)  # so that it leads
    fleet.add("second", job=partial(tells_its_rank, tmp_path), hold_at=3)
    fleet.wait_for_step(3)
    fleet.add("third", job=partial(tells_its_rank, tmp_path), hold_at=9, hold_for="then")
    fleet.let_in("third")
    wait_until(lambda: len(told_ranks(tmp_path).get(8, {})) == 3)
    first.send(signal.SIGUSR1)
    (tmp_path / "then").touch()
    fleet.finish()
    told = told_ranks(tmp_path)
    for step, found in told.items():
        worlds = {world for _, world in found.values()}
        ranks = [rank for rank, _ in found.values()]
        assert len(worlds) == 1 and len(set(ranks)) == len(ranks), (step, found)
        assert all(0 <= rank < world for rank, world in found.values()) and 0 in ranks, (step, found)
    assert set(told[8].values()) == {(0, 3), (1, 3), (2, 3)} and told[8]["first.0"] == (0, 3)
    assert told[STEPS] == {"second.0": (0, 2), "third.0": (1, 2)}


def test_each_rank_of_nodes_has_a_rank_of_its_own_in_the_world(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("a", "b"):
        fleet.add_node(name, 2, job=partial(tells_its_rank, tmp_path), policy=LONG)
    fleet.finish()
    last = told_ranks(tmp_path)[STEPS]
    assert {world for _, world in last.values()} == {4}
    assert sorted(rank for rank, _ in last.values()) == [0, 1, 2, 3], last


@pytest.mark.parametrize("strategy", first_of([potluck.FullShard(), potluck.ShardGradOp()]), ids=str)
def test_in_every_step_ranks_of_nodes_are_below_the_world_whichever_nodes_there_are(
    strategy: Any, tmp_path: Path
) -> None:
    """As `potluck join --ranks 2` starts them: two nodes step together, then a third comes, and one leaves."""
    fleet = Fleet(tmp_path, at_least=2)
    options: dict[str, Any] = {"job": partial(tells_its_rank, tmp_path), "strategy": strategy, "hold_at": 3}
    first = fleet.add_node("first", **options)
    wait_until(lambda: len(fleet.server.core.membership.members) == 1)  # so that it leads
    fleet.add_node("second", **options)
    fleet.wait_for_step(3)
    fleet.add_node("third", **options | {"hold_at": 9, "hold_for": "then"})
    fleet.let_in("third")
    wait_until(lambda: len(told_ranks(tmp_path).get(8, {})) == 6)
    first[1].send(signal.SIGUSR1)
    (tmp_path / "then").touch()
    fleet.finish()
    told = told_ranks(tmp_path)
    for step, found in told.items():
        assert all(0 <= rank < world for rank, world in found.values()), (step, found)
        assert len({rank for rank, _ in found.values()}) == len(found), (step, found)
    assert {len(found) for found in told.values()} == {4, 6}
    assert sorted(told[2].values()) == [(rank, 4) for rank in range(4)] and told[2]["first.0"] == (0, 4)
    assert sorted(told[8].values()) == [(rank, 6) for rank in range(6)]
    assert sorted(told[STEPS].values()) == [(rank, 4) for rank in range(4)]


def told_ranks(place: Path) -> dict[int, dict[str, tuple[int, int]]]:
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for path in place.glob("*.ranks"):
        for line in path.read_text().splitlines():
            step, rank, world = json.loads(line)
            found.setdefault(step, {})[path.stem] = rank, world
    return found
