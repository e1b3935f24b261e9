"""fp16 is autocast around the whole loss and a loss scale: the numbers are those of PyTorch's GradScaler."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import Cadence, FullShard, HybridShard, NoShard, Pipeline, ShardGradOp, StepConfig
from potluck.agree import loss_scale
from potluck.agree.loss_scale import LossScale
from potluck.data.rows import mix
from potluck.errors import ConfigError, Diverged
from potluck.events import StepSkipped
from potluck.stages import stage_planner
from tests.gathered import gathered, home
from tests.parity import test_bf16 as model_of
from tests.parity.test_bf16 import BATCH, ROWS, data
from tests.parity.test_sync import STILL
from tests.quick import first_of
from tests.ranks import run_ranks

FP16 = StepConfig(precision="fp16", clip=1.0, nonfinite_limit=1)
STEEP = 64.0
"""The loss is multiplied by this, so that the first steps overflow."""
EPOCHS = 2


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = model_of.make()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    loss, samples = model_of.loss_of(model, batch)
    return loss * STEEP, samples


def plain(parts: int = 1) -> dict[str, Any]:
    """One process, autocast and GradScaler as PyTorch's own pages show them. Of a batch in `parts`, of which each goes
    backward by itself, some overflow later: fewer rows have smaller gradients."""
    model, optimizer = make()
    model.to(home())
    scaler = torch.amp.GradScaler(home().type)
    losses, scales = [], []
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))
        for rows in order.split(BATCH):
            total = 0.0
            for part in rows.chunk(parts):
                with torch.autocast(home().type, torch.float16):
                    loss, _ = loss_of(model, data()[part].to(home()))
                scaler.scale(loss * (len(part) / len(rows))).backward()
                total += loss.item() * (len(part) / len(rows))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(total)
            scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales, "weights": [p.detach().cpu() for p in model.parameters()]}


def train(door: str, strategy: Any = NoShard(), options: dict[str, Any] | None = None) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0
    losses: list[float] = []
    scales: list[float] = []
    skipped: list[int] = []
    settings: dict[str, Any] = {"policy": STILL} | (options or {})
    with potluck.init(strategy=strategy, step=FP16, **settings) as fleet:
        model, optimizer = make()
        fleet.loop.samples_per_row = 4.0
        model, optimizer, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH, loss=loss_of)
        fleet.events.listeners.append(lambda e: skipped.append(e.in_a_row) if isinstance(e, StepSkipped) else None)
        fleet.after_agreement.append(lambda: scales.append(fleet.run.step.scale.value))
        for _ in fleet.epochs(EPOCHS):
            for batch in loader:
                if door == "train":
                    fleet.train(loss_of, batch)
                else:
                    loss, samples = loss_of(model, batch)
                    fleet.backward(loss, samples=samples)
                if (event := fleet.step()) is not None:
                    losses.append(event.loss)
        model.state_dict()
        return {
            "losses": losses,
            "scales": scales,
            "skipped": skipped,
            "weights": {name: gathered(p) for name, p in model.named_parameters()},
        }


def test_one_worker_computes_what_gradscaler_does_to_the_bit() -> None:
    (found,), judge = run_ranks(1, train, "train"), plain()
    assert judge["scales"][0] < 2**16 and judge["scales"][-1] == judge["scales"][-2], "some overflow, and most do not"
    assert found["scales"] == judge["scales"]
    assert found["skipped"] == [0] * len({*judge["scales"]}), "which count as nobody's fault"
    assert found["losses"] == judge["losses"]
    if home().type == "cpu":
        assert all(map(torch.equal, found["weights"].values(), judge["weights"]))
    for own, expected in zip(found["weights"].values(), judge["weights"], strict=True):
        torch.testing.assert_close(own, expected)  # on a GPU the norm is added up in another order


CASES = [
    (2, NoShard(), {}),
    (2, FullShard(), {}),
    (2, NoShard(), {"stages": Pipeline(micro_batch_size=4)}),
    (2, ShardGradOp(), {}),
    (2, FullShard(weights=(3, 1)), {"policy": potluck.Sync(balance=False)}),
    (4, HybridShard(intra_node_size=2), {}),
]


@pytest.mark.parametrize(("world", "strategy", "options"), first_of(CASES))
def test_several_workers_have_the_same_losses(world: int, strategy: Any, options: dict[str, Any]) -> None:
    every, judge = run_ranks(world, train, "train", strategy, options), plain(parts=world if world > 2 else 1)
    for found in every:
        assert found["losses"] == pytest.approx(judge["losses"], rel=2e-3)
        assert found["scales"] == judge["scales"]


def test_a_loop_of_ones_own_has_the_same_scale() -> None:
    (found,) = run_ranks(1, train, "own loop")
    assert found["losses"] == pytest.approx(plain()["losses"], rel=0.02)


def test_replicas_that_step_by_themselves_agree_on_the_lowest() -> None:
    one, other = run_ranks(2, train, "train", NoShard(), {"policy": Cadence.published(anchor=2, max_anchor=2)})
    assert one["scales"] == other["scales"] and one["scales"][-1] < 2**16
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])


def test_the_scale_is_saved_and_resumed(tmp_path: Path) -> None:
    def engine() -> potluck.Engine:
        fleet = potluck.init(step=FP16)
        model, optimizer = make()
        fleet.prepare(model, optimizer, data(), batch_size=BATCH)
        return fleet

    with engine() as fleet:
        fleet.run.step.scale.restore([2.0**9, 7, 4.0])
        fleet.save(tmp_path)
    with engine() as fleet:
        assert fleet.load(tmp_path) and vars(fleet.run.step.scale) == vars(LossScale(True, 2.0**9, 7, 4.0))


def test_it_moves_as_gradscaler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "RISES_AFTER", 3)
    scaler, scale = torch.amp.GradScaler("cpu", growth_interval=3), LossScale(True)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    draw = torch.Generator().manual_seed(0)
    for is_bad in (torch.rand(60, generator=draw) < 0.2).tolist():
        scaler.scale((parameter * (math.inf if is_bad else 1.0)).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scale.fall() if is_bad else scale.rise() is None
        assert scale.value == scaler.get_scale()


def test_what_no_scale_helps_ends_the_run() -> None:
    """Once it cannot fall any more, such steps count as they do in fp32."""
    with potluck.init(step=StepConfig(precision="fp16", nonfinite_limit=3)) as fleet:
        model, optimizer = make()
        _, _, loader = fleet.prepare(model, optimizer, data(), batch_size=BATCH)
        skipped: list[int] = []
        fleet.events.listeners.append(lambda e: skipped.append(e.in_a_row) if isinstance(e, StepSkipped) else None)
        with pytest.raises(Diverged, match="Stopped after 3 skipped steps in a row"):
            for _ in fleet.epochs(20):
                for batch in loader:
                    loss, samples = loss_of(model, batch)
                    fleet.backward(loss * math.nan, samples=samples)
                    fleet.step()
        assert skipped == [0] * 24 + [1, 2, 3]


def test_parameters_of_fp16_are_refused() -> None:
    with potluck.init(step=FP16) as fleet, pytest.raises(ConfigError, match=r"build the model without \.half\(\)"):
        model, _ = make()
        model.half()
        fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
