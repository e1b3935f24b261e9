"""Blocks that give any object, where they are split over ranks: against plain PyTorch in one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck import FullShard, HybridShard
from tests.parity.test_odd_parameters import plain, split
from tests.quick import first_of
from tests.ranks import run_ranks

KINDS = ("dataclass", "object", "slots", "function", "beside", "kept")


@dataclass
class Fields:
    x: Tensor
    first: Tensor


class Thing:
    def __init__(self, x: Tensor, first: Tensor) -> None:
        self.inner = {"x": [x]}
        self.first = first
        self.itself = self


class Slots:
    __slots__ = ("first", "x")

    def __init__(self, x: Tensor, first: Tensor) -> None:
        self.x, self.first = x, first


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        found = x + 0.2 * self.outer(torch.tanh(self.inner(x)))
        match self.kind:
            case "dataclass":
                return Fields(found, x)
            case "object":
                return Thing(found, x)
            case "slots":
                return Slots(found, x)
            case "function":
                return lambda: found
            case "beside":  # what is found in it has no part in the loss
                return found * 2, lambda: found
        self.extra = torch.tanh(self.inner(found)).square().mean(1, keepdim=True)
        return found


def taken(output: Any) -> Tensor:
    match output:
        case Fields() | Slots():
            return output.x
        case Thing():
            return output.inner["x"][0]
        case (_, function):
            return taken(function)
        case Tensor():
            return output
    found: Tensor = output()
    return found


class Net(nn.Module):
    def __init__(self, gives: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gives = gives
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(map(Block, KINDS))
        self.leave = nn.Linear(8, 1)
        self.double()

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = taken(block(x))
        left = self.leave(x) + 0.1 * self.blocks[-1].extra
        return Thing(left, x) if self.gives == "object" else lambda: left


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (taken(model(x)) - y).square().mean()


def gives_object() -> Net:
    return Net("object")


def gives_function() -> Net:
    return Net("function")


@pytest.mark.parametrize("build", first_of([gives_object, gives_function]))
@pytest.mark.parametrize(
    "world, strategy",
    first_of(
        [
            (2, FullShard()),
            (1, FullShard()),
            (2, FullShard(weights=(1.0, 2.0))),
            (4, HybridShard(intra_node_size=2)),
        ]
    ),
)
def test_blocks_that_give_any_object_train_as_in_one_process(
    world: int, strategy: Any, build: Callable[[], Net]
) -> None:
    state = run_ranks(world, split, build, loss_of, strategy)[0]
    for name, expected in plain(build(), loss_of).items():
        torch.testing.assert_close(
            state[name], expected, rtol=1e-9, atol=1e-9, msg=lambda said, name=name: f"{name}: {said}"
        )
