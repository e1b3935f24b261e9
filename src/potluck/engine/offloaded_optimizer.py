"""OffloadedOptimizer: an optimizer that steps copies of the parameters in host memory, where its state is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim import Optimizer

from potluck.sharding.runs import (
    in_host_memory,
    state_at,
)


class OffloadedOptimizer:
    """An optimizer that steps copies of the parameters in host memory, where its state is."""

    def __init__(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """`names`: by a parameter's id; copies are added."""
        self.optimizer = optimizer
        self._names = names
        self._twins: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            self.take(group)

    def take(self, group: dict[str, Any]) -> None:
        """A group has copies instead of its parameters, and what is known of those."""
        state = self.optimizer.state
        pairs = [(own, nn.Parameter(in_host_memory(own), own.requires_grad)) for own in group["params"]]
        for own, twin in pairs:
            self._names[id(twin)] = self._names[id(own)]
            if own in state:
                state[twin] = state_at(twin.device, state.pop(own), group)
        group["params"] = [twin for _, twin in pairs]
        self._twins += pairs

    @torch.no_grad()
    def take_in(self) -> None:
        """What changed the parameters meanwhile, such as an average, counts."""
        for own, twin in self._twins:
            twin.copy_(own)

    @torch.no_grad()
    def give_out(self) -> None:
        for own, twin in self._twins:
            own.copy_(twin)

    @contextmanager
    def written(self) -> Iterator[None]:
        """What changes the copies meanwhile changes the parameters."""
        self.take_in()
        yield
        self.give_out()

    @torch.no_grad()
    def step(self) -> None:
        self.take_in()
        for own, twin in self._twins:
            twin.grad = own.grad.to("cpu") if own.grad is not None else None
        self.optimizer.step()
        self.give_out()
        for _, twin in self._twins:
            twin.grad = None
