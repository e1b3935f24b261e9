"""The step of startup_script.py with bare DistributedDataParallel; to be run under torchrun."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from potluck.train.model import GPT, ModelConfig, next_token_loss

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(GPT(ModelConfig()), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
rows = TensorDataset(torch.randint(256, (64, 257)))
for (batch,) in DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows)):
    loss, _ = next_token_loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    break
done_at = time.time()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(str(done_at))
dist.destroy_process_group()
