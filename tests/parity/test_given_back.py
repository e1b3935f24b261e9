"""When a fleet is closed, a model and its optimizer are their owner's again: plain PyTorch goes on with them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import potluck
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH = 24, 8


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return model, optimizer, scheduler, torch.randn(ROWS, 4), torch.randn(ROWS, 2)


def plain_steps(model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        rows = slice(number * BATCH % ROWS, number * BATCH % ROWS + BATCH)
        optimizer.zero_grad()
        loss = mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def methods_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Its own, beside its class's."""
    return {name for name, value in vars(optimizer).items() if callable(value)}


def train(options: dict[str, Any], late: bool) -> tuple[list[float], list[float], float]:
    """Plain steps after those of a fleet, and what fresh objects with the same state make of them. `late`: a scheduler
    is made while the fleet is open, and wraps the step that is there then."""
    model, optimizer, scheduler, x, y = made()
    own = methods_of(optimizer)
    fleet = potluck.init(step=potluck.StepConfig(**options))
    data = {"dataset": list(zip(x, y, strict=True)), "batch_size": BATCH}
    model, optimizer, loader = fleet.prepare(model, optimizer, **data, scheduler=scheduler)
    if late:
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for _ in range(2):
        for inputs, targets in loader:
            fleet.backward(mse_loss(model(inputs), targets), samples=len(inputs))
            fleet.step()
            scheduler.step()  # out of habit, which does nothing
    fleet.close()
    assert late or methods_of(optimizer) == own
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert all(each.grad is None and not each._post_accumulate_grad_hooks for each in model.parameters())
    other, fresh, again, _, _ = made()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(scheduler.state_dict())
    rate = optimizer.param_groups[0]["lr"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.1})
    return plain_steps(model, optimizer, scheduler, x, y, 3), plain_steps(other, fresh, again, x, y, 3), rate


@pytest.mark.parametrize("late", first_of([True, False]))
@pytest.mark.parametrize(("world", "options"), first_of([(2, {"offload_optimizer": True}), (2, {}), (1, {})]))
def test_plain_pytorch_goes_on_where_the_fleet_ended(world: int, options: dict[str, Any], late: bool) -> None:
    for found, expected, rate in run_ranks(world, train, options, late):
        assert found == expected and len(set(found)) == 3
        assert rate == pytest.approx(0.01 * 0.5**3), "six steps of the run"
