"""plain.py on many devices, of any speeds, that come and go.

python examples/port/with_potluck.py
potluck run -n 2 examples/port/with_potluck.py
potluck host -n 2 examples/port/with_potluck.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import potluck

EPOCHS = 3


def blobs(rows: int, seed: int) -> TensorDataset:
    """Pictures of 16 x 16 with a bright patch in one of four corners, under much noise."""
    draw = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 4, (rows,), generator=draw)
    pictures = torch.randn(rows, 1, 16, 16, generator=draw)
    for picture, where in zip(pictures, corner.tolist(), strict=True):
        top, left = 8 * (where // 2), 8 * (where % 2)
        picture[0, top : top + 8, left : left + 8] += 0.25
    return TensorDataset(pictures, corner)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def accuracy(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def main() -> None:
    torch.manual_seed(0)
    fleet = potluck.init(step=potluck.StepConfig(clip=1.0))
    device = fleet.device
    train = DataLoader(blobs(2000, 1), batch_size=32, shuffle=True, num_workers=2)
    test = DataLoader(blobs(500, 2), batch_size=100)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train))
    model, optimizer, train = fleet.prepare(model, optimizer, train, scheduler=scheduler)

    for epoch in fleet.epochs(EPOCHS):
        model.train()
        for pictures, corners in train:
            pictures, corners = pictures.to(device), corners.to(device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(pictures), corners)
            optimizer.zero_grad()
            fleet.backward(loss, samples=len(pictures))
            optimizer.step()
            scheduler.step()

        fleet.print(f"epoch {epoch + 1}: accuracy {fleet.evaluate(accuracy, test)['accuracy']:.3f}")
        fleet.save("checkpoint")


if __name__ == "__main__":
    main()
