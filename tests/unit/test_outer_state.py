"""What a run keeps of each parameter beside the optimizer goes with the optimizer's state, and never into it."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from potluck.link.link import Alone
from potluck.replica.replica import Replica, StepConfig
from potluck.save import parts, state
from potluck.save.checkpoint import write_tensors
from potluck.save.checkpoint_folder import AVERAGE
from potluck.sharding.ranges import Ranges

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
    def __init__(self, make: Make, *, keeps: bool = True, offload: bool = False) -> None:
        self.model = Net()
        optimizer = make([p for name, p in self.model.named_parameters() if name != "not_stepped"])
        config = StepConfig(offload_optimizer=offload)
        self.replica = Replica(self.model, optimizer, Alone(), torch.device("cpu"), config)
        outer = self.replica.outer
        if keeps:
            outer.kept |= {
                n: {AVERAGE: torch.zeros_like(p)} for n, p in self.model.named_parameters() if n in outer.names.values()
            }

    def follow(self, seed: int) -> None:
        """What is kept changes."""
        draw = torch.Generator().manual_seed(seed)
        for known in self.replica.outer.kept.values():
            known[AVERAGE].copy_(torch.randn(known[AVERAGE].shape, generator=draw))

    def train(self) -> None:
        self.replica.arm(last=True)
        self.model(torch.ones(4, 3)).sum().backward()
        self.replica.apply(1.0)

    def save(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
        saved = parts.optimizer_part(parts.saved_part(self.replica))
        return saved.tensors, saved.notes, state.model_state(self.model)

    def load(self, tensors: dict[str, torch.Tensor], told: dict[str, Any], model: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(model)
        with tempfile.TemporaryDirectory() as folder:
            write_tensors(file := Path(folder, "optimizer.safetensors"), tensors)
            with Ranges([file]) as source:
                parts.load_optimizer_part(parts.saved_part(self.replica), source, told)


@pytest.mark.parametrize("offload", [False, True], ids=["here", "on the host"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_newcomer_finds_what_the_one_that_told_it_keeps(make: Make, offload: bool) -> None:
    """Also before the first step of the optimizer, whose own state has not begun then."""
    first, newcomer = Worker(make, offload=offload), Worker(make)
    for number in range(1, 3):
        first.follow(number)
        newcomer.load(*copy.deepcopy(first.save()))
        held = set(first.replica.outer.kept) - {"not_stepped"}
        assert held == set(newcomer.replica.outer.loaded) and held
        for name in held:
            assert torch.equal(newcomer.replica.outer.loaded[name][AVERAGE], first.replica.outer.kept[name][AVERAGE])
        for worker in (first, newcomer):
            worker.train()
        pairs = zip(first.model.parameters(), newcomer.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert all(not str(key).startswith("outer") for known in first.replica.optimizer.state.values() for key in known)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_where_nothing_is_kept_nothing_of_it_stays(make: Make) -> None:
    first, plain = Worker(make), Worker(make, keeps=False)
    first.follow(1)
    plain.load(*first.save())
    plain.train()
    assert not any("outer" in name for name in plain.save()[0])


def test_the_momentum_of_a_checkpoint_from_before_outer_was_removed_is_passed_over() -> None:
    old, plain = Worker(OPTIMIZERS["adam"]), Worker(OPTIMIZERS["adam"], keeps=False)
    for known in old.replica.outer.kept.values():
        known["outer_momentum"] = known.pop(AVERAGE)
    old.train()
    saved = old.save()
    assert any("outer_momentum" in name for name in saved[0])
    plain.load(*copy.deepcopy(saved))
    for worker in (old, plain):
        worker.train()
    assert all(torch.equal(a, b) for a, b in zip(old.model.parameters(), plain.model.parameters(), strict=True))
