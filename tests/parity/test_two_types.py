"""ShardGradOp with parameters of two types, as a bf16 model with norms in float32 has them: against plain PyTorch."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import potluck
from potluck import NoShard, ShardGradOp, StepConfig
from potluck.data.rows import mix
from potluck.sharding import zero
from tests.ranks import run_ranks

ROWS, BATCH, EPOCHS, CLIP = 24, 8, 2, 0.5
Types = tuple[torch.dtype, torch.dtype]
TYPES: Types = (torch.float64, torch.float32)
HALF: Types = (torch.bfloat16, torch.float32)
"""Of layers, and of norms."""
FORMS: list[Any] = [
    (ShardGradOp(), False),
    (ShardGradOp(weights=(5.0, 2.0)), False),
    (ShardGradOp(keep_gradients=True), False),
    (ShardGradOp(), True),
]


class Block(nn.Module):
    """A layer of the one type and a norm of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)))


def make(types: Types) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), Block(), nn.Linear(8, 1)).bfloat16()  # in any type alike
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.to(types[isinstance(module, nn.LayerNorm)])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def rows(types: Types) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x.to(types[0]), x.sum(1, keepdim=True).to(types[0])


def judged(types: Types = TYPES) -> dict[str, Tensor]:
    """In plain PyTorch."""
    torch.set_num_threads(1)
    model, optimizer = make(types)
    x, y = rows(types)
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            (model(x[part]) - y[part]).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return model.state_dict()


def ours(
    forms: list[Any], folder: str = "", stop_after: int = 1 << 30, types: Types = TYPES
) -> list[dict[str, Tensor]]:
    found, meeting = [], os.environ["POTLUCK_RENDEZVOUS"]
    for number, (strategy, offload) in enumerate(forms):
        zero.BUCKET_BYTES = 8 << 20 if number % 2 else 700
        os.environ["POTLUCK_RENDEZVOUS"] = f"{meeting} {number}"
        model, optimizer = make(types)
        with potluck.init(strategy=strategy, step=StepConfig(clip=CLIP, offload_optimizer=offload)) as fleet:
            model, _, loader = fleet.prepare(model, optimizer, rows(types), batch_size=BATCH)
            if folder:
                fleet.load(folder)
            for _ in fleet.epochs(EPOCHS):
                for x, y in loader:
                    fleet.backward((model(x) - y).square().mean(), samples=len(x))
                    fleet.step()
                    if fleet.step_number == stop_after:
                        fleet.save(folder)
                        fleet.wait_for_saves()
                        return []
            found.append(dict(model.state_dict()))
    return found


def test_parameters_of_two_types_are_split_in_every_form() -> None:
    for each in run_ranks(2, ours, FORMS):
        for found in each:
            torch.testing.assert_close(found, judged(), atol=1e-6, rtol=1e-5)


def test_what_was_saved_of_two_types_continues_on_one_rank(tmp_path: Path) -> None:
    run_ranks(2, ours, [(ShardGradOp(), False)], str(tmp_path), 4)
    ((found,),) = run_ranks(1, ours, [(NoShard(), False)], str(tmp_path))
    torch.testing.assert_close(found, judged(), atol=1e-6, rtol=1e-5)


def test_a_model_in_bf16_with_norms_in_float32_ends_as_near_to_the_truth_as_in_one_process() -> None:
    truth, plain = judged((torch.float64, torch.float64)), judged(HALF)

    def off(found: dict[str, Tensor]) -> float:
        return torch.cat([(found[name] - each).double().reshape(-1) for name, each in truth.items()]).norm().item()

    for found in run_ranks(2, ours, FORMS, "", 1 << 30, HALF)[0]:
        assert [each.dtype for each in found.values()] == [each.dtype for each in plain.values()]
        assert off(found) < 1.5 * off(plain)
