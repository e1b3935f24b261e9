"""Workers that leave in the middle of a window: what they have done of it counts, and others do the rest."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

import potluck
from potluck.agree.policy import Cadence
from potluck.events import WorkerWent
from tests.fleet.faults import at
from tests.fleet.fleet import BATCH, EPOCHS, STEPS, Fleet, build, train, wait_until
from tests.fleet.judges import assert_close, judge
from tests.fleet.kinds import Kind, Size
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
    wait_until(lambda: bool(fleet.records))  # its last words are read when it may have ended
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


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    first_of([(1, potluck.NoShard()), (2, potluck.FullShard()), (2, potluck.ShardGradOp())]),
    ids=["workers", "FullShard", "ShardGradOp"],
)
def test_ranks_are_those_of_a_world_while_workers_leave_and_join(ranks: int, strategy: Any, tmp_path: Path) -> None:
    """Two step together, as `potluck join --ranks 2` starts them; then a third comes, and one leaves. In every step
    each rank has a number of its own below the world's size, and one of them is 0."""
    kind = Kind(sizes=(Size(ranks, strategy),), options={"job": partial(tells_its_rank, tmp_path)})
    fleet = Fleet(tmp_path, at_least=2)
    first = kind.join(fleet, "first", hold_at=3)
    wait_until(lambda: len(fleet.server.core.membership.members) == 1)  # so that it leads
    kind.join(fleet, "second", hold_at=3)
    fleet.wait_for_step(3)
    kind.join(fleet, "third", hold_at=9, hold_for="then")
    fleet.let_in("third")
    wait_until(lambda: len(told_ranks(tmp_path).get(8, {})) == 3 * ranks)
    first[-1].send(signal.SIGUSR1)
    (tmp_path / "then").touch()
    fleet.finish()
    told = told_ranks(tmp_path)
    for step, found in told.items():
        assert len({world for _, world in found.values()}) == 1, (step, found)
        numbers = [number for number, _ in found.values()]
        assert len(set(numbers)) == len(numbers) and 0 in numbers, (step, found)
        assert all(0 <= number < world for number, world in found.values()), (step, found)
    assert {len(found) for found in told.values()} == {2 * ranks, 3 * ranks}
    for step, workers, leader in ((2, 2, "first"), (8, 3, "first"), (STEPS, 2, "second")):
        world = workers * ranks
        assert sorted(told[step].values()) == [(number, world) for number in range(world)]
        assert told[step][f"{leader}.0"] == (0, world)


def test_each_rank_of_nodes_has_a_rank_of_its_own_in_the_world(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("a", "b"):
        fleet.add_node(name, 2, job=partial(tells_its_rank, tmp_path), policy=LONG)
    fleet.finish()
    last = told_ranks(tmp_path)[STEPS]
    assert {world for _, world in last.values()} == {4}
    assert sorted(rank for rank, _ in last.values()) == [0, 1, 2, 3], last


def builds_late(place: Path) -> None:
    at("joined", lambda step, **what: wait_until((place / "go").exists))


def tells_whether_it_is_main(place: Path, fleet: Any) -> Any:
    """Once before its first step, and after each."""
    model, optimizer, data = build()
    model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    for _ in fleet.epochs(EPOCHS):
        with (place / os.environ["POTLUCK_NAME"]).open("a") as file:
            print(fleet.is_main, file=file)
        for x, y in loader:
            fleet.backward(F.cross_entropy(model(x), y), samples=len(x))
            fleet.step()
    return model


def test_of_those_who_come_before_the_first_step_one_is_main_from_its_first_epoch_on(tmp_path: Path) -> None:
    """The first who has built its model, also where another connected before it."""
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add("late", builds_late, job=partial(tells_whether_it_is_main, tmp_path))
    wait_until(lambda: len(fleet.server.core.membership.members) == 1)
    fleet.add("first", job=partial(tells_whether_it_is_main, tmp_path))
    fleet.let_in("first")
    fleet.finish()
    for name, told in (("first", "True\n"), ("late", "False\n")):
        assert (tmp_path / name).read_text() == told * EPOCHS


def told_ranks(place: Path) -> dict[int, dict[str, tuple[int, int]]]:
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for path in place.glob("*.ranks"):
        for line in path.read_text().splitlines():
            step, rank, world = json.loads(line)
            found.setdefault(step, {})[path.stem] = rank, world
    return found
