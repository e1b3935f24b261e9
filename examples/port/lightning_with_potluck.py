"""lightning_plain.py on many devices, of any speeds, that come and go.

python examples/port/lightning_with_potluck.py
potluck run -n 2 examples/port/lightning_with_potluck.py
potluck host -n 2 examples/port/lightning_with_potluck.py
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import potluck.integrations.lightning  # noqa: F401


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)}


def rows(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=draw)
    return TensorDataset(x, x[:, :4].argmax(1))


def main() -> None:
    L.seed_everything(0)
    order = torch.Generator().manual_seed(5)
    train = DataLoader(rows(500, 1), batch_size=32, shuffle=True, generator=order)
    trainer = L.Trainer(max_epochs=5, gradient_clip_val=0.5, logger=False, strategy="potluck")
    trainer.fit(Classifier(), train, DataLoader(rows(100, 2), batch_size=50))
    print(f"validation loss {trainer.callback_metrics['val_loss']:.6f}")
    trainer.save_checkpoint("lightning-run/last.ckpt")


if __name__ == "__main__":
    main()
