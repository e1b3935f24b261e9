"""Weights that lie in memory in another order than that of their elements, as channels_last has them.

Fused optimizers go through the memory of a weight, its gradient and its moments alike, so all of them lie alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import FullShard, NoShard, ShardGradOp, StepConfig
from potluck.replica.moments import Moments
from potluck.sharding.runs import FlatRun, Span
from tests.ranks import run_ranks

ROWS, STEPS = 8, 4
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
CASES: dict[str, dict[str, Any]] = {
    "whole": {"strategy": NoShard()},
    "offloaded": {"strategy": NoShard(), "step": StepConfig(offload_optimizer=True)},
    "zero2": {"strategy": ShardGradOp()},
    "full": {"strategy": FullShard()},
}


def make(name: str, memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3)).double().to(memory_format=memory_format)
    return model, OPTIMIZERS[name](model.parameters())


def data() -> Tensor:
    return torch.randn(ROWS, 2, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def train(folder: str, memory_formats: tuple[torch.memory_format, ...]) -> dict[str, dict[str, Tensor]]:
    """Half of the steps, and the others by a run that has loaded them."""
    found = {}
    with potluck.init() as first:
        for name in OPTIMIZERS:
            for case, given in CASES.items():
                place = Path(folder, f"{name} {case}")
                for _ in range(2):
                    model, optimizer = make(name, memory_formats[first.rank])
                    fleet = potluck.init(**given)
                    fleet.prepare(model, optimizer)
                    fleet.load(place)
                    rows = data()[fleet.rank * ROWS // fleet.world : (fleet.rank + 1) * ROWS // fleet.world]
                    for _ in range(STEPS // 2):
                        fleet.backward(model(rows).square().mean(), samples=len(rows))
                        fleet.step()
                    fleet.save(place)
                    fleet.wait_for_saves()
                found[f"{name} {case}"] = fleet.state_dict()
    return found


@pytest.mark.parametrize(
    "memory_formats",
    [
        pytest.param((torch.channels_last, torch.channels_last), id="channels_last"),
        pytest.param((torch.channels_last, torch.contiguous_format), id="each its own"),
    ],
)
def test_fused_optimizers_step_weights_of_any_memory_format_also_where_their_state_was_loaded(
    memory_formats: tuple[torch.memory_format, ...], tmp_path: Path
) -> None:
    expected = {}
    for name in OPTIMIZERS:
        model, optimizer = make(name, torch.contiguous_format)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(data()).square().mean().backward()
            optimizer.step()
        expected[name] = model.state_dict()
    found, _ = run_ranks(2, train, str(tmp_path), memory_formats)
    for case, weights in found.items():
        for key, want in expected[case.split()[0]].items():
            assert torch.allclose(weights[key], want, rtol=1e-9, atol=1e-12), (case, key)


def test_moments_that_a_replica_is_given_with_the_mean_lie_as_its_weights_do() -> None:
    parameter = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    moments = Moments(optimizer, {id(parameter): "p"}, [[FlatRun(parameter, Span("p", (2, 3, 4, 4), 0, 96))]])
    for flat in moments.flats:
        flat.copy_(torch.arange(96.0))
    moments.counts.fill_(1.0)
    moments.take()
    kept = optimizer.state[parameter]
    assert torch.equal(kept["exp_avg"], torch.arange(96.0).view(2, 3, 4, 4))
    assert kept["exp_avg"].stride() == kept["exp_avg_sq"].stride() == parameter.stride()


class Begun(torch.optim.Optimizer):
    """It begins what it keeps when it is made, as Adagrad does in older versions of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(0.1 * self.state[parameter]["sum"].add_(parameter.grad))


def test_a_parameter_of_no_numbers_keeps_what_its_optimizer_began_it_with_over_a_load(tmp_path: Path) -> None:
    """Where a checkpoint has nothing of it, as one that was split has not."""
    for steps in (1, 2):
        model = nn.ParameterDict({"some": torch.ones(2), "none": torch.ones(0)})
        optimizer = Begun(model.parameters())
        used = [model["some"]] if steps == 1 else [model["some"], model["none"]]
        if steps == 1:
            optimizer.state.pop(model["none"])
        with potluck.init() as fleet:
            fleet.prepare(model, optimizer)
            assert fleet.load(tmp_path) == (steps > 1)
            fleet.backward(torch.cat(used).sum(), samples=1)
            fleet.step()
            fleet.save(tmp_path)
        assert torch.allclose(model["some"], torch.tensor(1 - 0.1 * sum(range(1, steps + 1))).expand(2))
