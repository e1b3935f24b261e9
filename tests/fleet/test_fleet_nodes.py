"""HybridShard under a host: nodes of two ranks, each one worker, against plain replicas in one process."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import potluck
from potluck.agree.policy import ApplyPolicy, Async, Cadence, Sync, Windowed
from potluck.events import CheckpointSaved, Decided, Validated, WorkerCame, WorkerWent
from potluck.save.checkpoint import CheckpointConfig
from tests.fleet.faults import at
from tests.fleet.fleet import (
    BATCH,
    ROWS,
    STEPS,
    Fleet,
    assert_same,
    build,
    die,
    start_coordinator,
    start_node,
    stop,
    wait_until,
)
from tests.fleet.judges import assert_close, judge, rows_of
from tests.fleet.test_fleet_windows import (
    PHASES_OF_HOST,
    SHORT,
    check_ledger,
    in_a_window,
    save_and_look_at_every_batch,
)
from tests.odd import assert_constant
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("policy", "nodes", "options"),
    first_of(
        [
            (Cadence.published(**SHORT), 1, {}),
            (Cadence.published(**SHORT), 2, {}),
            (Async.published(**SHORT), 2, {"shared": True}),
        ]
    ),
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


def test_a_node_and_a_worker_that_has_all_of_it_train_one_model(tmp_path: Path) -> None:
    """The host cannot tell them apart: the same parts, the same means, the same weights."""
    fleet = Fleet(tmp_path, at_least=2)
    fleet.add_node("node", policy=Cadence.published(**SHORT), bare=True)
    fleet.add("whole", policy=Cadence.published(**SHORT), bare=True)
    assert_close(fleet.finish(), judge(fleet))
    assert fleet.server.core.refused.total() == 0  # none was taken for one that had drifted away


def test_buffers_a_bad_row_and_parameters_nobody_uses(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        fleet.add_node(f"n{number}", policy=Async.published(**SHORT), spoiled=17)
    weights = fleet.finish()  # the same on both, buffers too
    assert_constant(weights, "odd.")
    never = ("odd.mask", "odd.gap")
    assert all(torch.isfinite(value).all() for name, value in weights.items() if name not in never)
    assert weights["norm.num_batches_tracked"] > 0 and weights["norm.running_mean"].any()
    assert torch.equal(weights["unused.weight"], build()[0].state_dict()["unused.weight"])


@pytest.mark.slow
def test_saving_and_looking_within_a_window_see_what_was_agreed_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    busy = dict.fromkeys((0, 1), save_and_look_at_every_batch)
    fleet.add_node("only", faults=busy, policy=Cadence.published(anchor=2, max_anchor=2), bare=True)
    assert_close(fleet.finish(), judge(fleet))
    assert len({e.loss for e in fleet.events if isinstance(e, Validated)}) == 3  # one for each version


# What a rank holds


def record_the_largest(place: Path, rank: int) -> None:
    """Of all tensors that any operation gives, from the first window on, and of all averages that are read."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from potluck.engine.engine import Engine
    from potluck.fleet.client import Client

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = call(*args, **(kwargs or {}))
            for each in found if isinstance(found, tuple | list) else [found]:
                if isinstance(each, torch.Tensor) and each.dtype == torch.float32:
                    Watch.largest = max(Watch.largest, each.untyped_storage().nbytes() // 4)
            return found

    watch, close = Watch(), Engine.close

    def watched(step: int, worker: Any) -> None:
        if not Watch.largest:
            Watch.largest = 1
            watch.__enter__()

    def noted(self: Any) -> None:
        if Watch.largest:
            watch.__exit__(None, None, None)
            client = self.table.client._client
            averages = len(client._one) if isinstance(client, Client) and client._one is not None else 0
            parts = [part.floats for part in self.table.description.parts]
            found = [Watch.largest, averages, max(parts), sum(parts)]
            (place / f"largest-{rank}").write_text(" ".join(map(str, found)))
            Watch.largest = 0
        close(self)

    at("computing", watched)
    Engine.close = noted  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_of([Cadence.published(**SHORT), Sync()]), ids=["cadence", "sync"])
def test_no_rank_ever_holds_the_whole_models_change_nor_its_state(policy: ApplyPolicy, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for number in range(2):
        faults = {rank: partial(record_the_largest, rank=2 * number + rank) for rank in range(2)}
        fleet.add_node(f"n{number}", faults=faults, policy=policy, bare=True, save_every=2)
    fleet.finish()
    assert any(isinstance(e, CheckpointSaved) for e in fleet.events)
    for rank in range(4):
        largest, averages, part, whole = map(int, (tmp_path / f"largest-{rank}").read_text().split())
        # A part is a block, or what lies between blocks. The node's activations are smaller here.
        assert largest <= part < whole / 3, (largest, part, whole)
        assert averages == (part if rank % 2 == 0 else 0)


# Coming and going


def between_two_parts(place: Path) -> None:
    """The report and one part are sent."""
    from potluck.engine.node_sums import NodeParts

    collect, parts = NodeParts.collect, []

    def fatal(self: Any, index: int, own: Any) -> Any:
        parts.append(index)
        if index == 1 and parts.count(1) == 2:
            die(place, "parts")
        return collect(self, index, own)

    NodeParts.collect = fatal  # type: ignore[method-assign]


def while_means_are_handed_out(place: Path) -> None:
    from potluck.engine.node_sums import NodeParts

    hand_out, parts = NodeParts.hand_out, []

    def fatal(self: Any, index: int, whole: Any) -> Any:
        parts.append(index)
        if index == 1 and parts.count(1) == 2:
            die(place, "means")
        return hand_out(self, index, whole)

    NodeParts.hand_out = fatal  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("what", "fault", "rank"),
    [
        pytest.param("window", in_a_window, 1, id="window", marks=pytest.mark.slow),
        pytest.param("parts", between_two_parts, 0, id="parts", marks=pytest.mark.slow),
        pytest.param("means", while_means_are_handed_out, 1, id="means"),
    ],
)
def test_a_rank_killed_ends_its_node_alone_which_joins_again(what: str, fault: Any, rank: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": Cadence.published(anchor=2, max_anchor=2), "slow_s": 0.1}
    fleet = Fleet(tmp_path, at_least=2)
    ranks = fleet.add_node("victim", faults={rank: fault}, may_lose=True, **options)
    fleet.add_node("survivor", **options)
    for each in ranks:
        each.process.join(30)
    assert (tmp_path / f"fired-{what}").exists() and ranks[rank].process.exitcode == -signal.SIGKILL
    lost = (tmp_path / f"{ranks[1 - rank].name}.lost").read_text()
    assert ranks[1 - rank].process.exitcode == 1 and ("WorkerLost" in lost or "gloo" in lost), lost
    fleet.add_node("again", **options)
    fleet.finish()  # the ledger proves that each row was used once, and both nodes hold the same weights
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "victim"]
    assert not went.polite
    assert any(isinstance(e, WorkerCame) and e.name == "again" and e.step > 0 for e in fleet.events)
    assert (tmp_path / "again.pt").exists()


@pytest.mark.slow
def test_a_node_that_joins_in_mid_run_gets_its_state_from_a_node_and_takes_part(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.add_node("first", policy=Async.published(**SHORT), slow_s=0.15, hold_at=3)
    fleet.wait_for_step(2)
    fleet.add_node("newcomer", policy=Async.published(**SHORT), slow_s=0.15)
    fleet.let_in("newcomer")
    fleet.finish()
    (came,) = [e for e in fleet.events if isinstance(e, WorkerCame) and e.name == "newcomer"]
    assert came.step >= 2 and any(rows_of(fleet, "newcomer"))
    assert any(isinstance(e, Decided) and e.reason.startswith("newcomer came, and the work") for e in fleet.events)


@pytest.mark.slow
def test_a_node_leaves_when_any_of_its_ranks_wishes_and_its_checkpoint_is_a_plain_runs_too(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("leaver", "stayer"):
        fleet.add_node(name, policy=Cadence.published(**SHORT), slow_s=0.05, save_every=2)
    fleet.wait_for_step(2)
    fleet.workers[1].send(signal.SIGUSR1)  # the second rank of the first node
    weights = fleet.finish()
    (went,) = [e for e in fleet.events if isinstance(e, WorkerWent) and e.name == "leaver"]
    assert went.polite
    saved = [e for e in fleet.events if isinstance(e, CheckpointSaved)]
    assert saved[-1].step == STEPS
    engine = potluck.init("sync")
    model, optimizer, data = build()
    engine.prepare(model, optimizer, data, batch_size=BATCH, seed=1)
    assert engine.load(tmp_path / "checkpoints") and engine.step_number == STEPS
    assert_same(dict(model.state_dict()), weights)
    steps = {float(state["step"]) for p, state in optimizer.state.items()}
    assert len(steps) == 1 and steps.pop() > 1 and len(optimizer.state) == len(list(model.parameters())) - 2


@pytest.mark.slow
def test_a_run_that_everybody_died_in_goes_on_from_the_checkpoint_of_a_node(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, patience_s=1.0)
    ranks = fleet.add_node("first", policy=Cadence.published(**SHORT), slow_s=0.2, save_every=2, may_lose=True)
    fleet.wait_for_step(3)
    wait_until(lambda: any((tmp_path / "checkpoints").glob("step-*")))
    ranks[0].kill()
    wait_until(lambda: not fleet.server.core.membership.members)
    fleet.add_node("second", policy=Cadence.published(**SHORT))
    fleet.finish()


@pytest.mark.slow
def test_nodes_join_a_host_again_that_was_killed(tmp_path: Path) -> None:
    process, invite = start_coordinator(tmp_path, fault=PHASES_OF_HOST, at_least=2)
    options = {"policy": Cadence.published(**SHORT), "slow_s": 0.02}
    workers = [rank for name in ("n0", "n1") for rank in start_node(invite, tmp_path, name, 2, {}, options)]
    process.join(20)
    assert (tmp_path / "fired-after").exists()
    process, _ = start_coordinator(tmp_path, port=invite.port, returning=2)
    for worker in workers:
        worker.wait(30)
    assert_same(workers[0].weights, workers[2].weights)
    process.join(10)
    check_ledger(tmp_path)


def stopped_at_the_second_means(place: Path) -> None:
    """As a node's first rank: one of the window's means is here. It continues when its connection is lost."""
    from potluck.engine.node_client import NodeClient
    from potluck.wire.messages import Applied

    take_in, send = NodeClient._take_in, NodeClient.send

    def stopped(self: Any, step: int, part: int, floats: Any) -> None:
        if step == 2 and not (place / "fired-means").exists():
            stop(place, "means")
            wait_until(lambda: self._client.session.lost is not None)  # all that had come is read by then
        take_in(self, step, part, floats)

    def noted(self: Any, message: Any) -> None:
        if isinstance(message, Applied):
            (place / "digest.new").write_text(message.digest)
            (place / "digest.new").rename(place / f"digest-{message.step}")
        send(self, message)

    NodeClient._take_in = stopped  # type: ignore[method-assign]
    NodeClient.send = noted  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_node_that_was_given_up_applies_the_means_that_had_come(tmp_path: Path) -> None:
    """From a connection that is broken, and to the others' bits."""
    fleet = Fleet(tmp_path, at_least=2, patience_s=1.0)
    options: dict[str, Any] = {"policy": Cadence.published(**SHORT), "slow_s": 0.1}
    fleet.add("whole", **options)
    node, _ = fleet.add_node("node", faults={0: stopped_at_the_second_means}, **options)
    wait_until((tmp_path / "fired-means").exists)
    wait_until(lambda: all(m.name != "node" for m in fleet.server.core.membership.members.values()))
    node.send(signal.SIGCONT)
    wait_until((tmp_path / "digest-2").exists, tell=fleet.describe)
    assert fleet.journal.agreed(since=2)[2] == {"": (tmp_path / "digest-2").read_text()}


def test_trainer_counts_batches_of_the_run_and_ends_where_it_should(tmp_path: Path) -> None:
    """Of 32 rows: 7 to an epoch, and 10 in all."""
    fleet = Fleet(tmp_path, at_least=2)
    settings = {"epochs": 5, "max_steps": 10, "validate_every": 3, "checkpoint": CheckpointConfig(every=4)}
    for number in range(2):
        fleet.add_node(f"n{number}", policy=Cadence.published(**SHORT), fit=settings, steps=10)
    fleet.finish(epochs=1)
    assert fleet.records[-1].rows_seen == ROWS + 3 * BATCH and fleet.server.core.steps_done == 10
    assert [e.step for e in fleet.events if isinstance(e, Validated)][-1] == 10
    assert [e.step for e in fleet.events if isinstance(e, CheckpointSaved)][-1] == 10
