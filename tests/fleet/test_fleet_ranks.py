"""Workers of several ranks under a host, which take each step together: against plain PyTorch, and each other."""

import itertools
import signal
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import potluck
from potluck.agree.policy import Async, Cadence
from potluck.engine.replica import StepConfig
from potluck.events import CheckpointSaved, Validated, WorkerCame, WorkerWent
from potluck.save.checkpoint import CheckpointConfig
from potluck.sharding.strategy import FullShard, HybridShard, ShardGradOp, ShardingStrategy
from tests.fleet.faults import at
from tests.fleet.fleet import BATCH, EPOCHS, STEPS, Fleet, assert_same, build, die, finish_of_one_and_two
from tests.fleet.judges import assert_close, judge, plain, rows_of
from tests.fleet.test_fleet_windows import SHORT
from tests.odd import assert_constant
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)

STRATEGIES: dict[str, ShardingStrategy] = {
    "FullShard": FullShard(),
    "FullShard, uneven": FullShard(weights=(1.0, 3.0)),
    "ShardGradOp": ShardGradOp(),
    "ShardGradOp, uneven": ShardGradOp(weights=(2.0, 1.0)),
    "ShardGradOp, whole gradients": ShardGradOp(keep_gradients=True),
    "HybridShard": HybridShard(intra_node_size=2),
}

ANY_RANKS: dict[str, ShardingStrategy] = {
    "FullShard": FullShard(),
    "FullShard, by memory": FullShard(weights="memory"),
    "ShardGradOp": ShardGradOp(),
}
USUAL = ("FullShard", "FullShard, uneven", "ShardGradOp")


def but_slow(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """Those beside the quick ones only where all is tested."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("strategy", first_of(but_slow([*STRATEGIES, "ShardGradOp, offloaded"], USUAL)))
def test_two_ranks_and_one_compute_what_one_process_does_and_hold_the_same_bits(strategy: str, tmp_path: Path) -> None:
    """Clipped, so that the norm has to be the same to the bit too."""
    name = strategy.removesuffix(", offloaded")
    options: dict[str, Any] = {"bare": True, "step": StepConfig(clip=0.3, offload_optimizer=strategy != name)}
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("two", strategy=STRATEGIES[name], **options)
    fleet.add("one", **options)
    assert_close(fleet.finish(), plain(clip=0.3))  # finish() says that both hold the same bits
    assert all(any(rows_of(fleet, name)) for name in ("two", "one"))
    assert fleet.server.core.refused.total() == 0


@pytest.mark.slow
def test_as_many_workers_of_two_ranks_as_there_may_be_compute_the_same_bits(tmp_path: Path) -> None:
    """With dropout, BatchNorm, buffers of every kind, and a parameter that nobody uses."""
    found = finish_of_one_and_two(tmp_path, strategy=FullShard())
    assert_same(*found)
    assert_constant(found[0], "odd.")
    assert torch.equal(found[0]["unused.weight"], build()[0].state_dict()["unused.weight"])
    assert found[0]["norm.num_batches_tracked"] > 0 and found[0]["norm.running_mean"].any()


@pytest.mark.parametrize("kind", but_slow(ANY_RANKS, ["FullShard"]))
def test_workers_of_one_two_and_three_ranks_train_one_model(kind: str, tmp_path: Path) -> None:
    """The last slices have fewer rows than three ranks."""
    fleet = Fleet(tmp_path, at_least=3)
    options: dict[str, Any] = {"strategy": ANY_RANKS[kind], "epochs": 1, "steps": STEPS // EPOCHS}
    fleet.add_node("two", 2, **options)
    fleet.add_node("three", 3, **options)
    fleet.add("one", **options)
    weights = fleet.finish(epochs=1)
    never = ("odd.mask", "odd.gap")
    assert all(torch.isfinite(value).all() for name, value in weights.items() if name not in never)
    assert torch.equal(weights["unused.weight"], build()[0].state_dict()["unused.weight"])
    assert all(any(rows_of(fleet, name)) for name in ("one", "two", "three"))
    assert fleet.server.core.refused.total() == 0


@pytest.mark.parametrize(
    ("policy", "strategy"),
    first_of([(Cadence.published(**SHORT), "ShardGradOp"), (Async.published(**SHORT), "FullShard, uneven")]),
)
def test_replicas_that_step_by_themselves_are_split_by_any_strategy(strategy: str, policy: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("two", strategy=STRATEGIES[strategy], policy=policy, bare=True)
    fleet.add("one", policy=policy, bare=True)
    assert_close(fleet.finish(), judge(fleet))
    assert fleet.server.core.refused.total() == 0


def test_what_nobody_uses_stays_as_it_is_in_windows_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("two", strategy=ShardGradOp(), policy=Cadence.published(**SHORT))
    fleet.add_node("uneven", strategy=FullShard(weights=(1.0, 2.0)), policy=Cadence.published(**SHORT))
    assert torch.equal(fleet.finish()["unused.weight"], build()[0].state_dict()["unused.weight"])


def of_some(model: Any) -> torch.optim.Optimizer:
    """One layer is stepped by nobody, and has a gradient all the same."""
    held = [parameter for name, parameter in model.named_parameters() if not name.startswith("layers.1.")]
    return torch.optim.SGD(held, lr=0.1)


def train_some(fleet: Any) -> Any:
    model, _, data = build(bare=True)
    model, _, loader = fleet.prepare(model, of_some(model), data, batch_size=BATCH, seed=1)
    for _ in fleet.epochs(EPOCHS):
        for x, y in loader:
            fleet.backward(F.cross_entropy(model(x), y), samples=len(x))
            fleet.step()
    return model


@pytest.mark.parametrize("strategy", first_of(["ShardGradOp", "FullShard", "FullShard, uneven"]))
def test_what_no_optimizer_holds_counts_in_the_norm_of_windows(strategy: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    step, policy = StepConfig(clip=0.3), Cadence.published(**SHORT)
    fleet.add_node("two", strategy=STRATEGIES[strategy], policy=policy, step=step, job=train_some)
    assert_close(fleet.finish(), judge(fleet, optimizer_of=of_some, clip=0.3))


def test_what_no_optimizer_holds_is_refused_where_steps_are_taken_together(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    two = fleet.add_node("two", strategy=ShardGradOp(), step=StepConfig(clip=0.3), job=train_some)
    with pytest.raises(AssertionError, match=r"layers\.1\.0\.weight requires a gradient, and the optimizer does not"):
        two[0].wait()


# Coming and going


def the_second_time(place: Path, phase: str, part: int | None = None) -> None:
    """Later it may have nothing to compute: ranks that talk in each layer are slow at so small a model."""
    times = itertools.count(1)

    def reached(step: int, **what: Any) -> None:
        if what.get("part") == part and next(times) == 2:
            die(place, phase)

    at(phase, reached)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "fault", "rank"),
    [
        pytest.param("forward", partial(the_second_time, phase="forward"), 1, id="forward", marks=pytest.mark.slow),
        pytest.param("part", partial(the_second_time, phase="part", part=1), 0, id="some parts sent"),
    ],
)
def test_a_rank_killed_ends_its_worker_alone_which_joins_again(
    what: str, fault: Any, rank: int, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    options: dict[str, Any] = {"bare": True, "slow_s": 0.4, "strategy": FullShard()}
    ranks = fleet.add_node("victim", faults={rank: fault}, may_lose=True, **options)
    fleet.add("survivor", hold_at=4, **options)
    for each in ranks:
        each.process.join(30)
    assert (tmp_path / f"fired-{what}").exists() and ranks[rank].process.exitcode == -signal.SIGKILL
    fleet.add_node("again", 3, **options)
    fleet.let_in("again")
    assert_close(fleet.finish(), plain())
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "victim"]
    assert not went.polite
    assert any(isinstance(e, WorkerCame) and e.name == "again" and e.step > 0 for e in fleet.events)
    assert (tmp_path / "again.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("first", first_of([1, 2]))
def test_a_worker_that_joins_in_mid_run_gets_its_state_in_any_split(first: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    options: dict[str, Any] = {"bare": True, "strategy": ShardGradOp() if first == 2 else FullShard(), "slow_s": 0.5}
    fleet.add_node("first", first, hold_at=3, **options)
    fleet.wait_for_step(2)
    fleet.add_node("newcomer", 3 - first, **options | {"strategy": FullShard()})
    fleet.let_in("newcomer")
    assert_close(fleet.finish(), plain())
    assert any(rows_of(fleet, "newcomer"))


@pytest.mark.slow
def test_a_worker_leaves_when_any_of_its_ranks_wishes_and_its_checkpoint_is_a_plain_runs_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("leaver", "stayer"):
        fleet.add_node(name, strategy=FullShard(), slow_s=0.05, save_every=2)
    fleet.wait_for_step(2)
    fleet.workers[1].send(signal.SIGUSR1)  # the second rank of the first
    weights = fleet.finish()
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite
    assert [e.step for e in fleet.events if isinstance(e, CheckpointSaved)][-1] == STEPS
    engine = potluck.init("sync")
    model, optimizer, data = build()
    engine.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    assert engine.load(tmp_path / "checkpoints") and engine.step_number == STEPS
    assert_same(dict(model.state_dict()), weights)


@pytest.mark.slow
def test_trainer_validates_and_saves_and_ends_where_it_should(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    settings = {"epochs": 5, "max_steps": 10, "validate_every": 3, "checkpoint": CheckpointConfig(every=4)}
    fleet.add_node("two", strategy=FullShard(), fit=settings, steps=10)
    fleet.add("one", fit=settings, steps=10)
    fleet.finish(epochs=1)
    assert fleet.server.core.steps_done == 10
    assert [e.step for e in fleet.events if isinstance(e, Validated)][-1] == 10
    assert [e.step for e in fleet.events if isinstance(e, CheckpointSaved)][-1] == 10


@pytest.mark.slow
def test_bf16_in_any_split_describes_the_same_model(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=3)
    options: dict[str, Any] = {"bare": True, "step": StepConfig(precision="bf16")}
    for name in ("FullShard", "FullShard, uneven"):
        fleet.add_node(name.replace(", ", "-"), strategy=STRATEGIES[name], **options)
    fleet.add("one", **options)
    torch.testing.assert_close(fleet.finish()["leave.weight"], plain()["leave.weight"], rtol=0.1, atol=0.05)
    assert fleet.server.core.refused.total() == 0
