"""BatchNorm takes no mean of one row: none is alone where that can be had, and the numbers are plain PyTorch's."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Cadence, FitConfig, Pipeline, Stages
from potluck.data.plan import BatchConfig
from potluck.data.rows import mix
from potluck.errors import ConfigError
from potluck.events import Noticed
from potluck.stages import stage_planner
from tests.gathered import gathered
from tests.parity.test_sync import STILL
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH = 19, 8  # 8, 8 and 3: a worker of two would have one row of the last three


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def make(rows: int = ROWS) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(6, 2)).double()
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(rows, 6, generator=draw).double(), torch.randn(rows, 2, generator=draw).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train(policy: Any, options: dict[str, Any], stages: Any = None, rows: int = ROWS) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0
    with potluck.init(policy, stages=stages, patience_s=20) as fleet:
        model, optimizer, data = make(rows)
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=BATCH, loss=mse, **options)
        used: list[list[list[int]]] = []
        for epoch, batch in ((epoch, batch) for epoch in range(2) for batch in loader):
            if loader.current.counts:
                used.append([epoch, [loader.current.start, loader.current.end], [loader.current.step_end]])
            fleet.train(mse, batch)
            fleet.step()
        return {"used": used, "weights": {name: gathered(one) for name, one in model.state_dict().items()}}


def judge(parts: dict[tuple[int, int], list[list[tuple[int, int]]]]) -> dict[str, Tensor]:
    """Plain PyTorch: by (epoch, end of the step), each worker's micro-batches. A worker moves its own statistics."""
    model, optimizer, (x, y) = make()
    names = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    for (epoch, _), workers in sorted(parts.items()):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        total = sum(end - start for worker in workers for start, end in worker)
        moved = {name: torch.zeros_like(before[name]) for name in names}
        for worker in workers:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            for start, end in worker:
                rows = order[start:end]
                (F.mse_loss(model(x[rows]), y[rows]) * ((end - start) / total)).backward()
            weight = sum(end - start for start, end in worker) / total
            for name in names:
                moved[name] += weight * (model.get_buffer(name) - before[name])
        for name in names:
            model.get_buffer(name).copy_(before[name] + moved[name])
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(("world", "micro"), first_of([(2, None), (3, None), (2, 3)]))
def test_no_row_is_alone_and_the_weights_are_plain_pytorchs(world: int, micro: int | None) -> None:
    found = run_ranks(world, train, STILL, {"micro_batch_size": micro})
    parts: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}
    for each in found:
        for (epoch, end), taken in itertools.groupby(each["used"], key=lambda use: (use[0], use[2][0])):
            bounds = [(start, stop) for _, (start, stop), _ in taken]
            assert all(stop - start > 1 for start, stop in bounds)
            parts.setdefault((epoch, end), []).append(bounds)
    expected = judge(parts)
    for each in found:
        for name, weight in each["weights"].items():
            if weight.is_floating_point():
                torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("policy", "stages", "rows"),
    first_of(
        [
            (Cadence.published(anchor=2, max_anchor=2), None, ROWS),
            (
                STILL,
                Stages(protocol=Pipeline(micro_batch_size=3), count=2),
                12,
            ),  # 3, 3, 2, and then 2, 2 instead of 3, 1
        ]
    ),
    ids=["windows", "stages"],
)
def test_no_row_is_alone_in_windows_and_stages(policy: Any, stages: Any, rows: int) -> None:
    for each in run_ranks(2, train, policy, {}, stages, rows):
        assert all(end - start > 1 for _, (start, end), _ in each["used"])
        assert all(weight.isfinite().all() for weight in each["weights"].values())


def test_rows_that_must_be_alone_are_named_before_the_first_step(tmp_path: Any) -> None:
    for size, micro, rows, said in (
        (8, None, 17, "the last of 17 rows is a batch by itself"),
        (8, 1, 16, "micro-batches have 1 row"),
        (1, None, 16, "some of 1 worker have 1 row of a batch of 1"),
    ):
        model, optimizer, data = make(rows)
        fleet, heard = potluck.Engine(), []
        fleet.events.listeners.append(heard.append)
        fleet.prepare(model, optimizer, data, batch_size=size, micro_batch_size=micro)
        (notice,) = [event.sentence for event in heard if isinstance(event, Noticed)]
        assert notice.startswith("0.norm (BatchNorm1d) takes means") and said in notice
    trainer = potluck.Trainer(
        *make(17), loss=mse, batch_size=BatchConfig(size=8), folder=tmp_path / "run", config=FitConfig(progress=False)
    )
    with pytest.raises(ConfigError, match="BatchNorm was to be trained by a single row"):
        trainer.fit()
