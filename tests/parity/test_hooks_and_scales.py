"""Hooks and functions that are not linear see gradients of the scale that they would have in plain PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import potluck
from potluck import NoShard, ShardGradOp, StepConfig
from potluck.data.rows import mix
from potluck.errors import ConfigError
from tests.quick import first_of
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS = 27, 12, 3  # not a power of two, and the last batch of an epoch is short
LIMIT = 0.01


class Sign(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-LIMIT, LIMIT)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.middle, self.leave = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        return self.leave(Sign.apply(torch.tanh(self.middle(h))))  # type: ignore[no-any-return, no-untyped-call]


def make(on_parameters: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().double()
    for parameter in model.parameters() if on_parameters else ():
        parameter.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, 3 * x.sum(1, keepdim=True)


def judged(on_parameters: bool) -> dict[str, Tensor]:
    """In plain PyTorch."""
    torch.set_num_threads(1)
    model, optimizer = make(on_parameters)
    x, y = rows()
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            (model(x[part]) - y[part]).square().mean().backward()
            optimizer.step()
    return model.state_dict()


def ours(on_parameters: bool, options: dict[str, Any], samples_of_a_row: float = 1.0) -> dict[str, Tensor]:
    model, optimizer = make(on_parameters)
    with potluck.init(strategy=options["strategy"]) as fleet:
        micro = options.get("micro")
        model, _, loader = fleet.prepare(model, optimizer, rows(), batch_size=BATCH, micro_batch_size=micro)
        for _ in fleet.epochs(EPOCHS):
            for x, y in loader:
                fleet.backward((model(x) - y).square().mean(), samples=samples_of_a_row * len(x))
                fleet.step()
        return dict(model.state_dict())


@pytest.mark.parametrize("samples_of_a_row", first_of([1.0, 7.0]))
@pytest.mark.parametrize("strategy", first_of([NoShard(), ShardGradOp()]), ids=["whole", "split"])
def test_one_process_computes_the_bits_of_plain_pytorch_whatever_its_hooks_do(
    strategy: Any, samples_of_a_row: float
) -> None:
    found = ours(True, {"strategy": strategy}, samples_of_a_row)
    for name, tensor in judged(True).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", first_of([torch.float32, torch.float64]), ids=str)
@pytest.mark.parametrize("norm", first_of([1e-3, 0.3, 10.0, 1e9]))
def test_one_process_clips_to_the_bits_of_plain_pytorch(norm: float, dtype: torch.dtype) -> None:
    """AdamW makes much of a last bit: after 50 steps losses would differ in the third digit."""

    def net() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().to(dtype)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    x, y = (tensor.to(dtype) for tensor in rows())
    model, optimizer = net()
    with potluck.init(step=StepConfig(clip=norm)) as fleet:
        model, _, loader = fleet.prepare(model, optimizer, (x, y), batch_size=BATCH)
        for _ in fleet.epochs(EPOCHS):
            for a, b in loader:
                fleet.backward((model(a) - b).square().mean(), samples=len(a))
                fleet.step()
    found = dict(model.state_dict())
    model, optimizer = net()
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            (model(x[part]) - y[part]).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], LIMIT)


def clipped_in_a_hook(strategy: Any, late: bool, fused: bool) -> dict[str, Tensor] | str:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    x, y = rows()
    with potluck.init(strategy=strategy, patience_s=60) as fleet:
        try:
            if not late:
                optimizer.register_step_pre_hook(clip)
            model, _, loader = fleet.prepare(model, optimizer, (x, y), batch_size=ROWS)
            if late:
                optimizer.register_step_pre_hook(clip)
            for _ in fleet.epochs(EPOCHS):
                for a, b in loader:
                    fleet.backward((model(a) - b).square().mean(), samples=len(a))
                    fleet.step()
        except ConfigError as error:
            return str(error)
        return dict(model.state_dict())


@pytest.mark.parametrize("fused", first_of([True, False]))
def test_a_step_pre_hook_sees_the_whole_gradient_or_is_refused(fused: bool) -> None:
    torch.set_num_threads(1)
    x, y = rows()
    judge = Net().double()
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        (judge(x) - y).square().mean().backward()
        clip(optimizer)
        optimizer.step()
    for found in run_ranks(2, clipped_in_a_hook, NoShard(), False, fused):
        torch.testing.assert_close(found, judge.state_dict(), atol=1e-12, rtol=1e-12)
    for late in (True, False):
        for said in run_ranks(2, clipped_in_a_hook, ShardGradOp(), late, False):
            assert "SGD has a step_pre_hook" in said


@pytest.mark.parametrize(
    "options",
    first_of([{"strategy": NoShard()}, {"strategy": ShardGradOp()}, {"strategy": NoShard(), "micro": 2}]),
    ids=["whole", "split", "micro-batches"],
)
def test_hooks_on_activations_see_the_gradients_of_one_process_on_several_ranks(options: dict[str, Any]) -> None:
    for found in run_ranks(2, ours, False, options):
        torch.testing.assert_close(found, judged(False), atol=1e-12, rtol=1e-12)
