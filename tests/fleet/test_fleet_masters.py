"""Trained bf16 parameters under a host: float32 masters. The judges are bare loops that step masters of bf16 models."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import potluck
from potluck.data.rows import mix
from potluck.events import WorkerWent
from potluck.fleet.tree import children, slice_rows
from potluck.save import checkpoint_folder
from tests.fleet.fleet import BATCH, EPOCHS, ROWS, SLICES, STEPS, Fleet, Net, assert_same, build
from tests.quick import first_of

pytestmark = pytest.mark.timeout(90)
UNIT = 2.0**-5
"""In steps together, losses are weighted by their rows, in this unit, before their backwards: in bf16 that rounds
otherwise."""
CADENCE = potluck.Cadence.published(anchor=1, max_anchor=2)


def half_net() -> Net:
    torch.manual_seed(3)
    return Net(bare=True).bfloat16()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.bfloat16()).float(), y)


def train(fleet: Any) -> nn.Module:
    model = half_net()
    _, _, data = build(bare=True)
    model, _, loader = fleet.prepare(model, optimizer_of(model.parameters()), data, batch_size=BATCH, seed=1)
    for _ in fleet.epochs(EPOCHS):
        for x, y in loader:
            assert model(x.bfloat16()).dtype == torch.bfloat16
            fleet.backward(loss_of(model, x, y), samples=len(x))
            fleet.step()
    return model


def order_of(epoch: int) -> Tensor:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(1, epoch)))


class Judge:
    """A bf16 model, and masters of its weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model, (_, _, (self.x, self.y)) = half_net(), build(bare=True)
        self.masters = {name: p.detach().float().requires_grad_() for name, p in self.model.named_parameters()}

    def gradients(self, rows: Tensor, weight: float) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        self.model.zero_grad()
        (loss_of(self.model, self.x[rows], self.y[rows]) * weight).backward()
        return {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}

    def take(self, gradients: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        for name, master in self.masters.items():
            master.grad = gradients[name]
        optimizer.step()


def judged_steps() -> dict[str, Tensor]:
    """A step's slices one after the other, their gradients added in the tree: in float32."""
    judge = Judge()
    optimizer = optimizer_of(judge.masters.values())

    def add(parts: list[dict[str, Tensor]], node: tuple[int, int]) -> dict[str, Tensor]:
        if node[1] - node[0] == 1:
            return parts[node[0]]
        left, right = (add(parts, child) for child in children(node))
        return {name: left[name] + right[name] for name in left}

    for epoch in range(EPOCHS):
        order = order_of(epoch)
        for row in range(0, ROWS, BATCH):
            rows = min(BATCH, ROWS - row)
            found = [judge.gradients(order[a:b], (b - a) * UNIT) for a, b in slice_rows(row, rows, SLICES)]
            scale = torch.tensor(1 / (rows * UNIT), dtype=torch.float32)
            judge.take({name: value * scale for name, value in add(found, (0, SLICES)).items()}, optimizer)
    return {name: master.detach() for name, master in judge.masters.items()}


def judged_windows(fleet: Fleet, *, is_rounded: bool = False) -> dict[str, Tensor]:
    """Each recorded range by a replica of its own, then the mean of their changes by rows, as a host forms it: the last
    bit may decide which number of bf16 a forward reads. `is_rounded`: each step is of weights in bf16."""
    judge = Judge()
    kept: dict[int, Any] = {}
    for record in fleet.records:
        order, size = order_of(record.epoch), -(-BATCH // len(record.workers))
        start, mean = copy.deepcopy(judge.masters), {name: torch.zeros_like(m) for name, m in judge.masters.items()}
        for first, last, worker in record.ranges:
            judge.masters = {name: m.detach().clone().requires_grad_() for name, m in start.items()}
            own = optimizer_of(judge.masters.values())
            if worker in kept:
                own.load_state_dict(kept[worker])
            for rows in torch.tensor_split(order[first:last], -(-(last - first) // size)):
                judge.take(judge.gradients(rows, 1.0), own)  # a step of its own: nobody else's gradient is added
                for master in judge.masters.values() if is_rounded else ():
                    master.data = master.data.bfloat16().float()
            kept[worker] = own.state_dict()
            for name, master in judge.masters.items():
                mean[name] += (start[name].detach() - master.detach()) * ((last - first) * UNIT)
        scale = torch.tensor(1 / (record.rows * UNIT), dtype=torch.float32)
        judge.masters = {name: start[name].detach() - change * scale for name, change in mean.items()}
    return judge.masters


def run(folder: Path, policy: Any) -> tuple[Fleet, dict[str, Tensor]]:
    """Two workers, of which one is killed."""
    fleet = Fleet(folder, at_least=2)
    victim = fleet.add("victim", job=train, policy=policy, slow_s=0.05)
    fleet.add("survivor", job=train, policy=policy, slow_s=0.05)
    fleet.wait_for_step(2)
    victim.kill()
    weights = fleet.finish()
    assert [e.name for e in fleet.events if isinstance(e, WorkerWent) and not e.polite] == ["victim"]
    assert fleet.server.core.standing.rows_seen == EPOCHS * ROWS
    return fleet, weights


def test_a_step_is_that_of_a_bare_loop_with_masters_also_where_a_worker_is_killed(tmp_path: Path) -> None:
    fleet, weights = run(tmp_path, potluck.Sync())
    expected = judged_steps()
    assert_same(weights, expected)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in expected.values())
    saved = load_file(checkpoint_folder.found(tmp_path / "checkpoints")[0] / "model.safetensors")
    assert_same(saved, expected)
    assert len(fleet.records) == STEPS


def test_windows_agree_on_the_masters(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, at_least=2)
    for name in ("one", "other"):
        fleet.add(name, job=train, policy=CADENCE)
    weights = fleet.finish()
    before = dict(half_net().float().named_parameters())
    expected, rounded = judged_windows(fleet), judged_windows(fleet, is_rounded=True)
    moved = distance(expected, before)
    assert_same(weights, expected)
    assert distance(expected, rounded) > 3e-2 * moved  # without masters


def distance(one: dict[str, Tensor], other: dict[str, Any]) -> float:
    return float(torch.cat([(one[name] - other[name]).detach().flatten() for name in one]).norm())


@pytest.mark.slow
def test_windows_outlive_a_killed_worker(tmp_path: Path) -> None:
    """All who are left agree on the masters, bit by bit, after each window: the host compares them."""
    fleet, weights = run(tmp_path, CADENCE)
    saved = load_file(checkpoint_folder.found(tmp_path / "checkpoints")[0] / "model.safetensors")
    assert_same(saved, weights)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in weights.values())
    assert fleet.records[-1].loss < fleet.records[0].loss


@pytest.mark.parametrize(("dtype", "ranks"), first_of([("float16", 1), ("bfloat16", 2)]))
def test_what_has_no_masters_is_refused(tmp_path: Path, dtype: str, ranks: int) -> None:
    fleet = Fleet(tmp_path)
    job = partial(prepare_only, dtype=getattr(torch, dtype))
    worker = fleet.add("first", job=job) if ranks == 1 else fleet.add_node("first", ranks, job=job)[0]
    worker.process.join(60)
    said = (tmp_path / "first.error").read_text()
    split = " in a model that is split over ranks" if ranks > 1 else ""
    assert f"A trained parameter is {dtype}{split}, and what" in said and "Keep it in float32" in said, said
    fleet.close()


def prepare_only(fleet: Any, dtype: torch.dtype) -> nn.Module:
    model = Net(bare=True).to(dtype)
    fleet.prepare(model, optimizer_of(model.parameters()), build(bare=True)[2], batch_size=BATCH)
    return model
