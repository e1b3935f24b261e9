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
WIDE, NARROW = torch.float64, torch.float32
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
        self.layer, self.norm = nn.Linear(8, 8, dtype=WIDE), nn.LayerNorm(8, dtype=NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x.to(NARROW)).to(WIDE)))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, dtype=WIDE), Block(), Block(), Block(), nn.Linear(8, 1, dtype=WIDE))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 4, dtype=WIDE, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def judged() -> dict[str, Tensor]:
    """In plain PyTorch."""
    torch.set_num_threads(1)
    model, optimizer = make()
    x, y = rows()
    for epoch in range(EPOCHS):
        for part in torch.randperm(ROWS, generator=torch.Generator().manual_seed(mix(0, epoch))).split(BATCH):
            optimizer.zero_grad()
            (model(x[part]) - y[part]).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return model.state_dict()


def ours(forms: list[Any], folder: str = "", stop_after: int = 1 << 30) -> list[dict[str, Tensor]]:
    found, meeting = [], os.environ["POTLUCK_RENDEZVOUS"]
    for number, (strategy, offload) in enumerate(forms):
        zero.BUCKET_BYTES = 8 << 20 if number % 2 else 700
        os.environ["POTLUCK_RENDEZVOUS"] = f"{meeting} {number}"
        model, optimizer = make()
        with potluck.init(strategy=strategy, step=StepConfig(clip=CLIP, offload_optimizer=offload)) as fleet:
            model, _, loader = fleet.prepare(model, optimizer, rows(), batch_size=BATCH)
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
