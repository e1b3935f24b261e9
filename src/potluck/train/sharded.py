"""A replica that is split over ranks: the strategies of shard/, behind what an engine asks of a replica."""

import hashlib
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.shard.fsdp import FullySharded
from potluck.shard.sharded import Sharded
from potluck.shard.strategy import FullShard, HybridShard, ShardGradOp, ShardingStrategy
from potluck.shard.uneven import UnevenShards
from potluck.shard.zero import ShardedOptimizer
from potluck.train.replica import Replica, as_bytes, find_blocks, switch_on


class ShardedReplica(Replica):
    sharded: Sharded

    def __init__(self, *arguments: Any, strategy: ShardingStrategy, **options: Any) -> None:
        self.strategy = strategy
        super().__init__(*arguments, **options)

    @property
    def in_step(self) -> bool:  # type: ignore[override]
        return self.sharded.in_step

    def _place(self) -> None:
        """Where parameters are split too, they reach the device block by block, and never all at once."""
        if isinstance(self.strategy, ShardGradOp):
            super()._place()

    def _switch_on(self) -> None:
        switch_on(self.model, self.device, self.config, autocast=isinstance(self.strategy, ShardGradOp))

    def _prepare_sums(self, *, sums_gradients: bool) -> None:
        try:
            self.sharded = shard_over(
                self.model, self.optimizer, self.strategy, self.device, mean=False, bf16=self.config.precision == "bf16"
            )
        except ValueError as error:
            raise ConfigError(f"strategy: {error}.") from None
        self.names = {id(run.parameter): f"run {index}" for index, run in enumerate(self.sharded.runs)}
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def arm(self, *, last: bool) -> None:
        super().arm(last=last)
        self.sharded.arm(last=last)

    def _insist_on_frozen(self) -> None:
        """The parameters that a model has while it computes are not those that it has between steps."""

    def start_sums(self) -> None:
        self.sharded.start_sums()

    def finish(self) -> float:
        started = time.perf_counter()
        self.sharded.finish()
        return time.perf_counter() - started

    def drop_unused(self) -> None:
        self.sharded.drop_unused()

    @property
    def has_unused(self) -> bool:
        return self.sharded.has_unused

    def norm(self) -> Tensor:
        return self.sharded.norm().float()

    def apply(self, scale: float) -> None:
        self.sharded.step(scale)
        self.sharded.share()
        self._is_armed_for_last = False

    def drop(self) -> None:
        self.sharded.drop()
        self._is_armed_for_last = False

    def align(self) -> None:
        if not hasattr(self, "sharded"):
            super().align()

    def fingerprint(self) -> str:
        """Of all ranks' parts together: equal exactly when whole replicas are."""
        digest = hashlib.sha256()
        for run in self.sharded.runs:
            digest.update(as_bytes(run.parameter.detach()))
        told = self.link.gather_bytes(digest.digest())
        size = self.sharded.collectives.world
        first = self.link.rank // size * size
        return hashlib.sha256(b"".join(told[first : first + size])).hexdigest()


def shard_over(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: ShardingStrategy,
    device: torch.device,
    *,
    mean: bool = True,
    bf16: bool = False,
) -> Sharded:
    """Splits a model over all ranks of the default process group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    match strategy:
        case ShardGradOp():
            weights = _weights(strategy.weights, device, world)
            return ShardedOptimizer(
                model, optimizer, weights=weights, mean=mean, keep_gradients=strategy.keep_gradients
            )
        case FullShard() if strategy.weights:
            return UnevenShards(
                model,
                optimizer,
                blocks=find_blocks(model),
                device=device,
                weights=_weights(strategy.weights, device, world),
                bf16=bf16,
                mean=mean,
            )
        case FullShard():
            mesh = _mesh(device, (world,))
        case HybridShard():
            nodes = strategy.nodes(world)
            mesh = _mesh(device, (nodes, strategy.intra_node_size) if nodes > 1 else (world,))
        case _:
            raise ConfigError("NoShard splits nothing.")
    return FullySharded(model, optimizer, blocks=find_blocks(model), device=device, mesh=mesh, bf16=bf16, mean=mean)


def _mesh(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    if not dist.is_initialized():  # alone: fully_shard wants a group all the same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, shape)


def _weights(weights: Any, device: torch.device, world: int) -> list[float] | None:
    if not weights:
        return None
    if weights == "memory":
        told = torch.zeros(world, dtype=torch.float64)
        told[dist.get_rank() if world > 1 else 0] = free_bytes(device)
        if world > 1:
            dist.all_reduce(told)
        return told.tolist()
    if len(weights) != world:
        raise ValueError(f"there are {len(weights)} weights, and {world} ranks")
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
