"""The whole run from one call: progress, validation, checkpoints, Ctrl-C and --resume included.

potluck run -n 2 examples/trainer.py
potluck run -n 2 examples/trainer.py --resume
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck
from potluck import CheckpointConfig, FitConfig, ScheduleConfig


class Sines(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Any map-style dataset will do: this one makes a row when it is asked for it."""

    def __init__(self, rows: int, start: int) -> None:
        self.rows, self.start = rows, start

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(1, generator=torch.Generator().manual_seed(self.start + row)) * 6 - 3
        return x, torch.sin(2 * x)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    fleet = potluck.init()
    trainer = potluck.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        Sines(4000, start=0),
        loss=loss_of,
        batch_size=64,
        folder="runs/sines",
        validation=Sines(500, start=1_000_000),
        engine=fleet,
        config=FitConfig(epochs=4, schedule=ScheduleConfig(), checkpoint=CheckpointConfig(every=100)),
    )
    summary = trainer.fit(resume="--resume" in sys.argv)
    if fleet.rank == 0:
        print(f"validation loss {summary.validation_loss:.5f}, saved in {summary.checkpoint}")
    fleet.close()


if __name__ == "__main__":
    main()
