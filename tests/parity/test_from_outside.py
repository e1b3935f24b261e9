"""A strategy and a policy of somebody's own, made without a change to the package (docs/decisions/0059)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import potluck
from potluck import Async, Cadence, ShardGradOp, Sync
from potluck.agree.policy import POLICIES
from potluck.agree.records import Report
from potluck.agree.windows import PLANNERS, WindowPlanner
from potluck.engine.figures import FIGURES
from potluck.events import Decided
from potluck.fleet import description
from potluck.sharding.sharded import Sharded, SplitRequest
from potluck.sharding.splitting import BUILDERS
from potluck.sharding.zero import ShardedOptimizer
from tests.fleet.virtual import Fleet, described
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved(Cadence):
    """Replicas agree after each batch while the loss moves by more than `threshold` within a window."""

    kind: ClassVar[str] = "moved"
    figures: ClassVar[tuple[str, ...]] = ("divergence", "loss_moved")

    threshold: float = 0.5
    overhead_target: float | None = 0.1
    together: float = 0.0
    moments: bool | None = False


class MovedPlanner(WindowPlanner):
    """The planner of Moved: it reads a figure that no other policy asks for."""

    def report(self, reports: Sequence[Report], sync_s: float) -> None:
        super().report(reports, sync_s)
        moved = max(report.figures["loss_moved"] for report in reports)
        has_moved = moved > self.policy.threshold  # type: ignore[union-attr]
        self._set_anchor(1 if has_moved else self.policy.anchor)
        self.news = f"The loss {'has moved' if has_moved else 'stands'}, by {moved:.0%}"


def bring_moved() -> None:
    """All that a policy with a figure of its own is."""
    POLICIES[Moved.kind], PLANNERS[Moved] = Moved, MovedPlanner  # type: ignore[assignment]
    FIGURES["loss_moved"] = lambda trace: 1 - trace.losses[-1] / trace.losses[0] if trace.losses else 0.0


def train(policy: Any, strategy: Any) -> dict[str, Any]:
    BUILDERS[ShardStateOnly] = build
    bring_moved()
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
            "reasons": [each.reason for each in decided],
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


def test_a_policy_may_ask_for_a_figure_that_no_report_has() -> None:
    """Under one that is always exceeded windows are as short as can be; under one that never is, as it says."""
    for threshold, anchors, told in ((-9.0, {1, 2}, "The loss has moved, by "), (9.0, {2}, "The loss stands, by ")):
        first, second = run_ranks(2, train, Moved(anchor=2, max_anchor=2, threshold=threshold), potluck.NoShard())
        assert torch.equal(first["weights"], second["weights"])
        assert first["anchors"] == anchors and first["reasons"] == second["reasons"]
        assert len(first["reasons"]) > 1 and all(reason.startswith(told) for reason in first["reasons"][1:])


def test_and_a_host_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.fleet.description.POLICIES", dict(POLICIES))
    monkeypatch.setitem(description.POLICIES, Moved.kind, Moved)
    monkeypatch.setitem(PLANNERS, Moved, MovedPlanner)
    policy = Moved(anchor=2, max_anchor=2)
    described_so = described(policy=policy.kind, settings=description.settings_of(policy), batch=4)
    run = Fleet(workers=0, at_least=2)
    run.add("calm", description=described_so, figures='{"loss_moved": 0.125}')
    run.add("fast", description=described_so, figures='{"loss_moved": 0.75}')
    run.finish()
    reasons = [decided.reason for decided in run.told(Decided)]
    assert len(reasons) > 3 and all("The loss has moved, by 75%" in reason for reason in reasons[1:])
    assert {decided.anchor for decided in run.told(Decided)[1:]} == {1}
