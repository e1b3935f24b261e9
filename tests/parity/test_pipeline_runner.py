"""The stages of a chain on real workers give the gradients of one process: every schedule, short micro-batches too."""

import pytest
import torch
from torch import Tensor, nn

from potluck.link.link import GroupLink, connect
from potluck.stages.direct import GroupChannel
from potluck.stages.pipeline import PipelineRunner
from potluck.stages.protocol import Schedule
from potluck.stages.schedule import per_worker, plan_orders
from tests.quick import first_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)) for _ in range(8)]


def rows() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """14 rows in micro-batches of 4: the last is short."""
    torch.manual_seed(1)
    return torch.randn(14, 16).split(4), torch.randn(14, 16).split(4)


class Part:
    def __init__(self, layers: list[nn.Module], inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...] | None) -> None:
        self.layers, self.inputs, self.targets = layers, inputs, targets

    def forward(self, micro: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = received[0] if received else self.inputs[micro]
        for layer in self.layers:
            x = layer(x)
        return (x if self.targets is None else ((x - self.targets[micro]) ** 2).mean(1).sum(),)

    def weights(self) -> list[nn.Parameter]:
        return [parameter for layer in self.layers for parameter in layer.parameters()]


def train(schedule: Schedule) -> dict[int, list[Tensor]]:
    link = connect(CPU, 30)
    assert isinstance(link, GroupLink)
    stages = link.world * per_worker(schedule)
    cuts = [8 * stage // stages for stage in range(stages + 1)]
    whole, (inputs, targets) = layers(), rows()
    mine = {
        stage: Part(whole[cuts[stage] : cuts[stage + 1]], inputs, targets if stage == stages - 1 else None)
        for stage in range(link.rank, stages, link.world)
    }
    line = PipelineRunner(mine, [1] * (stages - 1), GroupChannel(link.group, CPU, rank=link.rank, workers=link.world))
    orders = plan_orders(schedule, link.world, len(inputs))
    ends: list[bool] = []
    for step in range(2):
        for part in mine.values():
            for weight in part.weights():
                weight.grad = None
        line.run(step, orders, link.rank, before_backward=ends.append)
    assert ends.count(True) == 2 and ends[-1]
    assert line.times.busy_s > 0
    return {stage: [w.grad for w in part.weights() if w.grad is not None] for stage, part in mine.items()}


@pytest.mark.parametrize("workers", first_of([2, 3, 4]))
@pytest.mark.parametrize("schedule", first_of(["1f1b", "gpipe", "interleaved", "zero-bubble"]))
def test_every_schedule_gives_the_gradients_of_one_process(schedule: Schedule, workers: int) -> None:
    inputs, targets = rows()
    whole = Part(layers(), (torch.cat(inputs),), (torch.cat(targets),))
    whole.forward(0, ())[0].backward()
    found: dict[int, list[Tensor]] = {}
    for theirs in run_ranks(workers, train, schedule):
        found |= theirs
    flat = [gradient for stage in sorted(found) for gradient in found[stage]]
    for mine, judge in zip(flat, whole.weights(), strict=True):
        # Sums over micro-batches are formed in another order than over the whole batch.
        torch.testing.assert_close(mine, judge.grad, rtol=1e-5, atol=1e-6)
