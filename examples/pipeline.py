"""One model over several workers: each has some of the layers, and micro-batches flow through all of them.

    potluck run -n 3 examples/pipeline.py
    python examples/pipeline.py

Both print the same losses: where a model is cut changes nothing in what it learns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import potluck

EPOCHS = 2


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.relu(self.inner(x))))


def data(rows: int) -> tuple[Tensor, Tensor]:
    """Fifteen numbers, and which third of them has the largest sum."""
    x = torch.randn(rows, 15, generator=torch.Generator().manual_seed(0))
    return x, x.unflatten(1, (3, 5)).sum(2).argmax(1)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 64), *(Layer(64) for _ in range(6)), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    fleet = potluck.init(stages=potluck.Pipeline(micro_batch_size=8))
    model, optimizer, loader = fleet.prepare(model, optimizer, data(2000), batch_size=64, loss=loss_of)
    if fleet.rank == 0:
        print(fleet.layout)

    for epoch in fleet.epochs(EPOCHS):
        for batch in loader:
            fleet.train(loss_of, batch)
            fleet.step()
        if fleet.rank == 0:
            print(f"epoch {epoch + 1}: loss {fleet.last_step.loss:.4f}. {fleet.last_epoch.sentence}")
    fleet.close()


if __name__ == "__main__":
    main()
