"""What an optimizer knows of its parameters before prepare(), by its constructor or a file, every strategy keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import FullShard, HybridShard, ShardGradOp, StepConfig
from tests.ranks import run_ranks

ROWS, STEPS = 8, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "offloaded": {"step": StepConfig(offload_optimizer=True)},
    "zero2 offloaded": {"strategy": ShardGradOp(), "step": StepConfig(offload_optimizer=True)},
    "full": {"strategy": FullShard()},
    "uneven": {"strategy": FullShard(weights=(1.0, 2.0))},
    "hybrid": {"strategy": HybridShard(intra_node_size=1)},
}


def make(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After so many steps of plain PyTorch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
    return model, optimizer


def data() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def train(folder: str) -> None:
    with potluck.init():
        for name in OPTIMIZERS:
            for case in CASES:
                model, optimizer = make(name, 2)
                fleet = potluck.init(**CASES[case])
                fleet.prepare(model, optimizer)
                mine = slice(fleet.rank * ROWS // fleet.world, (fleet.rank + 1) * ROWS // fleet.world)
                for _ in range(STEPS - 2):
                    fleet.backward(model(data()[mine].to(fleet.device)).square().mean(), samples=mine.stop - mine.start)
                    fleet.step()
                fleet.save(Path(folder, f"{name} {case}"))
                fleet.wait_for_saves()


def test_what_the_optimizer_knew_is_kept_and_saved_under_every_strategy(tmp_path: Path) -> None:
    run_ranks(2, train, str(tmp_path))
    for name in OPTIMIZERS:
        expected, judge = make(name, STEPS)
        for case in CASES:
            fleet, (model, optimizer) = potluck.Engine(), make(name, 0)
            fleet.prepare(model, optimizer)
            assert fleet.load(tmp_path / f"{name} {case}"), (name, case)
            for found, right in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(found.cpu(), right, rtol=1e-12, atol=1e-12, msg=f"{name} {case}")
                for key, value in judge.state[right].items():
                    torch.testing.assert_close(optimizer.state[found][key].cpu(), value, rtol=1e-9, atol=1e-12)


def test_a_group_that_comes_later_is_stepped_in_host_memory_too(tmp_path: Path) -> None:
    (expected, judge), (model, optimizer) = make("adam", 0), make("adam", 0)
    for each in (optimizer, judge):
        each.param_groups[0]["params"] = each.param_groups[0]["params"][:2]
    fleet = potluck.Engine(step=StepConfig(offload_optimizer=True))
    fleet.prepare(model, optimizer)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(model[2].parameters())})  # type: ignore[index]
            judge.add_param_group({"params": list(expected[2].parameters())})  # type: ignore[index]
        fleet.backward(model(data()).square().mean(), samples=ROWS)
        fleet.step()
        judge.zero_grad()
        expected(data()).square().mean().backward()
        judge.step()
    for found, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=1e-12, atol=1e-12)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in optimizer.state}
    fleet.save(tmp_path)
    fleet.wait_for_saves()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_that_was_made_before_the_model_reached_the_gpu_follows_it() -> None:
    model, optimizer = make("adagrad", 2)
    expected, _ = make("adagrad", 3)
    fleet = potluck.init()
    fleet.prepare(model, optimizer)
    fleet.backward(model(data().to(fleet.device)).square().mean(), samples=ROWS)
    fleet.step()
    for found, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=1e-10, atol=1e-10)
