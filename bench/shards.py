"""Sharded training as one writes it with PyTorch alone: the contenders of shard_step and h200_shard."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from bench.contenders import CLIP, LEARNING_RATE, Task
from potluck.train.model import next_token_loss


class BareSharded:
    """A loop around a model that is wrapped already."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def _read(self, task: Task) -> None:
        self.task = task
        self.batches = task.batches(dist.get_rank(), dist.get_world_size())

    def step(self) -> float:
        rows = next(self.batches)[0].to(self.task.device, non_blocking=True)
        loss, _ = next_token_loss(self.model, rows)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


class BareFsdp(BareSharded):
    """fully_shard for each block and for the model, with a mesh of one dimension or of two."""

    def __init__(self, task: Task, *shape: int) -> None:
        self._read(task)
        model, _ = task.build()
        shape = shape or (dist.get_world_size(),)
        mesh = init_device_mesh(task.device.type, shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy if task.fast else MixedPrecisionPolicy()}
        for block in model.blocks:
            if task.compiled:
                block.compile()
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


class BareZero(BareSharded):
    """DistributedDataParallel with ZeroRedundancyOptimizer."""

    def __init__(self, task: Task) -> None:
        self._read(task)
        model, _ = task.build()
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
        )
