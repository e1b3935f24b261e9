"""The gradient's norm is right to the gradient's type: no step is skipped or clipped otherwise for its rounding.

The judge is a loop of plain PyTorch. Where torch's own norm of a float32 gradient is inf, it clips in float64.
"""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import Cadence, Direct, FullShard, HybridShard, NoShard, ShardGradOp, StepConfig, Sync
from potluck.errors import ConfigError
from potluck.fleet.invite import INVITE
from potluck.replica.replica import Replica
from potluck.sharding.runs import total_norm
from tests.fleet.fleet import Fleet
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, STEPS = 8, 3
SCENARIOS: dict[str, Any] = {
    "huge": {"dtype": torch.float32, "factor": 1e25, "lr": 1e-27, "clip": None},
    "huge and clipped": {"dtype": torch.float32, "factor": 1e25, "lr": 0.1, "clip": 0.5},
    "float64 and clipped": {"dtype": torch.float64, "factor": 1.0, "lr": 0.1, "clip": 0.05},
}
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-13}


def make(scenario: dict[str, Any], dtype: torch.dtype | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers).to(dtype or scenario["dtype"])
    return model, torch.optim.SGD(model.parameters(), lr=scenario["lr"], momentum=0.9, fused=scenario.get("fused"))


def data(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def plain(scenario: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Weights in the end, and each step's norm."""
    dtype = torch.float64 if scenario["clip"] else scenario["dtype"]
    model, optimizer = make(scenario, dtype)
    rows, norms = data(scenario["dtype"]).to(dtype), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(rows).square().mean() * scenario["factor"]).backward()
        norms.append(float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]
        if scenario["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), scenario["clip"])
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}, norms


def train(fleet: Any, scenario: dict[str, Any]) -> tuple[nn.Module, list[float]]:
    """The model, and each step's norm as it was told."""

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * scenario["factor"]  # type: ignore[no-any-return]

    norms: list[float] = []
    fleet.after_step.append(lambda: norms.append(fleet.last_step.grad_norm if fleet.last_step else math.nan))
    model, optimizer = make(scenario)
    model, _, loader = fleet.prepare(model, optimizer, data(scenario["dtype"]), batch_size=ROWS, loss=loss_of)
    for _ in fleet.epochs(STEPS):
        for batch in loader:
            fleet.train(loss_of, batch)
            fleet.step()
    return model, norms


CASES: dict[str, dict[str, Any]] = {
    "none": {"strategy": NoShard()},
    "zero2": {"strategy": ShardGradOp()},
    "zero1": {"strategy": ShardGradOp(keep_gradients=True)},
    "uneven zero2": {"strategy": ShardGradOp(weights=(1.0, 3.0))},
    "full": {"strategy": FullShard()},
    "uneven": {"strategy": FullShard(weights=(1.0, 3.0))},
    "hybrid": {"strategy": HybridShard(intra_node_size=1)},
    "stages": {"stages": Direct()},
    "split stages": {"stages": Direct(), "strategy": ShardGradOp()},
}


def in_a_group(folder: str) -> dict[str, list[float]]:
    norms = {}
    with potluck.init():
        for name, scenario in SCENARIOS.items():
            for case, settings in CASES.items():
                step = StepConfig(clip=scenario["clip"], nonfinite_limit=1)
                fleet = potluck.init(Sync(balance=False), step=step, **settings)
                norms[f"{name} {case}"] = train(fleet, scenario)[1]
                fleet.save(Path(folder, f"{name} {case}"))
                fleet.wait_for_saves()
    return norms


def assert_as_plain(found: nn.Module, scenario: dict[str, Any], what: str) -> None:
    off = TOLERANCES[scenario["dtype"]]
    for name, expected in plain(scenario)[0].items():
        assert torch.allclose(found.state_dict()[name].cpu().double(), expected.double(), rtol=off, atol=off), (
            what,
            name,
        )


@pytest.mark.slow
def test_every_strategy_and_stages_clip_and_skip_by_the_norm_of_the_type(tmp_path: Path) -> None:
    told = run_ranks(2, in_a_group, str(tmp_path))[0]
    for name, scenario in SCENARIOS.items():
        expected = plain(scenario)[1]
        for case in CASES:
            fleet, (model, optimizer) = potluck.Engine(), make(scenario)
            fleet.prepare(model, optimizer)
            assert fleet.load(tmp_path / f"{name} {case}")
            assert_as_plain(model, scenario, f"{name} {case}")
            assert told[f"{name} {case}"] == pytest.approx(expected, rel=TOLERANCES[scenario["dtype"]])


@pytest.mark.parametrize("policy", first_of([Sync(), Cadence.published(anchor=2)]), ids=["sync", "cadence"])
def test_a_worker_of_a_host_steps_on_a_huge_gradient(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("huge", "huge and clipped"):
        host = Fleet(tmp_path / name)
        monkeypatch.setenv(INVITE, host.invite.line())
        fleet = potluck.init(policy, step=StepConfig(clip=SCENARIOS[name]["clip"], nonfinite_limit=1))
        try:
            model, norms = train(fleet, SCENARIOS[name])
        finally:
            fleet.__exit__(ConfigError, ConfigError(), None)
            host.close()
        assert_as_plain(model, SCENARIOS[name], name)
        assert norms == pytest.approx(plain(SCENARIOS[name])[1], rel=2e-5)


def test_a_norm_is_that_of_torch_and_finite_wherever_the_numbers_are() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=draw) for size in (5, 1000, 1)]
    assert torch.equal(total_norm(tensors), nn.utils.get_total_norm(tensors))
    expected = float(nn.utils.get_total_norm([tensor.double() for tensor in tensors]))
    for factor in (1e-30, 1e25, 1e37):
        assert float(total_norm([tensor * factor for tensor in tensors])) == pytest.approx(expected * factor)
    assert float(total_norm([torch.full((4,), 6e4, dtype=torch.float16)])) == pytest.approx(1.2e5, rel=1e-3)
    assert math.isinf(total_norm([tensors[0], torch.tensor([math.inf])]))
    assert math.isnan(total_norm([tensors[0], torch.tensor([math.nan])]))
    small = torch.full((4,), 3e-25 + 4e-25j)
    assert float(total_norm([small])) == pytest.approx(1e-24)
    assert float(total_norm([torch.zeros(3)])) == float(total_norm([])) == 0.0


@pytest.mark.parametrize("name", first_of(["huge", "huge and clipped"]))
def test_a_step_that_the_gpu_left_out_for_lack_of_room_is_made_after_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one rank on a GPU steps: the verdict is reached where the gradient is, in float32."""
    left_out: list[bool] = []
    real = Replica.apply_unless_bad

    def recorded(replica: Replica, *arguments: Any) -> Any:
        said = real(replica, *arguments)
        left_out.append(bool(said[1]))
        return said

    monkeypatch.setattr(Replica, "runs_ahead", property(lambda replica: bool(replica.optimizer.state)))
    monkeypatch.setattr(Replica, "apply_unless_bad", recorded)
    scenario = SCENARIOS[name] | {"fused": True}
    model, norms = train(potluck.Engine(step=StepConfig(clip=scenario["clip"], nonfinite_limit=1)), scenario)
    assert left_out == [True] * (STEPS - 1)  # momentum's first step never runs ahead
    assert_as_plain(model, scenario, name)
    assert norms == pytest.approx(plain(scenario)[1], rel=2e-5)


def in_part(strategies: list[Any]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """The optimizer has all but one layer, whose gradient is there all the same."""
    found, meeting = [], os.environ["POTLUCK_RENDEZVOUS"]
    for number, strategy in enumerate(strategies):
        os.environ["POTLUCK_RENDEZVOUS"] = f"{meeting} {number}"
        model, _ = make(SCENARIOS["float64 and clipped"])
        held = [p for name, p in model.named_parameters() if not name.startswith("2.")]
        with potluck.init(strategy=strategy, step=StepConfig(clip=0.05), patience_s=60) as fleet:
            optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
            model, _, loader = fleet.prepare(model, optimizer, data(torch.float64), batch_size=ROWS)
            norms = []
            for _ in fleet.epochs(STEPS):
                for x in loader:
                    fleet.backward(model(x).square().mean(), samples=len(x))
                    norms.append(fleet.step().grad_norm)  # type: ignore[union-attr]
            found.append((norms, fleet.state_dict() or {}))
    return found


def test_trained_parameters_that_no_optimizer_holds_count_in_the_norm_under_every_strategy() -> None:
    """As in clip_grad_norm_(model.parameters())."""
    torch.set_num_threads(1)
    judge, _ = make(SCENARIOS["float64 and clipped"])
    held = [p for name, p in judge.named_parameters() if not name.startswith("2.")]
    optimizer, norms = torch.optim.SGD(held, lr=0.1, momentum=0.9), []
    for _ in range(STEPS):
        judge.zero_grad()
        judge(data(torch.float64)).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(judge.parameters(), 0.05).item())
        optimizer.step()
    strategies = [
        NoShard(),
        ShardGradOp(),
        ShardGradOp(keep_gradients=True),
        FullShard(),
        FullShard(weights=(3.0, 1.0)),
        HybridShard(intra_node_size=2),
    ]
    for found, weights in run_ranks(2, in_part, strategies)[0]:
        assert found == pytest.approx(norms, rel=1e-12)
        torch.testing.assert_close(weights, judge.state_dict(), atol=1e-12, rtol=1e-12)
