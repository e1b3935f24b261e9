"""A strategy and a policy of somebody's own, made without a change to the package (docs/decisions/0059)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import potluck
from potluck import Async, ShardGradOp, Sync
from potluck.events import Decided
from potluck.sharding.sharded import Sharded, SplitRequest
from potluck.sharding.splitting import BUILDERS
from potluck.sharding.zero import ShardedOptimizer
from tests.ranks import run_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardByRank(ShardGradOp):
    """ShardGradOp whose second rank has twice the first one's part, the third one three times, and so on."""

    kind: ClassVar[str] = "shard_by_rank"

    def weights_over(self, free_bytes: Callable[[], list[float]]) -> list[float] | None:
        return [1.0 + rank for rank in range(len(free_bytes()))]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardStateOnly(ShardGradOp):
    """A builder of its own: ZeRO-1 whatever `keep_gradients` says."""

    kind: ClassVar[str] = "shard_state_only"


def build(strategy: ShardStateOnly, wanted: SplitRequest) -> Sharded:
    return ShardedOptimizer(wanted.model, wanted.optimizer, mean=wanted.mean, keep_gradients=True, group=wanted.group)


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryBatch(Async):
    """Replicas agree after each batch of the slowest, however long that takes."""

    kind: ClassVar[str] = "every_batch"

    anchor: int = 1
    max_anchor: int = 1

    @property
    def drift_limit(self) -> float | None:
        return None


def train(policy: Any, strategy: Any) -> dict[str, Any]:
    BUILDERS[ShardStateOnly] = build
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2, bias=False))
    x = torch.randn(40, 6)
    decided: list[Decided] = []
    with potluck.init(policy, strategy) as fleet:
        fleet.events.listeners.append(lambda event: decided.append(event) if isinstance(event, Decided) else None)
        model, _, loader = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), x, batch_size=8)
        for rows in loader:
            fleet.backward(F.mse_loss(model(rows), rows[:, :2]), samples=len(rows))
            fleet.step()
        sharded = getattr(fleet.run.replica, "sharded", None)
        owned = sum(run.parameter.numel() for run in sharded.runs) if sharded is not None else 0
        weights = torch.cat([p.detach().flatten() for p in model.state_dict().values()])
        return {
            "weights": weights,
            "owned": owned,
            "kept": getattr(sharded, "_keeps", None),
            "anchors": {each.anchor for each in decided},
        }


def test_a_strategy_with_its_own_weights_trains_what_any_other_does() -> None:
    plain = run_ranks(2, train, Sync(balance=False), potluck.NoShard())[0]
    found = run_ranks(2, train, Sync(balance=False), ShardByRank())
    assert [each["owned"] for each in found] == [30, 60]
    for each in found:
        torch.testing.assert_close(each["weights"], plain["weights"])


def test_a_strategy_can_bring_its_own_builder() -> None:
    for each in run_ranks(2, train, Sync(balance=False), ShardStateOnly()):
        assert each["kept"] and each["owned"] == 45


def test_a_policy_of_ones_own_plans_its_windows() -> None:
    first, second = run_ranks(2, train, EveryBatch(), potluck.NoShard())
    assert torch.equal(first["weights"], second["weights"])
    assert first["anchors"] == {1}
