"""A replica that is split over ranks: the strategies of sharding/, behind what an engine asks of a replica."""

import math
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from potluck.coded_numbers import Coding
from potluck.errors import ConfigError
from potluck.link.coded_sums import CodedSums
from potluck.link.link import Alone, Link, Pending
from potluck.replica.model_checks import find_batch_norm
from potluck.replica.replica import Agreed, Replica
from potluck.replica.weight_hash import digest_sums, digest_sums_of_piece, hash_sums, join
from potluck.sharding.passes import UNEQUAL
from potluck.sharding.runs import FlatRun, Span, total_norm
from potluck.sharding.sharded import Sharded
from potluck.sharding.splitting import shard_over
from potluck.sharding.strategy import ShardingStrategy


def _needs_float32(model: nn.Module) -> bool:
    """Whether autocast alone has to do. BatchNorm wants parameters of its statistics' type; and weights that a norm or
    a parametrization makes of others are computed in float32: torch.matrix_exp is NaN in bf16."""
    return find_batch_norm(model) is not None or any(
        isinstance(each, SpectralNorm | WeightNorm | ParametrizationList)
        for module in model.modules()
        for each in (module, *module._forward_pre_hooks.values())
    )


class ShardedReplica(Replica):
    sharded: Sharded

    def __init__(
        self,
        *arguments: Any,
        strategy: ShardingStrategy,
        across: Link | None = None,
        nodes: Link | None = None,
        codes_within: bool = False,
        own_units: bool = False,
        **options: Any,
    ) -> None:
        """`across`: those who hold the same part of other replicas, where replicas step by themselves.

        `nodes`: where they step together, and `within` is not all ranks that do. `codes_within`: this is the only
        replica, and its ranks send each other coded gradients. `own_units`: see SplitRequest.
        """
        self.strategy = strategy
        self._across = across or Alone()
        self._nodes = nodes
        self._codes_within = codes_within
        self._own_units = own_units
        self._lasts: tuple[Tensor, Pending] | None = None
        """How many of the ranks take this backward for the step's last, once it is known."""
        super().__init__(*arguments, **options)
        if nodes is not None:
            self._together = self.link

    def _place(self) -> None:
        """Where parameters are split too, they reach the device block by block, and never all at once."""
        if self.strategy.keeps_parameters_whole:
            super()._place()

    def _prepare_sums(self) -> None:
        try:
            self.sharded = shard_over(
                self.model,
                self.optimizer,
                self.strategy,
                self.device,
                mean=False,
                bf16=self.config.precision == "bf16" and not _needs_float32(self.model),
                offload=self.config.offload_optimizer,
                group=self.within.group,
                nodes=self._nodes.group if self._nodes is not None else None,
                sum_over=self._sum_over if self._form.may_be_coded else None,
                own_units=self._own_units,
            )
        except ValueError as error:
            raise ConfigError(f"strategy: {error}.") from None
        self.code(self._form.coding)
        self.sharded.asks = False  # workers' reports say whether any has left a parameter unused
        self.names = {id(run.parameter): f"run {index}" for index, run in enumerate(self.sharded.runs)}
        self.outer.names = self.names
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        known = self.sharded.split.keys() | {name for names in self.sharded.group_names for name in names}
        named = self.model.named_parameters()
        self._unstepped = [p for name, p in named if p.requires_grad and p.numel() and name not in known]
        """Trained parameters that are whole on every rank, and that no optimizer holds."""
        self._unstepped_norm = 0.0

    def _sum_over(self, nodes: dist.ProcessGroup) -> Callable[[Tensor], None]:
        """Nodes send each other coded gradients; within a node they travel as they are."""
        sums = CodedSums(nodes)

        def sum_(flat: Tensor) -> None:
            if self._form.coding is None:
                dist.all_reduce(flat, group=nodes)
            else:
                sums.start(flat, self._form.coding).wait()

        return sum_

    def code(self, coding: Coding | None) -> None:
        super().code(coding)
        if self._codes_within and self._form.may_be_coded:
            self.sharded.code(coding)

    def held(self) -> dict[str, list[FlatRun]]:
        sharded = self.sharded
        sharded.take_in()
        found: dict[str, list[FlatRun]] = {}
        for run in (*sharded.runs, *sharded.rest):
            found.setdefault(run.span.name, []).append(run)
        where = next((run.parameter.device for runs in found.values() for run in runs), torch.device("cpu"))
        for name, parameter in self.model.named_parameters():
            shape, is_here = tuple(parameter.shape), name not in sharded.split and sharded.collectives.rank == 0
            if name not in found and is_here:  # every rank has all of it, and one must be the first
                found[name] = [FlatRun(parameter, Span(name, shape, 0, parameter.numel()))]
            elif name not in found:
                dtype = sharded.split[name].dtype if name in sharded.split else parameter.dtype
                empty = nn.Parameter(torch.empty(0, dtype=dtype, device=where), requires_grad=False)
                found[name] = [FlatRun(empty, Span(name, shape, 0, 0))]
        return found

    def owned(self) -> list[FlatRun]:
        names = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        # A frozen parameter may be the optimizer's all the same; averaging it could change its last bit.
        return [run for run in self.sharded.runs if run.span.name in names]

    def hash_weights(self, agreed: Agreed, buffers: Sequence[Tensor]) -> tuple[str, Tensor]:
        """Hash the whole replica, as one that is not split: each rank adds what its numbers come to."""
        found = self.quick_digest(agreed, buffers)
        return hash_sums([found]), found

    def quick_digest(self, agreed: Agreed, buffers: Sequence[Tensor]) -> Tensor:
        sharded, held, sums = self.sharded, self.held(), []
        for name, parameter in self.model.named_parameters():
            if self.is_base(name):
                continue
            pieces = [
                digest_sums_of_piece(
                    agreed.get(id(run.parameter), run.parameter.data), run.span.start, parameter.numel()
                )
                for run in held[name]
            ]
            sums.append(torch.stack(pieces).sum(dim=0).to(self.device))
        told = join(sums).cpu()
        sharded.collectives.start_sum(told).wait()  # of one replica, of which there may be several
        return torch.cat([told, *(digest_sums(buffer).cpu() for buffer in buffers)])

    def before_parts_are_used(self) -> None:
        self.sharded.take_in()

    def in_loss(self) -> AbstractContextManager[None]:
        return self.sharded.in_loss()

    def on_parts_written(self) -> None:
        self.sharded.share()

    def arm(self, *, last: bool) -> None:
        super().arm(last=last)
        self.sharded.arm(last=last)
        over = self.sharded.collectives
        if self.in_step and not self.gathers and over.world > 1:  # those that gather tell each other anyway
            told = torch.tensor([int(last)])
            self._lasts = told, over.start_sum(told)

    def end_backward(self) -> None:
        self.sharded.end_backward()
        if self._lasts is not None:
            (told, pending), self._lasts = self._lasts, None
            pending.wait()
            if told.item() not in (0, self.sharded.collectives.world):
                raise ConfigError(UNEQUAL)

    def start_sums(self) -> None:
        self.sharded.start_sums()

    def finish(self) -> float:
        self.sharded.tied_names = self.tied_names
        started = time.perf_counter()
        self.sharded.finish()
        if self._turns.count > 1:
            for run, gradient in zip(self.sharded.runs, self.sharded.run_gradients(), strict=True):
                if gradient is not None and not self.adapter.steps_now(run.span.name):
                    gradient.zero_()
            for gradient in self.sharded.unstepped():
                gradient.zero_()
        elif self._unstepped:
            self._sum_unstepped()
        return time.perf_counter() - started

    @torch.no_grad()
    def _sum_unstepped(self) -> None:
        """They count in the norm, as in clip_grad_norm_(model.parameters())."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._unstepped]
        whole = torch.cat([gradient.reshape(-1) for gradient in found])
        self._together.start_sum(whole).wait()
        self._unstepped_norm = total_norm([whole]).item()

    def _forget_unstepped(self) -> None:
        self._unstepped_norm = 0.0
        for parameter in self._unstepped:
            parameter.grad = None

    def drop_unused(self) -> None:
        self.sharded.used_in_stages = self.used_in_stages
        self.sharded.drop_unused()

    @property
    def has_unused(self) -> bool:
        return self.sharded.has_unused or not self.tied_names <= self.used

    @property
    def used(self) -> Set[str]:
        return self.sharded.used

    def norm(self) -> Tensor:
        norm = self.sharded.norm()
        return (
            torch.tensor(math.hypot(norm.item(), self._unstepped_norm), dtype=torch.float64)
            if self._unstepped
            else norm
        )

    def _gradients(self) -> list[Tensor]:
        return self.sharded.gradients()

    def apply(self, scale: float) -> None:
        with self.adapter.stepping():
            self.sharded.step(scale)
        self.sharded.share()
        self._forget_unstepped()
        self._is_armed_for_last = False

    def drop(self) -> None:
        self._seal.forget()
        self.sharded.drop()
        self._forget_unstepped()
        self._is_armed_for_last = False

    def align(self) -> None:
        if self._across.world > 1:
            self.before_parts_are_used()
            for tensor in [*(run.parameter.data for run in self.owned()), *self._buffers.now()]:
                self._across.broadcast(tensor)
            self.on_parts_written()
