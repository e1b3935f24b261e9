"""One call that splits a model and its optimizer over ranks, by whatever strategy."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from potluck.environment import free_memory_bytes
from potluck.errors import ConfigError
from potluck.sharding.blocks import find_blocks, fits_fully_shard
from potluck.sharding.collectives import Collectives
from potluck.sharding.fsdp import FullySharded
from potluck.sharding.sharded import Sharded, SplitRequest
from potluck.sharding.strategy import FullShard, HybridShard, ShardGradOp, ShardingStrategy
from potluck.sharding.uneven import UnevenShards
from potluck.sharding.zero import ShardedOptimizer
from potluck.system import own_memory_limit


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
    model: nn.Module, optimizer: Optimizer, strategy: ShardingStrategy, device: torch.device, **how: Any
) -> Sharded:
    """Splits a model over all ranks of the default process group, or over those of `group`. `how`: see SplitRequest."""
    how = {"blocks": find_blocks(model)} | how
    how.setdefault("own_units", not fits_fully_shard(model, how["blocks"]))
    wanted = SplitRequest(model, optimizer, device, **how)
    build = next((BUILDERS[kind] for kind in type(strategy).__mro__ if kind in BUILDERS), None)
    if build is None:
        raise ConfigError(f"{type(strategy).__name__} splits nothing.")
    if wanted.own_units and wanted.offload and device.type == "cuda" and not strategy.keeps_parameters_whole:
        raise ConfigError(
            "step.offload_optimizer does not go with FullShard where parameters have hooks or no dimension, are complex"
            " or not contiguous, or are of several types in one block. Leave it out, or use ShardGradOp."
        )
    return build(strategy, wanted)


def _shard_grad_op(strategy: ShardGradOp, wanted: SplitRequest) -> Sharded:
    return ShardedOptimizer(
        wanted.model.to(wanted.device),
        wanted.optimizer,
        weights=_weights(strategy, wanted),
        mean=wanted.mean,
        keep_gradients=strategy.keep_gradients,
        offload=wanted.offload,
        group=wanted.group,
    )


def _full_shard(strategy: FullShard, wanted: SplitRequest) -> Sharded:
    weights = _weights(strategy, wanted)
    if weights is not None or wanted.own_units:
        return UnevenShards(wanted, weights)
    return FullySharded(wanted, _mesh_over(wanted.device, wanted.group, None, (_world(),)))


def _hybrid_shard(strategy: HybridShard, wanted: SplitRequest) -> Sharded:
    nodes = strategy.nodes(_world()) if wanted.group is None else 1
    shape = (nodes, strategy.intra_node_size) if nodes > 1 else (_world(),)
    mesh = _mesh_over(wanted.device, wanted.group, wanted.nodes, shape)
    if not wanted.own_units:
        return FullySharded(wanted, mesh)
    over_nodes = mesh.get_group(0) if mesh.ndim == 2 else None
    return UnevenShards(replace(wanted, group=mesh.get_group(mesh.ndim - 1), nodes=over_nodes))


BUILDERS: dict[type, Callable[[Any, SplitRequest], Sharded]] = {
    ShardGradOp: _shard_grad_op,
    FullShard: _full_shard,
    HybridShard: _hybrid_shard,
}
"""How each strategy splits a model; one that is not here splits as the class that it is derived from."""


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _mesh_over(
    device: torch.device, group: dist.ProcessGroup | None, nodes: dist.ProcessGroup | None, shape: tuple[int, ...]
) -> DeviceMesh:
    """Make a mesh over groups that exist: making a mesh makes groups, and other ranks may be making another mesh."""
    if group is None:
        return _mesh(device, shape)
    if nodes is None:
        return DeviceMesh.from_group(group, device.type)
    own = dist.get_process_group_ranks(group)
    grid = [[rank - dist.get_rank() + each for each in own] for rank in dist.get_process_group_ranks(nodes)]
    return DeviceMesh.from_group([nodes, group], device.type, torch.tensor(grid), mesh_dim_names=("nodes", "ranks"))


def _mesh(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    if not dist.is_initialized():  # alone: fully_shard wants a group all the same
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, shape, mesh_dim_names=("nodes", "ranks")[-len(shape) :])


def _weights(strategy: FullShard | ShardGradOp, wanted: SplitRequest) -> list[float] | None:
    def all_free() -> list[float]:
        over = Collectives(wanted.group)
        told = torch.zeros(over.world, dtype=torch.float64)
        told[over.rank] = free_bytes(wanted.device)
        over.start_sum(told).wait()
        return told.tolist()

    return strategy.weights_over(all_free)


def free_bytes(device: torch.device) -> int:
    """Return the memory that a device has left now; for a CPU, of this process's own limit or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if (limit := own_memory_limit()) is None:
        return free_memory_bytes()
    return max(0, min(free_memory_bytes(), limit - getattr(psutil.Process().memory_info(), "data", 0)))


def _device() -> torch.device:
    """Choose the device where the model is to live: this rank's GPU, if there is any."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
