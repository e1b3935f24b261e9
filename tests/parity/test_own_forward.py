"""Models whose own forward works between its layers, cut into stages, against plain PyTorch in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck import FullShard, HybridShard, NoShard, Pipeline, Stages
from potluck.events import StepDone
from potluck.train import drafts, shelf
from potluck.train.export import write_plain
from tests.gathered import gathered
from tests.ranks import run_ranks

ROWS, LENGTH, WIDTH, STEPS = 8, 5, 6, 3  # each batch has all rows, so the judge need not know their order


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Table(nn.Module):
    """Parameters of the model itself: positions before the blocks, and a gain, which both ends use if it is 0-d."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.gain = nn.Parameter(torch.tensor(0.7) if scalar else torch.tensor([0.7]))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.norm(self.embed(rows) * self.gain + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * (self.gain if self.gain.dim() == 0 else 1.0)  # type: ignore[no-any-return]


MODELS: dict[str, Any] = {"table": lambda: Table(scalar=False), "scalar": lambda: Table(scalar=True)}


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(5)
    model = MODELS[kind]().double()
    rows = torch.randint(0, 11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), rows


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def one_process(kind: str, steps: int = STEPS) -> dict[str, Any]:
    model, optimizer, rows = make(kind)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = loss_of(model.eval(), rows).item()
    return {"losses": losses, "evaluated": evaluated, "state": dict(model.state_dict())}


def train(kind: str, stages: Any, strategy: Any, folder: str | None = None, upto: int = STEPS) -> dict[str, Any]:
    """From wherever the folder stands. Each worker tells what it holds."""
    drafts.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    losses: list[float] = []
    with potluck.init(potluck.Sync(balance=False), strategy, stages=stages, patience_s=30) as fleet:
        model, optimizer, rows = make(kind)
        model, optimizer, loader = fleet.prepare(model, optimizer, rows, batch_size=ROWS, loss=loss_of)
        if folder is not None:
            fleet.load(folder)
        fleet.events.listeners.append(lambda e: losses.append(e.loss) if isinstance(e, StepDone) else None)
        while fleet.step_number < upto:
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
        model.state_dict()  # waits for what ShardGradOp is still sending
        if folder is not None:
            fleet.save(folder)
            fleet.wait_for_saves()
        state = {name: gathered(tensor) for name, tensor in model.state_dict().items()}
        return {"losses": losses, "state": state, "evaluated": fleet.evaluate(loss_of, rows, ROWS)}


def assert_like_plain(found: list[dict[str, Any]], kind: str, folder: Path | None = None) -> None:
    plain = one_process(kind)
    held: dict[str, Tensor] = {}
    for each in found:
        assert each["losses"] == pytest.approx(plain["losses"][-len(each["losses"]) :], rel=1e-12)
        assert each["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-12)
        held |= each["state"]
    if folder is not None:
        write_plain(shelf.found(folder)[0], folder / "plain.safetensors")
        held = load_file(folder / "plain.safetensors")
    assert held.keys() == plain["state"].keys()
    for name, tensor in plain["state"].items():
        torch.testing.assert_close(held[name], tensor, rtol=1e-11, atol=1e-12, msg=name)


def in_two(cut: int, protocol: Any = None) -> Stages:
    return Stages(protocol=protocol or Pipeline(micro_batch_size=2), count=2, cuts=(cut,))


@pytest.mark.parametrize(
    ("strategy", "cut", "world"),
    [
        (FullShard(), 1, 2),
        (FullShard(), 1, 4),
        (HybridShard(intra_node_size=2), 1, 4),
        (FullShard(), 4, 2),
    ],
    ids=str,
)
def test_split_stages_train_the_models_own_parameters_wherever_it_is_cut(strategy: Any, cut: int, world: int) -> None:
    assert_like_plain(run_ranks(world, train, "table", in_two(cut), strategy), "table")


def test_a_parameter_without_a_dimension_goes_with_stages(tmp_path: Path) -> None:
    found = run_ranks(2, train, "scalar", in_two(2), NoShard(), str(tmp_path))
    assert_like_plain(found, "scalar", tmp_path)
