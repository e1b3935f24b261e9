"""Batches of any shape go through groups and stages as plain PyTorch has them."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 24, 8, 2


@dataclass
class Labelled:
    name: str
    parts: dict[str, list[Tensor]]


def as_dataclass(rows: list[Any]) -> Labelled:
    return Labelled("rows", {"x": [torch.stack([x for x, _ in rows])], "y": [torch.stack([y for _, y in rows])]})


def as_encoding(rows: list[Any]) -> Any:
    """As a BatchEncoding of transformers is one."""
    return UserDict({"text": ["a"] * len(rows), **as_dataclass(rows).parts})


def data() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [(torch.rand(4, generator=numbers), torch.rand(2, generator=numbers)) for _ in range(ROWS)]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    parts = batch.parts if isinstance(batch, Labelled) else batch
    loss: Tensor = ((model(parts["x"][0]) - parts["y"][0]) ** 2).mean()
    return loss


def train(collate: Callable[[list[Any]], Any], in_stages: bool) -> list[float]:
    more: dict[str, Any] = {"stages": potluck.Pipeline(micro_batch_size=4)} if in_stages else {}
    with potluck.init(potluck.Sync(), patience_s=30, **more) as fleet:
        model, optimizer = make()
        _, _, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, collate=collate, loss=loss_of)
        losses = []
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                fleet.train(loss_of, batch)
                if fleet.step() is not None:
                    assert fleet.last_step is not None
                    losses.append(fleet.last_step.loss)
        return losses


@pytest.mark.parametrize(
    ("collate", "in_stages"), first_of([(as_encoding, False), (as_encoding, True), (as_dataclass, True)])
)
def test_two_workers_learn_what_one_process_does(collate: Callable[[list[Any]], Any], in_stages: bool) -> None:
    model, optimizer = make()
    rows, expected = data(), []
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, ROWS, BATCH):
            loss = loss_of(model, collate([rows[index] for index in order[start : start + BATCH]]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    for found in run_ranks(2, train, collate, in_stages):
        assert found == pytest.approx(expected, abs=1e-6)
