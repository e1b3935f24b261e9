"""One step through Potluck, under `potluck run` or torchrun; rank 0 writes when it was done to the path it is given."""

import sys
import time
from pathlib import Path

import torch

import potluck
from potluck.train.model import GPT, ModelConfig, next_token_loss

fleet = potluck.init(step=potluck.StepConfig(clip=1.0))
torch.manual_seed(1)
model = GPT(ModelConfig())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
rows = torch.randint(256, (64, 257))
model, optimizer, loader = fleet.prepare(model, optimizer, rows, batch_size=4)
for batch in loader:
    loss, samples = next_token_loss(model, batch)
    fleet.backward(loss, samples=samples)
    fleet.step()
    break
done_at = time.time()
if fleet.rank == 0:
    Path(sys.argv[1]).write_text(str(done_at))
fleet.close()
