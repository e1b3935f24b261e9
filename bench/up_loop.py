"""One loop twice, through Potluck and with bare DistributedDataParallel: when its first step was done, and how long the
others took. Rank 0 leaves both in the file that it is given.

python up_loop.py ours|bare FILE STEPS
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from potluck.train.model import GPT, ModelConfig, next_token_loss

BATCH = 8


class Clock:
    def __init__(self, file: str, is_first: bool) -> None:
        self.file, self.is_first, self.done_at = Path(file), is_first, list[float]()

    def tick(self) -> None:
        self.done_at.append(time.time())

    def write(self) -> None:
        steps = [after - before for before, after in zip(self.done_at, self.done_at[1:], strict=False)]
        if self.is_first:
            self.file.write_text(json.dumps({"first_at": self.done_at[0], "steps_s": steps}))


def ours(file: str, steps: int) -> None:
    import potluck

    fleet = potluck.init("sync", step=potluck.StepConfig(clip=1.0))
    torch.manual_seed(1)
    model = GPT(ModelConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = torch.randint(256, (BATCH * steps, 257))
    model, optimizer, loader = fleet.prepare(model, optimizer, rows, batch_size=BATCH)
    clock = Clock(file, fleet.rank == 0)
    fleet.after_step.append(clock.tick)  # under a host a pass of this loop may be a part of a step
    for batch in loader:
        loss, samples = next_token_loss(model, batch)
        fleet.backward(loss, samples=samples)
        fleet.step()
    assert len(clock.done_at) == steps, f"{len(clock.done_at)} steps, and not {steps}"
    clock.write()
    fleet.close()


def bare(file: str, steps: int, prepare: Callable[[torch.nn.Module], torch.nn.Module] | None = None) -> None:
    """`prepare`: makes a DistributedDataParallel in a group that is there already."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    if prepare is None:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    plain = GPT(ModelConfig())
    model = prepare(plain) if prepare else DistributedDataParallel(plain, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = TensorDataset(torch.randint(256, (BATCH * steps, 257)))
    clock = Clock(file, dist.get_rank() == 0)
    loader = DataLoader(rows, batch_size=BATCH // dist.get_world_size(), sampler=DistributedSampler(rows))
    for (batch,) in loader:
        loss, _ = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        clock.tick()
    assert len(clock.done_at) == steps, f"{len(clock.done_at)} steps, and not {steps}"
    clock.write()
    if prepare is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    {"ours": ours, "bare": bare}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
