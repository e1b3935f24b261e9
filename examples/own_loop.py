"""Your own loop, on as many workers as you start.

    potluck run -n 2 examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py
    python examples/own_loop.py

Each prints the same losses: a batch is 32 rows whatever the number of workers, and gradients are averaged by rows.
"""

import torch
import torch.nn.functional as F
from torch import nn

import potluck

ROWS, BATCH = 2000, 32
EPOCHS = 3
STEPS = EPOCHS * -(-ROWS // BATCH)


def spirals(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two spirals that a straight line cannot tell apart."""
    draw = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 2, (rows,), generator=draw)
    turn = 3 * torch.rand(rows, generator=draw).sqrt()
    angle = 3.1 * turn + 3.1416 * arm
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    return points + 0.1 * torch.randn(rows, 2, generator=draw), arm


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    fleet = potluck.init()
    model, optimizer, loader = fleet.prepare(model, optimizer, spirals(ROWS), batch_size=BATCH, scheduler=scheduler)

    for epoch in fleet.epochs(EPOCHS):  # from where the run stands: after a resume, or where it was joined
        for points, arm in loader:
            loss = F.cross_entropy(model(points), arm)
            fleet.backward(loss, samples=len(points))
            fleet.step()
        if fleet.rank == 0:
            loss = fleet.last_step.loss
            print(f"epoch {epoch + 1}: loss {loss:.4f}, world of {fleet.world}. {fleet.last_epoch.sentence}")
    fleet.close()


if __name__ == "__main__":
    main()
