"""The fingerprint of a replica is the same however it is split, and tells replicas apart that differ in one bit."""

import pytest
import torch
from torch import nn

import potluck
from potluck import FullShard, HybridShard, NoShard, ShardGradOp, ShardingStrategy
from tests.quick import first_of
from tests.ranks import run_ranks


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[2].bias.requires_grad_(False)
    return model


def fingerprints(strategy: ShardingStrategy, flips: int) -> list[str]:
    """Of a run's start, and after rank `flips` has changed a bit of what it holds."""
    with potluck.init(strategy=strategy) as fleet:
        model = model_of()
        trained = [each for each in model.parameters() if each.requires_grad]
        model, _ = fleet.prepare(model, torch.optim.AdamW(trained, lr=0.01))
        replica = fleet.run.prepared()
        found = [replica.fingerprint()]
        if fleet.rank == flips:
            held = replica.sharded.runs[0].parameter if replica.sharded is not None else model[0].weight
            with torch.no_grad():
                held.data.view(-1)[0] = -held.data.view(-1)[0]
        replica.on_parts_written()
        found.append(replica.fingerprint())
        return found


@pytest.mark.parametrize(
    ("strategy", "world"),
    first_of([(HybridShard(intra_node_size=2), 4), (FullShard(), 2), (ShardGradOp(), 2), (NoShard(), 2)]),
)
def test_it_is_of_the_whole_replica_and_sees_a_bit(strategy: ShardingStrategy, world: int) -> None:
    found = run_ranks(world, fingerprints, strategy, world - 1)
    ((plain, _),) = run_ranks(1, fingerprints, NoShard(), -1)
    assert {before for before, _ in found} == {plain}
    after = [told for _, told in found]
    size = {HybridShard: 2, NoShard: 1}.get(type(strategy), world)
    assert set(after[world - size :]) == {after[-1]} and after[-1] != plain
    assert set(after[: world - size]) <= {plain}, "a replica that nobody touched"
