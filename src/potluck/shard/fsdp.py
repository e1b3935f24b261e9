"""FullShard and HybridShard on torch's fully_shard: parameters, gradients and optimizer state split within a node.

The optimizer is pointed at this rank's own memory, as plain tensors: it need not know of shards, and steps without
DTensor's overhead. Between ranks of Gloo our own collectives are used (collectives.py), on all others torch's.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from potluck.errors import ConfigError
from potluck.shard.blocks import untied
from potluck.shard.collectives import Collectives, Lent, lend, local_part, sum_gradients
from potluck.shard.fsdp_units import FullyShardedUnits
from potluck.shard.ranges import Spec
from potluck.shard.runs import Run, Span, check_elementwise, claim, group_names, homes, repoint, scaling
from potluck.shard.sharded import Sharded, SplitRequest


class FullySharded(Sharded):
    in_step = gathers = cuts_alike = True

    def __init__(self, wanted: SplitRequest, mesh: DeviceMesh) -> None:
        """`mesh`: of one dimension, or of two: nodes, and the ranks of each."""
        self.model, self.optimizer = model, optimizer = wanted.model, wanted.optimizer
        check_elementwise(optimizer)
        blocks = untied(model, wanted.blocks)
        self.collectives = Collectives(mesh.get_group(mesh.ndim - 1))
        self._lent = Lent() if _is_gloo(self.collectives.group, mesh.device_type) else None
        # What a reduction gives is read at once: summed over nodes, or copied to a GPU on a stream of its own.
        self._must_wait = mesh.device_type == "cuda" or (mesh.ndim == 2 and mesh.size(0) > 1)
        whole = dict(model.named_parameters())
        _check_dimensions(whole)
        home = homes(optimizer)
        held = {name: parameter for name, parameter in whole.items() if id(parameter) in home}
        self.group_names = group_names(optimizer, {id(parameter): name for name, parameter in whole.items()})
        claim(held, self)
        number = {name: home[id(parameter)] for name, parameter in held.items()}
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self._split(
            blocks,
            mesh=mesh,
            mp_policy=policy if wanted.bf16 else MixedPrecisionPolicy(),
            offload_policy=CPUOffloadPolicy() if wanted.offload and mesh.device_type == "cuda" else OffloadPolicy(),
        )
        if not wanted.mean and mesh.size() > 1:  # of one, the sum is the mean, and dividing it by 1 takes time
            for module in self._modules:
                sum_gradients(module)
        self._units = self._in_order(blocks, mesh) if mesh.size() > 1 else None
        self._summed: set[object] = set()
        """Units whose gradients of this step are under way already, or have arrived."""
        parts = {name: part for name, part in model.named_parameters() if isinstance(part, DTensor)}
        self.split = {name: Spec(shapes[name], part.dtype) for name, part in parts.items()}
        self._point_optimizer(parts, number, held)
        self._is_loaded = False
        """Whether the gradient came from elsewhere, and not from backwards."""

    def _split(self, blocks: Sequence[nn.Module], **options: Any) -> None:
        # One of no numbers stays as it is: torch cannot sum it.
        ignored = {parameter for parameter in self.model.parameters() if not parameter.numel()}
        for module in (*blocks, self.model):
            whole = [each for each in module.parameters() if not isinstance(each, DTensor) and each.numel()]
            fully_shard(module, ignored_params=ignored, **options)
            for parameter in whole:  # the optimizer still has it: else all of the model would be on the device at once
                parameter.data = parameter.data.new_empty(1).expand(parameter.shape)
        self._modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if self._lent is not None:
            for module in self._modules:
                lend(module, self._lent)

    def _in_order(self, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> FullyShardedUnits:
        over = [Collectives(mesh.get_group(dimension)) for dimension in range(mesh.ndim)]
        # Gloo's collectives run beside the CPU's work only if they begin early; on a GPU, streams see to that.
        ahead = self._lent is not None
        return FullyShardedUnits(self.model, blocks, over, before_sum=self._before_sum, gathers_ahead=ahead)

    def _before_sum(self, unit: object) -> None:
        """What is added to must have arrived, and so must what is added."""
        if unit in self._summed and self._lent is not None:
            self._lent.finish()
            self._lent.arm(waits=True)
        self._summed.add(unit)

    def _point_optimizer(
        self, parts: Mapping[str, DTensor], number: Mapping[str, int], whole: Mapping[str, nn.Parameter]
    ) -> None:
        """`number`: of a trained parameter's group, by name."""
        self.runs, self.rest, self._sources = [], [], []
        numbered = []
        for name, part in parts.items():
            if not local_part(part).numel():
                continue
            run = Run(
                nn.Parameter(_flat(part), requires_grad=name in number), (self._span(name, self.split[name].shape),)
            )
            if name not in number:
                self.rest.append(run)
            else:
                self.runs.append(run)
                self._sources.append(part)
                numbered.append((number[name], run))
        repoint(self.optimizer, numbered, whole)

    def _span(self, name: str, shape: tuple[int, ...]) -> Span:
        """Which rows are here: as torch.chunk cuts them."""
        each = -(-shape[0] // self.collectives.world)
        first, last = (min(shape[0], each * rank) for rank in (self.collectives.rank, self.collectives.rank + 1))
        size = torch.Size(shape[1:]).numel()
        return Span(name, shape, first * size, last * size)

    def arm(self, *, last: bool) -> None:
        self.end_backward()
        if self._lent is not None:
            self._lent.finish()
            self._lent.arm(waits=self._must_wait or self._units is None)
        if self._units is not None:
            self._units.has_ended = False

    @torch.no_grad()
    def end_backward(self) -> None:
        if self._units is not None and not self._units.has_ended:
            self._units.take_part()

    @property
    def used(self) -> Set[str]:
        return self._units.used if self._units is not None else self.split.keys()

    @torch.no_grad()
    def load(self, gradients: Sequence[Tensor | None]) -> None:
        self.drop()
        for run, gradient in zip(self.runs, gradients, strict=True):
            run.parameter.grad = None if gradient is None else gradient.to(run.parameter.device).view_as(run.parameter)
        self._is_loaded = True

    @torch.no_grad()
    def finish(self) -> None:
        if self._is_loaded:
            return
        self.end_backward()
        if self._lent is not None:
            self._lent.finish()
        for run, source in zip(self.runs, self._sources, strict=True):
            name = run.spans[0].name
            if name in self.always_used:
                source.grad = torch.zeros_like(source) if source.grad is None else source.grad
            elif self._units is not None and name not in self._units.used:
                source.grad = None  # nobody has used it: the zeros that all have summed are no gradient
            run.parameter.grad = None if source.grad is None else _flat(source.grad)

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        self.finish()
        with scaling(self.optimizer, self.gradients(), scale):
            self.optimizer.step()
        self._forget()

    def share(self) -> None:
        """A forward without a backward leaves the root's parameters gathered, and they would be taken for the new."""
        for module in self._modules:
            module.reshard()

    def drop(self) -> None:
        if self._lent is not None:
            self._lent.finish()
        self._forget()

    def _forget(self) -> None:
        self._is_loaded = False
        for run, source in zip(self.runs, self._sources, strict=True):
            run.parameter.grad = source.grad = None
        self._summed.clear()
        if self._units is not None:
            self._units.used.clear()


def _check_dimensions(parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if not parameter.dim():
            raise ConfigError(
                f"{name} is a single number without a dimension, which FullShard cannot split. Make it"
                " a tensor of one number, or use ShardGradOp or NoShard."
            )


def _flat(part: Tensor) -> Tensor:
    return local_part(part).detach().view(-1)


def _is_gloo(group: dist.ProcessGroup | None, device_type: str) -> bool:
    return dist.get_backend(group) == "gloo" or (device_type == "cpu" and "gloo" in str(dist.get_backend(group)))
