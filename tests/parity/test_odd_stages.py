"""Odd models that are cut into stages, against plain PyTorch in one process: parts that only some batches use, nested
Sequentials, long skips. Every protocol, with a slow worker where two might race."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import potluck
from potluck import DataStore, Direct, Pipeline, Stages
from potluck.data.rows import mix
from potluck.errors import ConfigError
from potluck.events import StepDone
from potluck.sharding.strategy import FullShard, NoShard, ShardGradOp
from potluck.stages import stage_planner
from potluck.stages.chain import find_chain
from potluck.stages.trace import ModelTrace
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, WIDE, BATCH, MICRO = 16, 6, 4, 2
Case = tuple[nn.Module, Callable[[nn.Module, Any], Any]]


def rows() -> tuple[Tensor, Tensor]:
    """The last rows of the first epoch are the odd ones: the survey sees none of them."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDE, dtype=torch.float64).clamp(-3, 3)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, 0)))
    for place, where in ((6, 0), (9, 1), (12, 0)):
        if order[place] >= BATCH:  # not those with which the model is surveyed
            x[order[place], where] = 6.0
    return x, x.sin()


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def judge(make: Callable[[], Case], steps: int, micro: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss_of = make()
    model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = rows()
    losses = []
    for step in range(steps):
        epoch, at = divmod(step * BATCH, ROWS)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch)))[at : at + BATCH]
        total = 0.0
        for part in order.split(micro):
            loss = loss_of(model, (x[part], y[part]))
            (loss * len(part) / BATCH).backward()
            total += loss.item() * len(part) / BATCH
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"losses": losses, "weights": {name: p.detach().clone() for name, p in model.state_dict().items()}}


def train(make: Callable[[], Case], steps: int, stages: Any, strategy: Any, slow: int | None) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0
    torch.manual_seed(0)
    model, loss_of = make()
    model.double()
    losses: list[float] = []
    with potluck.init(potluck.Sync(balance=False), strategy, stages=stages, patience_s=30) as fleet:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = fleet.prepare(model, optimizer, rows(), batch_size=BATCH, loss=loss_of)
        if fleet.rank == slow:
            model.register_forward_pre_hook(lambda *_: time.sleep(0.03))
        fleet.events.listeners.append(lambda e: losses.append(e.loss) if isinstance(e, StepDone) else None)
        while fleet.step_number < steps:
            for batch in loader:
                fleet.train(loss_of, batch)
                fleet.step()
                if fleet.step_number == steps:
                    break
        return {"losses": losses, "weights": fleet.state_dict()}


def check(
    make: Callable[[], Case],
    stages: Any,
    *,
    ranks: int = 2,
    strategy: Any = None,
    steps: int = 6,
    micro: int = BATCH,
    slow: int | None = None,
) -> None:
    expected = judge(make, steps, micro)
    for found in run_ranks(ranks, train, make, steps, stages, strategy or NoShard(), slow):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9), found["losses"]
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], rtol=1e-8, atol=1e-10, msg=name)


PROTOCOLS = ["direct", "pipeline", "datastore"]


def protocol_of(name: str, folder: Path) -> tuple[Any, int]:
    if name == "datastore":
        return DataStore(url=f"file://{folder}/store", micro_batch_size=MICRO), MICRO
    return (Pipeline(micro_batch_size=MICRO), MICRO) if name == "pipeline" else (Direct(), BATCH)


class Sometimes(nn.Module):
    """Parts that some batches use: after the layers, between them, before them, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))
        self.rare, self.rarer, self.first = (nn.Linear(WIDE, WIDE) for _ in range(3))
        self.never = nn.Linear(WIDE, WIDE)
        self.shift = nn.Parameter(torch.randn(WIDE))
        self.head = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        is_odd = bool((x[:, 0] > 5).any())
        h = self.enter(x)
        if is_odd:
            h = h + self.first(h)
        for number, block in enumerate(self.blocks):
            h = torch.tanh(block(h))
            if number == 1 and (x[:, 1] > 5).any():
                h = h + self.rarer(h)
        if is_odd:
            h = h + self.rare(h) + self.shift
        return self.head(h)  # type: ignore[no-any-return]


def sometimes() -> Case:
    return Sometimes(), squares


@pytest.mark.parametrize("protocol", first_of(PROTOCOLS))
def test_a_part_that_only_some_batches_use_is_trained_on_whichever_stage_uses_it(protocol: str, tmp_path: Path) -> None:
    stages, micro = protocol_of(protocol, tmp_path)
    check(sometimes, stages, micro=micro, slow=1)


@pytest.mark.parametrize(
    "strategy",
    first_of([NoShard(), ShardGradOp(), FullShard(), FullShard(weights=(1, 1, 3, 2))]),
    ids=["NoShard", "ShardGradOp", "FullShard", "weights"],
)
def test_such_a_part_is_trained_where_stages_are_split_or_several(strategy: Any) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=1), count=2)
    check(sometimes, stages, ranks=4, strategy=strategy, micro=1, slow=2)


@pytest.mark.parametrize("schedule", first_of(["interleaved", "zero-bubble", "gpipe"]))
def test_such_a_part_is_trained_in_every_schedule(schedule: Any) -> None:
    check(sometimes, Stages(protocol=Pipeline(micro_batch_size=1, schedule=schedule), count=2), micro=1)


class SomeTied(Sometimes):
    """Beside parts that every stage has, a weight that only two of three have, and that comes before theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[1].weight


def some_tied() -> Case:
    return SomeTied(), squares


def test_stages_that_share_other_weights_than_their_neighbours_add_up_the_same_ones() -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=MICRO), cuts=(2, 3))
    check(some_tied, stages, ranks=3, micro=MICRO, steps=4)


class Nested(nn.Module):
    """A plain nested Sequential, with layers that have no parameters, and that give their input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Identity()),
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()),
            nn.Flatten(),
            nn.Sequential(nn.Linear(WIDE, WIDE)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.enter(x)))  # type: ignore[no-any-return]


def nested() -> Case:
    return Nested(), squares


@pytest.mark.parametrize("cut", first_of([5, 1, 2, 3, 4, 6, 7, 8]))
@pytest.mark.parametrize("strategy", first_of([FullShard(), ShardGradOp()]), ids=["FullShard", "ShardGradOp"])
def test_a_nested_sequential_is_split_and_cut_anywhere(strategy: Any, cut: int) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=MICRO), count=2, cuts=(cut,))
    check(nested, stages, strategy=strategy, micro=MICRO, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("cut", range(1, 9))
@pytest.mark.parametrize("strategy", [FullShard(), FullShard(weights=(1, 1, 3, 2))], ids=["FullShard", "weights"])
def test_such_stages_are_held_by_several_ranks_each(strategy: Any, cut: int) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=1), count=2, cuts=(cut,))
    check(nested, stages, strategy=strategy, ranks=4, micro=1, steps=3, slow=1)


class Skips(nn.Module):
    """What each of the first layers gave is added after a later one; and the first one's at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.enter(x), []
        for number, block in enumerate(self.blocks):
            h = torch.tanh(block(h) if number < 3 else block(h) + skips[5 - number])
            skips.append(h)
        return self.head(h) + skips[0]  # type: ignore[no-any-return]


def skips() -> Case:
    return Skips(), squares


@pytest.mark.parametrize("protocol", first_of(PROTOCOLS))
def test_long_skips_go_through_all_stages_between(protocol: str, tmp_path: Path) -> None:
    stages, micro = protocol_of(protocol, tmp_path)
    check(skips, Stages(protocol=stages, count=3, cuts=(2, 5)), ranks=3, micro=micro, steps=4, slow=1)


@pytest.mark.parametrize("schedule", first_of(["zero-bubble", "interleaved", "gpipe"]))
def test_long_skips_go_with_every_schedule(schedule: Any) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=MICRO, schedule=schedule), count=2)
    check(skips, stages, micro=MICRO, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp()], ids=["FullShard", "ShardGradOp"])
def test_long_skips_go_where_stages_are_split(strategy: Any) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=1), count=2)
    check(skips, stages, ranks=4, strategy=strategy, micro=1, steps=4, slow=2)


@dataclass
class Flow:
    x: Tensor
    aside: Tensor


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(WIDE, WIDE, batch_first=True)

    def forward(self, flow: Flow) -> Flow:
        x = flow.x + self.net(flow.x.unsqueeze(1))[0].squeeze(1)
        return Flow(x, flow.aside + x.square().mean())


class OddNet(nn.Module):
    """Two lists of layers, the second with one layer several times, that give each other dataclasses; checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.first = nn.ModuleList(OddBlock() for _ in range(2))
        self.second = nn.ModuleList([OddBlock()] * 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        start = self.enter(x)
        flow = Flow(start, start.square().mean())
        for layer in (*self.first, *self.second):
            flow = checkpoint(layer, flow, use_reentrant=False)
        return self.head(flow.x) + start, flow.aside


def odd() -> Case:
    return OddNet(), odd_loss


def odd_loss(model: nn.Module, batch: Any) -> Tensor:
    """Uses the graph, too."""
    found, aside = model(batch[0])
    found.register_hook(lambda gradient: 0.5 * gradient)
    return (found - batch[1]).square().mean() + 0.01 * aside  # type: ignore[no-any-return]


@pytest.mark.parametrize("protocol", first_of(PROTOCOLS))
def test_odd_layers_learn_what_one_process_learns(protocol: str, tmp_path: Path) -> None:
    stages, micro = protocol_of(protocol, tmp_path)
    check(odd, stages, micro=micro, steps=3, slow=0)


class Recomputed(nn.Module):
    def __init__(self, *, is_counted: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDE, track_running_stats=is_counted)
        self.layers = nn.ModuleList([nn.Linear(WIDE, WIDE), nn.Sequential(nn.Linear(WIDE, WIDE), norm)])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def test_a_layer_that_counts_is_not_computed_again_in_stages() -> None:
    batch = torch.randn(4, WIDE)
    for is_counted in (False, True):
        model = Recomputed(is_counted=is_counted)
        trace = ModelTrace(model, find_chain(model))
        if is_counted:
            with pytest.raises(ConfigError, match=r"Layer layers\.1\.1 runs within torch\.utils\.checkpoint and"):
                trace.run(lambda model, x: model(x).sum(), batch)
        else:
            trace.run(lambda model, x: model(x).sum(), batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FullShard(), ShardGradOp()], ids=["FullShard", "ShardGradOp"])
def test_odd_layers_go_where_stages_are_split(strategy: Any) -> None:
    stages = Stages(protocol=Pipeline(micro_batch_size=1), count=2)
    check(odd, stages, ranks=4, strategy=strategy, micro=1, steps=3, slow=3)
