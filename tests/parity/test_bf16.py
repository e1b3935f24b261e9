"""bf16 is autocast around the whole loss: the numbers are those of PyTorch's usual loop, and losses are float32."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import FullShard, HybridShard, NoShard, Pipeline, ShardGradOp, StepConfig
from potluck.data.rows import mix
from potluck.replica.precision import switch_on
from potluck.stages import stage_planner
from tests.gathered import gathered, home
from tests.parity.test_sync import STILL
from tests.quick import first_of
from tests.ranks import run_ranks

BF16 = StepConfig(precision="bf16")
ROWS, BATCH = 40, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 24)
        self.outer = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), batch[:, 1:].numel()


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def data() -> Tensor:
    return torch.randint(0, 13, (ROWS, 5), generator=torch.Generator().manual_seed(1))


def plain() -> dict[str, Any]:
    """One process, and autocast as PyTorch's own pages show it."""
    model, optimizer = make()
    model.to(home())
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, 0)))
    losses = []
    for rows in order.split(BATCH):
        with torch.autocast(home().type, torch.bfloat16):
            loss, _ = loss_of(model, data()[rows].to(home()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad(), torch.autocast(home().type, torch.bfloat16):
        looked = loss_of(model, data().to(home()))[0].item()
    return {"losses": losses, "looked": looked, "weights": [p.detach().cpu() for p in model.parameters()]}


def train(door: str, strategy: Any = NoShard(), options: dict[str, Any] | None = None) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0
    losses, kinds = [], set()
    with potluck.init(strategy=strategy, step=BF16, **{"policy": STILL} | (options or {})) as fleet:
        model, optimizer = make()
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
        for batch in loader:
            if door == "train":
                fleet.train(loss_of, batch)
            else:
                loss, samples = loss_of(model, batch)
                kinds.add(str(loss.dtype))
                fleet.backward(loss, samples=samples)
            if (event := fleet.step()) is not None:
                losses.append(event.loss)
        looked = fleet.evaluate(loss_of, data(), ROWS)
        model.state_dict()
        return {
            "losses": losses,
            "looked": looked,
            "kinds": sorted(kinds),
            "weights": {name: gathered(p) for name, p in model.named_parameters()},
        }


@pytest.mark.parametrize("door", first_of(["train", "own loop"]))
def test_one_worker_computes_what_plain_autocast_does_to_the_bit(door: str) -> None:
    (found,), judge = run_ranks(1, train, door), plain()
    if door == "own loop" and home().type == "cuda":  # autocast rounds rows to bf16 there
        assert found["losses"] == pytest.approx(judge["losses"], abs=0.003)
        return
    assert found["losses"] == judge["losses"]
    assert found["looked"] == judge["looked"]
    assert all(map(torch.equal, found["weights"].values(), judge["weights"]))


@pytest.mark.parametrize(
    ("world", "strategy", "options"),
    first_of(
        [
            (2, FullShard(), {}),
            (2, NoShard(), {"stages": Pipeline(micro_batch_size=4)}),
            (2, NoShard(), {}),
            (2, ShardGradOp(), {}),
            (2, FullShard(weights=(2, 1)), {}),
            (4, HybridShard(intra_node_size=2), {}),
            (2, FullShard(), {"stages": Pipeline(micro_batch_size=4)}),
        ],
        2,
    ),
    ids=["full", "stages", "none", "grad", "weights", "hybrid", "stages and full"],
)
def test_losses_are_computed_in_float32_under_every_strategy(world: int, strategy: Any, options: Any) -> None:
    judge = plain()
    in_bf16 = [float(torch.tensor(loss, dtype=torch.bfloat16)) for loss in judge["losses"]]
    assert max(abs(a - b) for a, b in zip(in_bf16, judge["losses"], strict=True)) > 0.006  # what would be seen
    for door in ("train",) if options else ("train", "own loop"):
        for found in run_ranks(world, train, door, strategy, options):
            assert found["losses"] == pytest.approx(judge["losses"], abs=0.003)
            assert found["looked"] == pytest.approx(judge["looked"], abs=0.003)
            assert found["kinds"] in ([], ["torch.float32"])


def test_a_loss_in_bf16_is_weighted_by_all_digits_of_its_samples() -> None:
    fleet = potluck.init(STILL)
    model = nn.Linear(4, 1).bfloat16()
    model, _ = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(3, 4, device=fleet.device, dtype=torch.bfloat16)).square().mean()
    fleet.backward(loss, samples=257)  # 256 in bf16
    event = fleet.step()
    assert event is not None and event.loss == loss.item()


def narrow(strategy: Any) -> dict[str, Tensor]:
    """A model whose parameters are bf16 too."""
    with potluck.init(strategy=strategy, step=BF16, policy=STILL) as fleet:
        model, _ = make()
        model.bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
        for batch in loader:
            fleet.train(loss_of, batch)
            fleet.step()
        return fleet.state_dict()


def test_gradients_of_bf16_parameters_have_arrived_when_full_shard_rounds_them() -> None:
    expected, found = (run_ranks(2, narrow, strategy)[0] for strategy in (NoShard(), FullShard()))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.05, atol=0.02)  # bf16 has 8 bits


@dataclass
class Output:
    logits: Tensor
    parts: list[Tensor]


class Told(Net):
    def forward(self, tokens: Tensor) -> Any:
        found = super().forward(tokens)
        return Output(found, [found, tokens])


def test_a_model_that_gives_a_dataclass_gives_float32_too() -> None:
    model = Told()
    switch_on(model, torch.device("cpu"), BF16)
    given = model(data()[:2])
    assert isinstance(given, Output)
    assert given.logits.dtype == given.parts[0].dtype == torch.float32 and given.parts[1].dtype == torch.int64
    assert given.logits.requires_grad
