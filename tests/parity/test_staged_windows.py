"""Replicas of two stages under Cadence and Async: each steps by itself, against plain replicas stepped in turn."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import Async, Cadence, Direct, HybridShard, NoShard, Pipeline, Stages, StepConfig
from potluck.events import Decided, EpochDone
from potluck.stages import stage_planner
from tests.gathered import gathered
from tests.parity import test_cadence
from tests.parity.test_cadence import OPTIMIZERS, POLICIES, ROWS, Net, judge, through
from tests.parity.test_hybrid_windows import by_node, through_node
from tests.quick import first_of
from tests.ranks import RankFailed, run_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(Net):
    """Running statistics before the layers, and a parameter that stays as it is after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        for layer in self.layers:
            x = layer(x)
        return self.leave(torch.tanh(x)) * self.frozen


def make(seed: int = 3) -> tuple[Chain, tuple[Tensor, Tensor]]:
    data = test_cadence.make(seed)[1]
    torch.manual_seed(seed)
    return Chain(), data


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def ours(policy: Any, optimizer_name: str, batch_size: int, stages: Any, strategy: Any = NoShard()) -> dict[str, Any]:
    stage_planner.MEASURE_S = 0.0  # what a cut is balanced by does not matter here
    with potluck.init(policy, strategy, stages=stages, step=StepConfig(clip=1.0), patience_s=30) as fleet:
        model, data = make()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        model, _, loader = fleet.prepare(model, optimizer, data, batch_size=batch_size, loss=loss_of)
        windows: list[list[list[list[int]]]] = [[]]
        rows: list[list[int]] = []
        events: list[Any] = []
        fleet.events.listeners.append(events.append)
        fleet.after_agreement.append(lambda: windows.append([]))
        for epoch in range(2):
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
            for batch in loader:
                rows.append(order[loader.current.start : loader.current.end] if loader.current.counts else [])
                fleet.train(loss_of, batch)
                if loader.current.last:
                    windows[-1].append(rows)
                    rows = []
                fleet.step()
        return {
            "weights": {name: gathered(tensor) for name, tensor in model.state_dict().items()},
            "windows": windows,
            "epochs": [[event.used, event.total, event.same_weights] for event in events if type(event) is EpochDone],
            "reasons": [event.reason for event in events if isinstance(event, Decided)],
            "evaluated": fleet.evaluate(loss_of, data, 16),
        }


def together(told: list[dict[str, Any]]) -> Tensor:
    """All workers' weights as one model's, in its order; whoever has the same has it to the bit."""
    found: dict[str, Tensor] = {}
    for each in told:
        for name, tensor in each["weights"].items():
            assert name not in found or torch.equal(found[name], tensor), name
            found[name] = tensor
    model = make()[0]
    parameters = [found[name].reshape(-1) for name, _ in model.named_parameters()]
    return torch.cat([*parameters, found["norm.running_mean"], found["norm.running_var"]])


@pytest.mark.parametrize(
    ("policy", "optimizer", "batch", "protocol"),
    first_of(
        [
            ("cadence", "adamw", 24, Pipeline(micro_batch_size=4)),
            ("async", "sgd", 25, Pipeline(micro_batch_size=5, schedule="zero-bubble")),
            ("cadence", "sgd", 24, Direct()),
            ("async", "sgd", 15, Pipeline(micro_batch_size=3, schedule="gpipe")),
        ]
    ),
)
def test_replicas_of_stages_end_where_replicas_stepped_in_turn_end(
    policy: str, optimizer: str, batch: int, protocol: Any
) -> None:
    stages = Stages(protocol=protocol, count=2)
    told = run_ranks(4, ours, POLICIES[policy], optimizer, batch, stages)
    for rank in told:
        assert rank["epochs"] == [[ROWS, ROWS, True]] * 2
        assert rank["reasons"] == told[0]["reasons"]
        assert rank["evaluated"] == told[0]["evaluated"]
    assert told[0]["windows"] == told[1]["windows"] and told[2]["windows"] == told[3]["windows"]
    expected = judge(POLICIES[policy], optimizer, told[::2], make, through)
    # Sums of floats in another order, in the norm that clips; a few dozen steps carry that along.
    torch.testing.assert_close(together(told), expected, atol=5e-5, rtol=2e-4)


@pytest.mark.slow
def test_stages_that_are_split_average_their_parts() -> None:
    """Two replicas of two stages of two ranks: eight workers."""
    stages = Stages(protocol=Pipeline(micro_batch_size=4), count=2)
    told = run_ranks(8, ours, Cadence.published(anchor=2), "adamw", 24, stages, HybridShard(intra_node_size=2))
    for rank in told:
        assert rank["epochs"] == [[ROWS, ROWS, True]] * 2
    pipelines = by_node([told[0], told[1], told[4], told[5]])
    expected = judge(Cadence.published(anchor=2), "adamw", pipelines, make, through_node)
    torch.testing.assert_close(together(told), expected, atol=5e-5, rtol=2e-4)


def test_one_replica_alone_has_nothing_to_average_with() -> None:
    with pytest.raises(RankFailed, match=r"There is one replica of 2 stages, and nothing to average with. Start"):
        run_ranks(2, ours, Async.published(), "sgd", 24, Direct())
    with pytest.raises(RankFailed, match=r"3 workers cannot hold replicas of 2 stages. Start a multiple of 2"):
        run_ranks(3, ours, Async.published(), "sgd", 24, Stages(protocol=Direct(), count=2))
