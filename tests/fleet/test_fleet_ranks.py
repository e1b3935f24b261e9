"""Workers of several ranks under a host: what no optimizer holds, what a rank holds, and a node that was given up."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from potluck.agree.policy import ApplyPolicy, Cadence, Sync
from potluck.events import CheckpointSaved
from potluck.replica.replica import StepConfig
from potluck.sharding.strategy import FullShard, ShardGradOp, ShardingStrategy
from tests.fleet.faults import at
from tests.fleet.fleet import BATCH, EPOCHS, Fleet, build, stop, wait_until
from tests.fleet.judges import assert_close, judge, plain
from tests.fleet.kinds import SHORT
from tests.quick import first_of

pytestmark = pytest.mark.timeout(60)

STRATEGIES: dict[str, ShardingStrategy] = {
    "FullShard": FullShard(),
    "FullShard, uneven": FullShard(weights=(1.0, 3.0)),
    "ShardGradOp": ShardGradOp(),
}


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


@pytest.mark.slow
def test_bf16_in_any_split_describes_the_same_model(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=3)
    options: dict[str, Any] = {"bare": True, "step": StepConfig(precision="bf16")}
    for name in ("FullShard", "FullShard, uneven"):
        fleet.add_node(name.replace(", ", "-"), strategy=STRATEGIES[name], **options)
    fleet.add("one", **options)
    torch.testing.assert_close(fleet.finish()["leave.weight"], plain()["leave.weight"], rtol=0.1, atol=0.05)
    assert fleet.server.core.refused.total() == 0


def record_the_largest(place: Path, rank: int) -> None:
    """Of all tensors that any operation gives, from the first window on, and of all averages that are read."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from potluck.engine.engine import Engine

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
            one = self.table.client._one
            averages = len(one) if one is not None else 0
            parts = [part.floats for part in self.table.holder.description.parts]
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


def stopped_at_the_second_means(place: Path) -> None:
    """As a node's first rank: one of the window's means is here. It continues when its connection is lost."""
    from potluck.engine.node_listener import NodeListener
    from potluck.fleet.client import Client
    from potluck.wire.messages import Applied

    hand_out, send = NodeListener._hand_out, Client.send

    def stopped(self: Any, step: int, part: int, heard: Any) -> Any:
        if step == 2 and not (place / "fired-means").exists():
            stop(place, "means")
            wait_until(lambda: self.client.session.lost is not None)  # all that had come is read by then
        return hand_out(self, step, part, heard)

    def noted(self: Any, message: Any, before: Any = None) -> None:
        if isinstance(message, Applied):
            (place / "digest.new").write_text(message.digest)
            (place / "digest.new").rename(place / f"digest-{message.step}")
        send(self, message, before)

    NodeListener._hand_out = stopped  # type: ignore[method-assign]
    Client.send = noted  # type: ignore[method-assign]


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
