"""A loss function that has trained parameters, beside the model; and layers whose gradients are sparse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import FullShard, NoShard, ShardGradOp
from potluck.data.rows import mix
from potluck.errors import ConfigError
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 24, 8, 2


class Arc(nn.Module):
    """Centres of the classes, and a temperature, as metric learning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 8))
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, embedded: Tensor, labels: Tensor) -> Tensor:
        angles = F.normalize(embedded) @ F.normalize(self.centres).T
        return F.cross_entropy(angles * self.temperature.exp(), labels)


def make() -> tuple[nn.Module, Arc, nn.ParameterList, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    criterion, bare = Arc().double(), nn.ParameterList([torch.ones(1, dtype=torch.float64)])
    every = [*model.parameters(), *criterion.parameters(), *bare.parameters()]
    return model, criterion, bare, torch.optim.SGD(every, lr=0.1, momentum=0.9)


def rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 4, dtype=torch.float64, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw)


def judged() -> list[dict[str, Tensor]]:
    """In plain PyTorch."""
    torch.set_num_threads(1)
    model, criterion, bare, optimizer = make()
    x, y = rows()
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            (criterion(model(x[part]), y[part]) * bare[0].square().sum()).backward()
            optimizer.step()
    return [model.state_dict(), criterion.state_dict(), bare.state_dict()]


def ours(strategy: Any) -> dict[str, Tensor]:
    *models, optimizer = make()
    with potluck.init(strategy=strategy, patience_s=60) as fleet:
        (model, criterion, bare), _, loader = fleet.prepare(models, optimizer, rows(), batch_size=BATCH)
        for _ in fleet.epochs(EPOCHS):
            for x, y in loader:
                fleet.backward(criterion(model(x), y) * bare[0].square().sum(), samples=len(x))
                fleet.step()
        return fleet.state_dict() or {}


@pytest.mark.parametrize("strategy", first_of([ShardGradOp(), NoShard()]), ids=["split", "whole"])
def test_a_loss_function_is_trained_with_its_model(strategy: Any) -> None:
    judge = {f"{number}.{name}": each for number, state in enumerate(judged()) for name, each in state.items()}
    found = run_ranks(2, ours, strategy)[0]
    torch.testing.assert_close(found, judge, atol=1e-12, rtol=1e-12)


class Own(nn.Module):
    """What a bare parameter is under FullShard: it is used in the forward of a module that owns it."""

    def __init__(self, bare: nn.ParameterList) -> None:
        super().__init__()
        self.bare = bare

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.bare[0].square().sum()


def in_parts(strategy: Any) -> tuple[str, dict[str, Tensor]]:
    model, criterion, bare, optimizer = make()
    with potluck.init(strategy=strategy, patience_s=60) as fleet:
        models, _, loader = fleet.prepare([model, criterion, Own(bare)], optimizer, rows(), batch_size=BATCH)
        said = ""
        try:
            bare[0].square().sum()
        except ConfigError as refusal:
            said = str(refusal)
        for _ in fleet.epochs(EPOCHS):
            for x, y in loader:
                fleet.backward(models[2](models[1](models[0](x), y)), samples=len(x))
                fleet.step()
        return said, fleet.state_dict() or {}


@pytest.mark.parametrize("strategy", first_of([FullShard(), FullShard(weights=(1.0, 2.0))]), ids=["even", "weights"])
def test_a_loss_function_in_parts_is_trained_with_its_model(strategy: Any) -> None:
    judge = {f"{number}.{name}": each for number, state in enumerate(judged()) for name, each in state.items()}
    judge["2.bare.0"] = judge.pop("2.0")
    told = run_ranks(2, in_parts, strategy)
    assert all("was used outside of its module's forward" in said for said, _ in told)
    torch.testing.assert_close(told[0][1], judge, atol=1e-12, rtol=1e-12)


def test_an_optimizer_that_holds_a_loss_functions_parameters_says_what_to_pass() -> None:
    model, _, _, optimizer = make()
    with potluck.init() as fleet, pytest.raises(ConfigError, match=r"prepare\(\[model, criterion\], optimizer"):
        fleet.prepare(model, optimizer, rows(), batch_size=BATCH)


def refused(strategies: list[Any]) -> list[str]:
    said = []
    for strategy in strategies:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        with potluck.init(strategy=strategy) as fleet, pytest.raises(ConfigError) as error:
            fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.arange(10),), batch_size=2)
        said.append(str(error.value))
    return said


def test_a_split_model_with_sparse_gradients_is_refused_before_its_first_step() -> None:
    for said in refused([ShardGradOp(), FullShard(), FullShard(weights=(1.0,))]):
        assert "The gradient of 0.weight is sparse" in said and "sparse=False" in said


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.leave = nn.Parameter(torch.ones(10, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.embedding(x, self.table, sparse=True))  # type: ignore[no-any-return]


def sparse_function(strategy: Any) -> str:
    model = Rows()
    with potluck.init(strategy=strategy) as fleet:
        model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError) as error:
            fleet.backward(model(torch.arange(4)).square().mean(), samples=4)
            fleet.step()
    return str(error.value)


@pytest.mark.parametrize(
    "strategy", first_of([FullShard(), ShardGradOp(), ShardGradOp(keep_gradients=True), NoShard()])
)
def test_a_function_with_a_sparse_gradient_is_refused_in_the_first_backward(strategy: Any) -> None:
    for said in run_ranks(2, sparse_function, strategy):
        assert "The gradient of table is sparse" in said


def test_workers_with_sparse_gradients_are_refused_before_their_first_step() -> None:
    for said in run_ranks(2, refused, [NoShard()]):
        assert "The gradient of 0.weight is sparse" in said[0]
