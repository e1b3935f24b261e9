"""Buffers of every kind under every strategy, policy and link of a group, against plain PyTorch in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import (
    Async,
    Cadence,
    DataStore,
    Direct,
    FullShard,
    HybridShard,
    NoShard,
    Pipeline,
    ShardGradOp,
    Stages,
    Sync,
)
from potluck.data.rows import mix
from tests.odd import BIG, LIKE_PLAIN, SEEN, Odd, assert_constant
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, WIDTH, EPOCHS = 17, 8, 6, 2  # the last batch of an epoch has one row, and the first rank may have none
STILL = Sync(balance=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Odd(WIDTH)) for _ in range(4))
        self.leave = nn.Linear(WIDTH, 1)
        self.blocks[1][0].bias.data[2] = -torch.inf  # a unit that is switched off for good

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


def make() -> tuple[Net, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Net()
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), rows


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def one_process() -> dict[str, Tensor]:
    model, optimizer, rows = make()
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            loss_of(model, rows[part]).backward()
            optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train(policy: Any, strategy: Any, stages: Any, folder: str | None) -> dict[str, Any]:
    """Under stages each worker tells what it holds."""
    with potluck.init(policy, strategy, stages=stages) as fleet:
        model, optimizer, rows = make()
        model, optimizer, loader = fleet.prepare(model, optimizer, rows, batch_size=BATCH, seed=0, loss=loss_of)
        for _ in range(EPOCHS):
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
        if folder is not None:
            fleet.save(folder)
            fleet.wait_for_saves()
        state = model.state_dict().items()
        found = {name: tensor.clone() for name, tensor in state if hasattr(Odd(1), name.split(".")[-1])}
        return {"buffers": found, "skipped": fleet.skipped}


@pytest.mark.parametrize(
    ("strategy", "stages", "world"),
    first_of(
        [
            (NoShard(), None, 2),
            pytest.param(NoShard(), None, 3, marks=pytest.mark.slow),
            (ShardGradOp(), None, 2),
            (FullShard(), None, 2),
            pytest.param(FullShard(weights=(2.0, 1.0)), None, 2, marks=pytest.mark.slow),
            (HybridShard(intra_node_size=2), None, 4),
            (NoShard(), Direct(), 2),
            pytest.param(
                NoShard(), Stages(protocol=Pipeline(micro_batch_size=BATCH), count=2), 4, marks=pytest.mark.slow
            ),
            (NoShard(), Pipeline(micro_batch_size=BATCH, schedule="interleaved"), 2),
            (NoShard(), "store", 2),
            (HybridShard(intra_node_size=2), Stages(protocol=Direct(), count=1), 4),
        ]
    ),
    ids=lambda value: type(value).__name__ if not isinstance(value, int | str) else str(value),
)
def test_steps_of_all_together_leave_what_one_process_leaves(
    strategy: Any, stages: Any, world: int, tmp_path: Path
) -> None:
    if stages == "store":
        stages = DataStore(url=(tmp_path / "store").as_uri())
    found = run_ranks(world, train, STILL, strategy, stages, None)
    plain, all_found = one_process(), agreed(found)
    for number in range(4):
        prefix = f"blocks.{number}.2."
        assert_constant(all_found, prefix)
        assert all_found[prefix + "best"].isfinite()
        for name in LIKE_PLAIN:
            want, got = plain[prefix + name], all_found[prefix + name]
            if name in ("mean", "wide"):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            else:
                assert_same(got, want)


def agreed(found: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Every buffer, of which all who hold it have the same."""
    together: dict[str, Tensor] = {}
    for told in found:
        assert told["skipped"] == 0
        for name, tensor in told["buffers"].items():
            assert_same(together.setdefault(name, tensor), tensor)
    return together


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("policy", "strategy", "stages", "world"),
    first_of(
        [
            (Cadence.published(anchor=2), NoShard(), None, 2),
            (Async.published(anchor=2), NoShard(), None, 3),
            (Cadence.published(anchor=2), HybridShard(intra_node_size=2), None, 4),
            pytest.param(
                Cadence.published(anchor=2), NoShard(), Stages(protocol=Direct(), count=2), 4, marks=pytest.mark.slow
            ),
        ]
    ),
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_replicas_that_step_by_themselves_agree_on_every_buffer(
    policy: Any, strategy: Any, stages: Any, world: int
) -> None:
    found = run_ranks(world, train, policy, strategy, stages, None)
    together = agreed(found)
    for number in range(4):
        prefix = f"blocks.{number}.2."
        assert_constant(together, prefix)
        steps = int(together[prefix + "short"][0])  # of one replica, the first in each window
        assert 0 < steps <= EPOCHS * ROWS
        assert together[prefix + "seen"] == SEEN + 10 * steps and together[prefix + "big"] == BIG + 2 * steps
        assert together[prefix + "flags"].tolist() == [steps % 2 == 0, steps % 2 == 1]
        assert together[prefix + "best"].isfinite() and together[prefix + "mean"].any()


def test_a_checkpoint_of_stages_holds_every_buffer(tmp_path: Path) -> None:
    run_ranks(2, train, STILL, NoShard(), Direct(), str(tmp_path))
    plain = one_process()
    with potluck.init() as fleet:
        model, optimizer, rows = make()
        fleet.prepare(model, optimizer, rows, batch_size=BATCH)
        assert fleet.load(tmp_path)
    loaded = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    for number in range(4):
        prefix = f"blocks.{number}.2."
        assert_constant(loaded, prefix)
        for name in ("seen", "big", "short", "flags", "steps"):
            assert_same(loaded[prefix + name], plain[prefix + name])
