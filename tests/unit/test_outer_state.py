"""What an outer optimizer keeps goes with the inner one's state, and never into it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from potluck.agree.policy import Outer
from potluck.engine.means import HostMean
from potluck.engine.replica import Replica, StepConfig
from potluck.engine.window_delta import WindowDelta
from potluck.link.link import Alone
from potluck.save import state

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.1),
    "one by one": lambda p: Adam(p, lr=0.1, foreach=False),
    "fused": lambda p: AdamW(p, lr=0.1, fused=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.not_stepped = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.frozen


class Worker:
    def __init__(self, make: Make, outer: Outer | None = Outer(), *, offload: bool = False) -> None:
        self.model = Net()
        optimizer = make([p for name, p in self.model.named_parameters() if name != "not_stepped"])
        config = StepConfig(offload_optimizer=offload)
        self.replica = Replica(self.model, optimizer, Alone(), torch.device("cpu"), config)
        self.mean = HostMean(lambda part, numbers: None, lambda: None)
        self.delta = WindowDelta(self.replica, self.mean, outer)

    def agree(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.mean.take([torch.randn(part.floats, generator=draw) for part in self.mean.described])
        self.delta.apply()

    def train(self) -> None:
        self.replica.arm(last=True)
        self.model(torch.ones(4, 3)).sum().backward()
        self.replica.apply(1.0)

    def save(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
        return *state.optimizer_state(self.replica.optimizer, self.replica.names), state.model_state(self.model)

    def load(self, tensors: dict[str, torch.Tensor], told: dict[str, Any], model: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(model)
        state.load_optimizer(self.replica.optimizer, self.replica.names, tensors, told)
        self.delta.start_anew()


def assert_same(a: Worker, b: Worker) -> None:
    """But for what no optimizer has: no run changes that, as these means do."""
    pairs = zip(a.model.named_parameters(), b.model.parameters(), strict=True)
    assert all(torch.equal(x, y) for (name, x), y in pairs if name != "not_stepped")


@pytest.mark.parametrize("offload", [False, True], ids=["here", "on the host"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_newcomer_goes_on_as_the_one_that_told_it(make: Make, offload: bool) -> None:
    """Also before the first step of the optimizer, whose own state has not begun then."""
    first, newcomer = Worker(make, offload=offload), Worker(make)
    first.agree(1)
    for number in range(2, 4):
        newcomer.load(*copy.deepcopy(first.save()))
        for worker in (first, newcomer):
            worker.agree(number)
            worker.delta.begin()
            worker.train()
            worker.delta.end(1.0)
            worker.agree(10 * number)
        assert_same(first, newcomer)
    assert all(not str(key).startswith("outer") for known in first.replica.optimizer.state.values() for key in known)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_where_there_is_no_outer_optimizer_nothing_of_it_stays(make: Make) -> None:
    first, plain = Worker(make), Worker(make, None)
    first.agree(1)
    plain.load(*first.save())
    plain.train()
    assert not any("outer" in name for name in plain.save()[0])


def test_a_checkpoint_without_it_begins_at_rest() -> None:
    plain, worker, fresh = (Worker(OPTIMIZERS["adam"], outer) for outer in (None, Outer(), Outer()))
    plain.train()
    worker.agree(1)
    for each in (worker, fresh):
        each.load(*copy.deepcopy(plain.save()))
        each.agree(2)
    assert_same(worker, fresh)
