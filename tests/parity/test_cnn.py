"""A script as people have them: a CNN with BatchNorm, a DataLoader with workers, a schedule, clipping and autocast; on
two ranks, whole and split, and under a host from which one worker is killed, against one plain process.

BatchNorm normalises what goes through the model at once, so the judge lets the same parts of each batch through."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import potluck
from potluck import Direct, FullShard, NoShard, Pipeline, ShardingStrategy, Stages, StepConfig
from potluck.stages import stage_planner
from tests.fleet import faults
from tests.fleet.fleet import Fleet
from tests.gathered import gathered, home
from tests.parity.test_sync import STILL
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ROWS, BATCH, EPOCHS = 44, 16, 2
STEPS = EPOCHS * -(-ROWS // BATCH)
STEP = StepConfig(clip=0.1, precision="bf16")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for a in (1, 8, 8)
        )
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((2, 3)))


def make() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(2)
    draw = torch.Generator().manual_seed(3)
    rows = TensorDataset(torch.randn(ROWS, 1, 6, 6, generator=draw), torch.randint(0, 3, (ROWS,), generator=draw))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)
    order = torch.Generator().manual_seed(8)
    return model, optimizer, scheduler, DataLoader(rows, BATCH, shuffle=True, num_workers=2, generator=order)


def plain(cut: Callable[[int], list[int]], *, in_a_row: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """`cut`: how many rows each part of a batch has, in order. `in_a_row`: BatchNorm's statistics follow one part after
    the other, as where gradients are accumulated; else all parts begin with those of the step before."""
    model, optimizer, scheduler, loader = make()
    model.to(home())
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            sizes = cut(len(x))
            total, moved = 0.0, [torch.zeros_like(b, dtype=torch.float64) for b in model.buffers()]
            before = [buffer.clone() for buffer in model.buffers()]
            for part, labels in zip(x.to(home()).split(sizes), y.to(home()).split(sizes), strict=True):
                for buffer, was in zip(model.buffers(), before, strict=True) if not in_a_row else ():
                    buffer.copy_(was)
                with torch.autocast(home().type, torch.bfloat16):
                    loss = F.cross_entropy(model(part), labels) * (len(part) / len(x))
                loss.backward()
                total += loss.item()
                for change, buffer, was in zip(moved, model.buffers(), before, strict=True):
                    change += (buffer.double() - was.double()) * (len(part) / len(x))
            for buffer, was, change in zip(model.buffers(), before, moved, strict=True) if not in_a_row else ():
                buffer.copy_(was.double() + change)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(total)
    return losses, {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def train(fleet: Any) -> tuple[list[float], nn.Module]:
    model, optimizer, scheduler, loader = make()
    losses: list[float] = []
    model, optimizer, batches = fleet.prepare(model, optimizer, loader, scheduler=scheduler)
    fleet.after_step.append(lambda: losses.append(fleet.last_step.loss))
    for _ in fleet.epochs(EPOCHS):
        for x, y in batches:
            with torch.autocast(x.device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fleet.backward(loss, samples=len(x))
            optimizer.step()
            scheduler.step()
    return losses, model


def on_a_rank(strategy: ShardingStrategy) -> tuple[list[float], dict[str, Tensor]]:
    losses, model = train(potluck.init(STILL, strategy, step=STEP))
    return losses, {name: gathered(tensor) for name, tensor in model.state_dict().items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize(
    "strategy",
    [NoShard(), pytest.param(FullShard(), marks=pytest.mark.slow)],
    ids=["whole", "full shard"],
)
def test_it_learns_on_two_ranks_what_one_process_does(strategy: ShardingStrategy) -> None:
    losses, weights = plain(lambda rows: [-(-rows // 2), rows // 2])
    for found, state in run_ranks(2, on_a_rank, strategy):
        assert found == pytest.approx(losses, rel=5e-3)
        assert_near(state, weights)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def in_stages(stages: Stages) -> tuple[list[float], dict[str, Tensor]]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    model, optimizer, scheduler, loader = make()
    losses: list[float] = []
    with potluck.init(stages=stages, step=STEP, patience_s=30) as fleet:
        model, optimizer, batches = fleet.prepare(model, optimizer, loader, scheduler=scheduler, loss=loss_of)
        fleet.after_step.append(lambda: losses.append(fleet.last_step.loss))
        for _ in fleet.epochs(EPOCHS):
            for batch in batches:
                fleet.train(loss_of, batch)
                optimizer.step()
                scheduler.step()
        return losses, fleet.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "parts"), [(Direct(), 1), (Pipeline(micro_batch_size=4), 4)], ids=["direct", "pipeline"]
)
def test_it_learns_it_in_stages(stages: Stages, parts: int) -> None:
    losses, weights = plain(lambda rows: [rows] if parts == 1 else [4] * (rows // 4), in_a_row=True)
    (found, state), (others, _) = run_ranks(2, in_stages, stages)
    assert found == others == pytest.approx(losses, rel=5e-3)
    assert_near(state, weights)


def job(fleet: Any) -> nn.Module:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return train(fleet)[1]


def slices(rows: int) -> list[int]:
    from potluck.fleet.tree import slice_rows

    return [end - start for start, end in slice_rows(0, rows, min(8, BATCH // 2))]


@pytest.mark.slow
def test_it_learns_it_under_a_host_from_which_one_is_killed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name, fault in (("stays", None), ("dies", faults.in_backward)):
        fleet.add(name, fault, job=job, step=STEP, steps=STEPS)
    weights = fleet.finish(epochs=0)
    assert (tmp_path / "fired-backward").exists()
    assert_near(weights, plain(slices)[1])
