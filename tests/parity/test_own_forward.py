"""Models whose own forward works between its layers, cut into stages, against plain PyTorch in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck import DataStore, Direct, FullShard, HybridShard, NoShard, Pipeline, ShardGradOp, Stages
from potluck.events import StepDone
from potluck.save import checkpoint_folder
from potluck.save.export import write_plain
from potluck.stages import stage_planner
from tests.gathered import gathered
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, LENGTH, WIDTH, STEPS = 8, 5, 6, 4  # each batch has all rows, so the judge need not know their order


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
        self.shift = nn.Parameter(torch.tensor(0.3) if scalar else torch.tensor([0.3]))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1)
        self.register_buffer("center", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.norm(self.embed(rows) * self.gain + self.positions * self.shift)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.center += x.detach().mean()  # after the layers: the last stage's alone
        return self.leave(x) * (self.gain if self.gain.dim() == 0 else 1.0)  # type: ignore[no-any-return]


class Inner(nn.Module):
    """Of a pre-norm transformer: the residual is the model's to add. A bias of keys would have a gradient of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.other = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.one(self.norm(x)).chunk(3, -1)
        return self.other(torch.softmax(q @ k.transpose(1, 2) + mask, -1) @ v)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """x = x + block(x), scaled; a mask and positions made once, a table of the model's own, tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Inner() for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(4))
        self.drop = nn.Dropout(0.0)
        self.last = nn.LayerNorm(WIDTH)
        self.register_buffer("hidden", torch.full((LENGTH, LENGTH), -torch.inf).triu(1))

    def forward(self, rows: Tensor) -> Tensor:
        length = rows.shape[1]
        x = self.drop(self.embed(rows) + self.positions[:length])
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = x + self.drop(block(x, self.hidden[:length, :length])) * scale
        return self.last(x) @ self.embed.weight.T


class Flat(nn.Module):
    """x = x + attention(norm(x)); x = x + step(norm(x)), over lists of parts, and a sum that layers add to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.attentions = nn.ModuleList(Inner() for _ in range(3))
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH)) for _ in range(3)
        )
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows)
        mask = x.new_zeros(rows.shape[1], rows.shape[1])
        sizes = 0.0
        for number in range(3):
            x = x + self.attentions[number](self.norms[2 * number](x), mask)
            given = self.steps[number](self.norms[2 * number + 1](x))
            sizes = sizes + given.square().mean(-1, keepdim=True)
            x = x + given
        return self.leave(x) + sizes  # type: ignore[no-any-return]


class Kept(Residual):
    """Buffers that the model's own forward changes: before its layers, between them, after them; and of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("start", torch.zeros(WIDTH))
        self.register_buffer("middle", torch.zeros(WIDTH))
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("best", torch.tensor(-torch.inf))
        self.register_buffer("odd", torch.tensor([True, False]))
        self.register_buffer("ends", torch.tensor(1 << 53))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows) + self.positions * (1 + 0.1 * self.batches)
        if self.training:
            self.batches += 1
            self.start.lerp_(x.detach().mean((0, 1)), 0.1)
        for number, block in enumerate(self.blocks):
            x = x + block(x, self.hidden)
            if number == 1 and self.training:
                self.middle = 0.9 * self.middle + x.detach().mean((0, 1))
        x = self.last(x - self.center)
        if self.training:
            with torch.no_grad():
                self.center.lerp_(x.mean((0, 1)), 0.1)
                self.best = torch.maximum(self.best, x.max())
                self.odd.logical_not_()
                self.ends += 1
        return x @ self.embed.weight.T


MODELS: dict[str, Any] = {
    "kept": Kept,
    "table": lambda: Table(scalar=False),
    "scalar": lambda: Table(scalar=True),
    "residual": Residual,
    "flat": Flat,
}


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
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
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


def assert_like_plain(
    found: list[dict[str, Any]], kind: str, folder: Path | None = None, skip: tuple[str, ...] = ()
) -> None:
    plain = one_process(kind)
    held: dict[str, Tensor] = {}
    for each in found:
        assert each["losses"] == pytest.approx(plain["losses"][-len(each["losses"]) :], rel=1e-12)
        assert each["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-12)
        held |= each["state"]
    if folder is not None:
        write_plain(checkpoint_folder.found(folder)[0], folder / "plain.safetensors")
        held = load_file(folder / "plain.safetensors")
    assert held.keys() == plain["state"].keys()
    for name, tensor in plain["state"].items():
        if name in skip:  # a sum over micro-batches
            continue
        torch.testing.assert_close(held[name], tensor, rtol=1e-11, atol=1e-12, msg=name)


def in_two(cut: int, protocol: Any = None) -> Stages:
    return Stages(protocol=protocol or Pipeline(micro_batch_size=2), count=2, cuts=(cut,))


@pytest.mark.parametrize(
    ("strategy", "cut", "world"),
    first_of(
        [
            (FullShard(), 1, 2),
            pytest.param(FullShard(), 1, 4, marks=pytest.mark.slow),
            (HybridShard(intra_node_size=2), 1, 4),
            pytest.param(FullShard(), 4, 2, marks=pytest.mark.slow),
        ]
    ),
    ids=str,
)
def test_split_stages_train_the_models_own_parameters_wherever_it_is_cut(strategy: Any, cut: int, world: int) -> None:
    assert_like_plain(run_ranks(world, train, "table", in_two(cut), strategy), "table", skip=("center",))


def test_a_parameter_without_a_dimension_goes_with_stages(tmp_path: Path) -> None:
    found = run_ranks(2, train, "scalar", in_two(2, Direct()), NoShard(), str(tmp_path))
    assert_like_plain(found, "scalar", tmp_path)


@pytest.mark.parametrize(
    ("kind", "protocol", "strategy", "world"),
    first_of(
        [
            ("residual", Pipeline(micro_batch_size=2), NoShard(), 2),
            pytest.param(
                "residual", Pipeline(micro_batch_size=2, schedule="zero-bubble"), NoShard(), 3, marks=pytest.mark.slow
            ),
            ("residual", Pipeline(micro_batch_size=2, schedule="interleaved"), NoShard(), 2),
            pytest.param(
                "residual",
                Stages(protocol=Pipeline(micro_batch_size=2), cuts=(1, 3, 5)),
                NoShard(),
                4,
                marks=pytest.mark.slow,
            ),
            ("residual", Stages(protocol=Pipeline(micro_batch_size=2), count=2), HybridShard(intra_node_size=2), 4),
            pytest.param("residual", in_two(1), FullShard(), 4, marks=pytest.mark.slow),
            pytest.param("flat", Direct(), NoShard(), 3, marks=pytest.mark.slow),
            ("flat", "store", NoShard(), 2),
            pytest.param("flat", in_two(2), FullShard(), 4, marks=pytest.mark.slow),
            pytest.param("flat", in_two(3), ShardGradOp(), 4, marks=pytest.mark.slow),
        ]
    ),
    ids=lambda value: type(value).__name__ if not isinstance(value, int | str) else str(value),
)
def test_residuals_in_the_models_own_forward_are_cut_too(
    kind: str, protocol: Any, strategy: Any, world: int, tmp_path: Path
) -> None:
    stages = DataStore(url=(tmp_path / "store").as_uri(), micro_batch_size=4) if protocol == "store" else protocol
    assert_like_plain(run_ranks(world, train, kind, stages, strategy), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["residual", pytest.param("flat", marks=pytest.mark.slow)])
def test_a_checkpoint_of_a_model_with_residuals_loads_anywhere(kind: str, tmp_path: Path) -> None:
    """One run that changes its workers, its cut and its strategy at every step."""
    setups: list[tuple[int, Any, Any]] = [
        (3, Pipeline(micro_batch_size=2), NoShard()),
        (1, None, NoShard()),
        (2, None, FullShard()),
        (2, Pipeline(micro_batch_size=2, schedule="interleaved"), NoShard()),
    ]
    for step, (world, stages, strategy) in enumerate(setups, start=STEPS - len(setups) + 1):
        found = run_ranks(world, train, kind, stages, strategy, str(tmp_path), step)
    assert_like_plain(found, kind, tmp_path)


@pytest.mark.parametrize(
    ("stages", "strategy", "world"),
    first_of(
        [
            (Stages(protocol=Direct(), cuts=(1, 3, 5)), NoShard(), 4),
            (Pipeline(micro_batch_size=ROWS, schedule="interleaved"), NoShard(), 2),
            pytest.param("store", NoShard(), 2, marks=pytest.mark.slow),
            (in_two(3, Direct()), FullShard(), 2),
        ]
    ),
    ids=lambda value: type(value).__name__ if not isinstance(value, int | str) else str(value),
)
def test_buffers_that_the_models_own_forward_changes_are_saved(
    stages: Any, strategy: Any, world: int, tmp_path: Path
) -> None:
    if stages == "store":
        stages = DataStore(url=(tmp_path / "store").as_uri())
    run_ranks(world, train, "kept", stages, strategy, str(tmp_path), 2)
    assert_like_plain(run_ranks(world, train, "kept", stages, strategy, str(tmp_path)), "kept", tmp_path)
