"""One call that splits a model and its optimizer over ranks, by whatever strategy."""

import difflib
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.shard.blocks import find_blocks
from potluck.shard.collectives import Collectives
from potluck.shard.fsdp import FullySharded
from potluck.shard.sharded import Sharded
from potluck.shard.strategy import FullShard, HybridShard, ShardGradOp, ShardingStrategy
from potluck.shard.uneven import UnevenShards
from potluck.shard.zero import ShardedOptimizer


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: ShardingStrategy = FullShard(),
    *,
    blocks: Sequence[str] = (),
    bf16: bool = False,
) -> Sharded:
    """Splits a model and its optimizer over all ranks of the default process group, for a loop of your own.

        sharded = potluck.shard(model, torch.optim.AdamW(model.parameters()), FullShard())
        loss_of(model, batch).backward()
        sharded.step()
        sharded.share()

    The gradient is the mean over the ranks. `blocks` names the modules that are whole only while they compute; the
    model's repeated layers are found by themselves. Trainer and prepare() do all of this for you.
    """
    return shard_over(model, optimizer, strategy, _device(), bf16=bf16, blocks=named_blocks(model, blocks))


def named_blocks(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names; without names, the model's repeated layers."""
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"The model has no module {name!r}." + (f" Did you mean {near[0]}?" if near else ""))
    return [known[name] for name in names] or find_blocks(model)


def shard_over(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: ShardingStrategy,
    device: torch.device,
    *,
    mean: bool = True,
    bf16: bool = False,
    offload: bool = False,
    blocks: Sequence[nn.Module] | None = None,
    group: dist.ProcessGroup | None = None,
    nodes: dist.ProcessGroup | None = None,
) -> Sharded:
    """Splits a model over all ranks of the default process group, or over those of `group`.

    `nodes`: then under HybridShard `group` is one node of several, and these are the ranks of our place in each.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    match strategy:
        case ShardGradOp():
            model.to(device)
            weights = _weights(strategy.weights, device, group)
            return ShardedOptimizer(
                model,
                optimizer,
                weights=weights,
                mean=mean,
                keep_gradients=strategy.keep_gradients,
                offload=offload,
                group=group,
            )
        case FullShard() if strategy.weights:
            weights = _weights(strategy.weights, device, group)
            return UnevenShards(
                model, optimizer, blocks=blocks, device=device, weights=weights, bf16=bf16, mean=mean, group=group
            )
        case FullShard():
            mesh = DeviceMesh.from_group(group, device.type) if group is not None else _mesh(device, (world,))
        case HybridShard() if group is not None:
            mesh = _mesh_of_groups(device, group, nodes)
        case HybridShard():
            many = strategy.nodes(world)
            mesh = _mesh(device, (many, strategy.intra_node_size) if many > 1 else (world,))
        case _:
            raise ConfigError("NoShard splits nothing.")
    return FullySharded(model, optimizer, blocks=blocks, mesh=mesh, bf16=bf16, offload=offload, mean=mean)


def _mesh(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    if not dist.is_initialized():  # alone: fully_shard wants a group all the same
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])


def _mesh_of_groups(device: torch.device, node: dist.ProcessGroup, nodes: dist.ProcessGroup | None) -> DeviceMesh:
    """Of groups that are there: making a mesh would make groups, and other ranks may be making another mesh."""
    if nodes is None:
        return DeviceMesh.from_group(node, device.type)
    own = dist.get_process_group_ranks(node)
    grid = [[rank - dist.get_rank() + each for each in own] for rank in dist.get_process_group_ranks(nodes)]
    return DeviceMesh.from_group([nodes, node], device.type, torch.tensor(grid), mesh_dim_names=("nodes", "ranks"))


def _weights(weights: Any, device: torch.device, group: dist.ProcessGroup | None) -> list[float] | None:
    if not weights:
        return None
    if weights == "memory":
        over = Collectives(group)
        told = torch.zeros(over.world, dtype=torch.float64)
        told[over.rank] = free_bytes(device)
        over.start_sum(told).wait()
        return told.tolist()
    return list(weights)


def free_bytes(device: torch.device) -> int:
    """What a device has left, as it is now: for a CPU, of this process's own limit or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    available = _kilobytes("/proc/meminfo", "MemAvailable")
    if limit == resource.RLIM_INFINITY:
        return available
    return max(0, min(available, limit - _kilobytes("/proc/self/status", "VmData")))


def _kilobytes(file: str, name: str) -> int:
    """Of a line such as `VmData:  1234 kB`, in bytes."""
    lines = Path(file).read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def _device() -> torch.device:
    """Where the model is to live: this rank's GPU, if there is any."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
