"""Overlap under a host, with real workers: each continues while a mean is formed, and all agree on the same weights."""

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from potluck.agree.policy import Async, Cadence, Windowed
from potluck.data.rows import mix
from potluck.events import CheckpointSaved, Stalled, Validated, WorkerCame, WorkerWent
from potluck.fleet.server import UNREAD
from potluck.save.checkpoint import CheckpointConfig
from potluck.sharding.strategy import FullShard, HybridShard, ShardGradOp, ShardingStrategy
from tests.fleet.faults import at
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, STEPS, Fleet, build, die
from tests.fleet.test_fleet_windows import (
    assert_close,
    check_ledger,
    rows_of,
    save_and_look_at_every_batch,
)
from tests.fleet.test_fleet_windows import judge as judge_that_waits
from tests.odd import assert_constant
from tests.quick import first_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
SHORT: dict[str, Any] = {"anchor": 1, "max_anchor": 2, "overlap": True}
CADENCE = Cadence.published(**SHORT)
BY_RANKS = pytest.mark.parametrize("ranks", first_of([1, 2]))


def judge(fleet: Fleet) -> dict[str, torch.Tensor]:
    """One process and no Potluck: replicas that never wait. Each continues from its own end, and takes the mean of a
    window as a correction at the end of its next one; at an epoch's end all take it."""
    torch.set_num_threads(1)
    model, _, (x, y) = build(bare=True)
    agreed = [parameter.detach().clone() for parameter in model.parameters()]
    own: dict[int, list[torch.Tensor]] = {}
    optimizers: dict[int, Any] = {}
    for record in fleet.records:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, record.epoch)))
        size = -(-BATCH // len(record.workers))
        mean = [torch.zeros_like(parameter) for parameter in agreed]
        merged = {row["rank"]: agreed for row in record.workers}  # of those who had no rows
        for start, end, worker in record.ranges:
            began = own[worker] if record.row else agreed
            replica = build(bare=True)[0]
            with torch.no_grad():
                for parameter, value in zip(replica.parameters(), began, strict=True):
                    parameter.copy_(value)
            adamw = torch.optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.1)
            if worker in optimizers:
                adamw.load_state_dict(optimizers[worker])
            for rows in torch.tensor_split(order[start:end], -(-(end - start) // size)):
                adamw.zero_grad()
                F.cross_entropy(replica(x[rows]), y[rows]).backward()
                adamw.step()
            optimizers[worker] = adamw.state_dict()
            changed = [after.detach() - before for after, before in zip(replica.parameters(), began, strict=True)]
            merged[worker] = [value + change for value, change in zip(agreed, changed, strict=True)]
            for total, change in zip(mean, changed, strict=True):
                total += change * ((end - start) / record.rows)
        own, agreed = merged, [value + change for value, change in zip(agreed, mean, strict=True)]
    assert sum(record.rows for record in fleet.records) == EPOCHS * ROWS
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), agreed, strict=True):
            parameter.copy_(value)
    return model.state_dict()


def add(fleet: Fleet, name: str, ranks: int, fault: Any = None, **options: Any) -> None:
    """A worker of one rank, or of several."""
    if ranks == 1:
        fleet.add(name, fault, **options)
    else:
        fleet.add_node(name, ranks, dict.fromkeys(range(ranks), fault), **{"strategy": FullShard()} | options)


def takes(place: Path, seconds: float) -> None:
    """Of each batch; and it says whether it was ahead."""
    at("batch", lambda step, **what: time.sleep(seconds))
    at("ahead", lambda step, **what: (place / f"ahead-{seconds}").touch())


@pytest.mark.parametrize(
    ("policy", "seconds", "options"),
    [
        (Cadence.published(**SHORT), (0.0,), {}),
        (Cadence.published(**SHORT), (0.005, 0.02), {}),
        (Async.published(**SHORT), (0.002, 0.01, 0.01), {"shared": True}),
    ],
    ids=["1", "2", "3"],
)
def test_windows_are_what_replicas_compute_that_continue_from_their_own_end(
    policy: Windowed, seconds: tuple[float, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=len(seconds))
    for number, each in enumerate(seconds):
        fleet.add(f"w{number}", partial(takes, seconds=each), policy=policy, bare=True, **options)
    weights = fleet.finish()  # the same on all of them, and each row used once
    assert all((tmp_path / f"ahead-{each}").exists() for each in seconds)
    assert_close(weights, judge(fleet))
    if len(seconds) > 1:
        with pytest.raises(AssertionError):  # nor is it what replicas compute that wait for each mean
            assert_close(weights, judge_that_waits(fleet))
    assert len(fleet.records) > 2 * EPOCHS
    assert all(rows_of(fleet, f"w{number}") for number in range(len(seconds)))
    assert fleet.server.core.refused.total() == 0


@BY_RANKS
def test_buffers_dropout_and_unused_parameters_agree_too(ranks: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        add(fleet, f"w{number}", ranks, policy=CADENCE)
    weights = fleet.finish()
    assert_constant(weights, "odd.")
    firsts = [(record, min(record.ranges)) for record in fleet.records]  # what has no mean is theirs
    sizes = [(end - start, -(-BATCH // len(record.workers))) for record, (start, end, _) in firsts]
    assert weights["norm.num_batches_tracked"] == sum(-(-rows // size) for rows, size in sizes)
    assert not torch.equal(weights["norm.running_mean"], torch.zeros(24))


@BY_RANKS
def test_trainer_looks_at_and_saves_what_was_agreed_on(ranks: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    settings: dict[str, Any] = {"epochs": 2, "validate_every": 2, "checkpoint": CheckpointConfig(every=2)}
    for number in range(2):
        add(fleet, f"w{number}", ranks, policy=CADENCE, fit=settings)
    fleet.finish()
    assert sum(isinstance(event, Validated) for event in fleet.events) > 2
    assert sum(isinstance(event, CheckpointSaved) for event in fleet.events) > 2
    assert fleet.server.core.refused.total() == 0


@BY_RANKS
def test_saving_and_looking_within_a_window_see_what_was_agreed_on(ranks: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    policy = Cadence.published(anchor=2, max_anchor=2, overlap=True)
    add(fleet, "only", ranks, save_and_look_at_every_batch, policy=policy, bare=True)
    assert_close(fleet.finish(), judge(fleet))
    assert len({event.loss for event in fleet.events if isinstance(event, Validated)}) == 3  # one for each version


# Workers of several ranks

STRATEGIES: dict[str, ShardingStrategy] = {
    "FullShard": FullShard(),
    "ShardGradOp": ShardGradOp(),
    "FullShard, uneven": FullShard(weights=(1.0, 3.0)),
    "HybridShard": HybridShard(intra_node_size=2),
}


@pytest.mark.parametrize("strategy", first_of(STRATEGIES, 2))
def test_a_worker_of_two_ranks_and_one_of_one_rank_are_ahead_together(strategy: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    policy = Async.published(**SHORT) if strategy == "HybridShard" else CADENCE
    options: dict[str, Any] = {"policy": policy, "bare": True, "shared": strategy == "ShardGradOp"}
    add(fleet, "two", 2, partial(takes, seconds=0.01), strategy=STRATEGIES[strategy], **options)
    fleet.add("one", partial(takes, seconds=0.02), **options)
    weights = fleet.finish()  # the same bits on both
    assert (tmp_path / "ahead-0.01").exists() and (tmp_path / "ahead-0.02").exists()
    assert_close(weights, judge(fleet))
    with pytest.raises(AssertionError):
        assert_close(weights, judge_that_waits(fleet))
    assert all(any(rows_of(fleet, name)) for name in ("two", "one"))
    assert fleet.server.core.refused.total() == 0


def is_long_ahead(place: Path) -> None:
    """For longer than a host waits for one that reads nothing."""

    def wait(step: int, **what: Any) -> None:
        if step == 3:
            (place / "long").touch()
            time.sleep(1.0 * (UNREAD + 2))

    at("ahead", wait)


@pytest.mark.slow
def test_a_worker_whose_ranks_are_ahead_for_long_is_not_one_that_reads_nothing(tmp_path: Path) -> None:
    """Of shared memory the host sees whether each average is taken, however small it is. Others do the late one's part
    meanwhile, so the means of several windows are kept."""
    fleet = Fleet(tmp_path, at_least=2, patience_s=1.0)
    options: dict[str, Any] = {"policy": CADENCE, "bare": True, "shared": True}
    add(fleet, "two", 2, is_long_ahead, **options)
    fleet.add("one", partial(takes, seconds=0.1), **options)
    fleet.finish()  # the same bits on both
    assert (tmp_path / "long").exists() and (tmp_path / "two.pt").exists()
    assert all(event.polite for event in fleet.events if isinstance(event, WorkerWent))


def flips_what_was_agreed_on(place: Path) -> None:
    """In the memory of a rank that is ahead."""

    def flip(step: int, worker: Any, **what: Any) -> None:
        if step == 3:
            (place / "flipped").touch()
            worker.work._delta._flats[0].agreed[0] += 1.0

    at("ahead", flip)


def test_a_flip_in_what_ranks_that_are_ahead_agreed_on_is_named_and_mended(tmp_path: Path) -> None:
    """Before they agree on the next: of two workers whose weights differ then, nobody knows who is right."""
    fleet = Fleet(tmp_path, at_least=2)
    options: dict[str, Any] = {"policy": CADENCE, "strategy": FullShard(), "slow_s": 0.1}
    fleet.add_node("two", faults={1: flips_what_was_agreed_on}, **options)
    fleet.add("one", partial(takes, seconds=0.1), **options)
    fleet.finish()
    assert (tmp_path / "flipped").exists()
    assert [event.name for event in fleet.events if isinstance(event, Stalled)] == ["two"]


# Coming and going


def dies_in_a_window(place: Path) -> None:
    """In the second window, which the other has long done: that one is in the third."""

    def fatal(step: int, **what: Any) -> None:
        if step == 2:
            time.sleep(1.0)
            die(place, "window")

    at("batch", fatal)


def dies_ahead(place: Path) -> None:
    """It has done its part of the third window, and the second is not over."""

    def fatal(step: int, **what: Any) -> None:
        if step == 3:
            die(place, "ahead")

    at("ahead", fatal)


@pytest.mark.parametrize("rank", first_of([1, 0]))
def test_a_rank_that_is_killed_ahead_ends_its_worker_alone_which_joins_again(rank: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    options: dict[str, Any] = {"policy": CADENCE, "strategy": FullShard(), "slow_s": 0.1}
    ranks = fleet.add_node("victim", faults={rank: dies_ahead}, may_lose=True, **options)
    fleet.add("survivor", partial(takes, seconds=0.1), hold_at=5, **options)
    for each in ranks:
        each.process.join(30)
    assert (tmp_path / "fired-ahead").exists() and ranks[rank].process.exitcode == -signal.SIGKILL
    fleet.add_node("again", **options)
    fleet.let_in("again")
    fleet.finish()  # the same bits on both
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "victim"]
    assert not went.polite and (tmp_path / "again.pt").exists()
    assert len({worker for _, _, worker in fleet.records[2].ranges}) == 1 < len(fleet.records[2].ranges)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("what", "fault"), [("window", dies_in_a_window), ("ahead", dies_ahead)])
def test_a_worker_that_is_killed_loses_nothing(what: str, fault: Any, count: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=count)
    victim = fleet.add("victim", fault, policy=CADENCE)
    for number in range(count - 1):
        fleet.add(f"survivor{number}", partial(takes, seconds=0.02), policy=CADENCE)
    fleet.finish()
    assert (tmp_path / f"fired-{what}").exists() and victim.process.exitcode == -signal.SIGKILL
    assert (tmp_path / "ahead-0.02").exists()
    lost = fleet.records[1 if what == "window" else 2]
    assert len(lost.ranges) == count and len({worker for _, _, worker in lost.ranges}) == count - 1
    assert fleet.server.core.refused.total() == 0


@BY_RANKS
def test_a_worker_that_joins_in_mid_run_takes_part(ranks: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    epochs = 6
    longer = {"policy": CADENCE, "slow_s": 0.15, "epochs": epochs, "steps": epochs * STEPS // EPOCHS}
    add(fleet, "first", ranks, hold_at=3, **longer)
    fleet.wait_for_step(2)
    add(fleet, "newcomer", ranks, **longer)
    fleet.let_in("newcomer")
    fleet.finish(epochs=epochs)
    (came,) = [e for e in fleet.events if isinstance(e, WorkerCame) and e.name == "newcomer"]
    assert came.step >= 2 and any(rows_of(fleet, "newcomer"))


@BY_RANKS
def test_a_polite_leaver_computes_nothing_in_vain(ranks: int, tmp_path: Path) -> None:
    """It leaves when any of its ranks wishes."""
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("leaver", "stayer"):
        add(fleet, name, ranks, policy=CADENCE, slow_s=0.05, save_every=2)
    fleet.wait_for_step(2)
    fleet.workers[ranks - 1].send(signal.SIGUSR1)
    fleet.finish()
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite and fleet.server.core.refused.total() == 0


@BY_RANKS
def test_a_run_that_is_stopped_continues_from_what_was_agreed_on(ranks: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        add(fleet, f"w{number}", ranks, policy=CADENCE, slow_s=0.05)
    fleet.wait_for_step(3)
    fleet.server.request_stop()
    finished = fleet.server.wait(30)
    assert finished is not None and finished.reason == "interrupted"
    stood = fleet.server.core.standing.step
    fleet.close()
    for met in tmp_path.glob("*.rendezvous"):
        met.unlink()
    again = Fleet(tmp_path, at_least=2)
    assert again.server.core.standing.step == stood
    for number in range(2):
        add(again, f"w{number}", ranks, policy=CADENCE)
    again.finish()
    assert again.records[0].step == stood + 1
    check_ledger(tmp_path)
