"""ShardedOptimizer: gradients and optimizer state split over the ranks, parameters whole on each of them.

    sharded = ShardedOptimizer(model, torch.optim.AdamW(model.parameters()))
    loss_of(model, batch).backward()      # gradients go to their owners while the backward still runs, and are freed
    sharded.step()                        # each owner steps its own range
    sharded.broadcast_updated_params()    # the ranges go back, and all parameters are whole again on every rank

Parameters lie end to end in one flat tensor for each type, in the model's order, and each rank owns a range of it
(optimizer_shard.py). The given optimizer is pointed at that range, so whatever sets its learning rate still does.
Between steps a loop may read and write parameters as it likes, by whatever name it has them: docs/decisions/0093.
With `keep_gradients` each rank has its whole gradient until the step, as ZeRO-1 says, and it travels once a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.errors import ConfigError
from potluck.sharding.collectives import Done, Pending
from potluck.sharding.optimizer_shard import OptimizerShard, weights_for
from potluck.sharding.ranges import Spec
from potluck.sharding.runs import (
    Span,
    check_holds_some,
    claim,
    homes,
    in_host_memory,
    run_of,
    sparse_gradient,
    twice_in_one_backward,
)
from potluck.sharding.sharded import Sharded

BUCKET_BYTES = 8 << 20
"""Bytes of gradients that travel together."""
MOST_ON_THEIR_WAY = 3
"""Buckets: further ones wait for the first of them, so that gradients never take more memory than that."""


class _Flat:
    """Parameters of one type, end to end."""

    def __init__(
        self, parameters: Mapping[int, nn.Parameter], shards: Sequence[OptimizerShard], rank: int, *, keeps: bool
    ) -> None:
        """`parameters`: by their number in the model. `keeps`: this rank has its whole gradient until the step."""
        self.starts: dict[int, int] = {}
        at = 0
        for index, parameter in parameters.items():
            self.starts[index], at = at, at + parameter.numel()
        first = next(iter(parameters.values()))
        self.shards, self.shard = shards, shards[rank]
        self.numbers = torch.empty(at, dtype=first.dtype, device=first.device)  # [all parameters]
        for index, parameter in parameters.items():
            piece = self.numbers[self.starts[index] : self.starts[index] + parameter.numel()].view_as(parameter)
            piece.copy_(parameter)
            parameter.data = piece
        a, b = self.shard.param_start, self.shard.param_end
        self.own = self.numbers[a:b]
        self.whole_gradient = torch.zeros_like(self.numbers) if keeps else None
        self.gradient = self.whole_gradient[a:b] if self.whole_gradient is not None else self.numbers.new_zeros(b - a)
        self.host: Tensor | None = None
        """A copy of this rank's range that is stepped in its place."""
        self.host_gradient: Tensor | None = None

    def move_to_host(self) -> None:
        self.host = in_host_memory(self.own)
        self.host_gradient = torch.zeros_like(self.host)

    def part_in(self, start: int, end: int) -> tuple[int, int]:
        """Intersect a range with the numbers that this rank owns; it is empty if the first is not less than the
        second."""
        return max(start, self.shard.param_start), min(end, self.shard.param_end)


@dataclass(eq=False)
class _Bucket:
    """Some neighbours in a flat tensor, whose gradients travel together."""

    of: _Flat
    start: int
    end: int
    parameters: list[int]
    missing: set[int] = field(default_factory=set)
    gradient: Tensor | None = None
    pending: Pending = Done()
    is_sent: bool = False
    """Whether it has left since the last finish()."""
    is_taken: bool = False
    """Whether an earlier backward of this step is in this rank's range already."""


class ShardedOptimizer(Sharded):
    """ZeRO-1 and ZeRO-2 for a loop of your own: each rank steps its range of the flattened parameters.

    For each step: backward(), then step(), then broadcast_updated_params().
    """

    keeps_whole = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        weights: Sequence[float] | None = None,
        mean: bool = True,
        keep_gradients: bool = False,
        offload: bool = False,
    ) -> None:
        """`weights`: each rank's part of the state, in proportion; `mean`: gradients are averaged, and not summed.

        `offload`: this rank's range is stepped in host memory, and so its state is there.
        """
        super().__init__(model, optimizer, group)
        shares = weights_for(weights, self.collectives.world)
        self._mean = mean
        self._keeps = keep_gradients
        self.in_step = not keep_gradients  # gradients travel in each backward
        self._offloads = offload
        self._is_last = True
        held = {id(parameter) for each in optimizer.param_groups for parameter in each["params"]}
        self.parameters = [p for p in model.parameters() if p.requires_grad and id(p) in held]
        self._check(model)
        self.rest = []
        self.split = {self._names[id(p)]: Spec(tuple(p.shape), p.dtype) for p in self.parameters}
        self._trained = list(self.split)
        self.flats = self._flatten(shares)
        self._flat_of = {index: flat for flat in self.flats for index in flat.starts}
        self._point_optimizer()
        self._buckets = self._plan_buckets()
        self._is_summed = False
        """Whether this rank's range holds its whole gradient already."""
        self._is_armed = False
        """Whether a backward was announced that has not ended."""
        self._has_ended = False
        """Whether all buckets of a backward have left, also those that it did not fill."""
        self._memory: list[Tensor] = []
        """Of buckets that have arrived, for the next ones: fresh memory would cost more than what is sent in it."""
        self._on_their_way: list[_Bucket] = []
        self._is_stale = False
        for bucket in self._buckets:
            for index in bucket.parameters:
                self.parameters[index].register_post_accumulate_grad_hook(self._hook(bucket, index))  # type: ignore[no-untyped-call]
        for module in model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._check_fresh)
        model.register_state_dict_pre_hook(self._check_fresh)  # type: ignore[no-untyped-call]

    # A step

    def arm(self, *, last: bool) -> None:
        self._is_last, self._is_armed = last, True

    @torch.no_grad()
    def end_backward(self) -> None:
        """Send this backward's buckets, filled or not: else ranks would differ in how many backwards a bucket holds."""
        if self._keeps or not self._is_armed:
            return
        if self._has_ended:  # an earlier backward has left, and this one has brought nothing
            self.finish()
        self._is_summed = False
        self.start_sums()
        self._is_armed, self._has_ended = False, True

    @torch.no_grad()
    def start_sums(self) -> None:
        if self._is_summed:
            return
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._fill(bucket)
                self._clear_missing(bucket)
                self._send(bucket)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until this rank's range holds its whole gradient; parameters that were not used count as zeros."""
        self.start_sums()
        while self._on_their_way:
            self._take_in(self._on_their_way[0])
        for bucket in self._buckets:
            bucket.missing, bucket.is_sent = set(bucket.parameters), False
        self._is_summed, self._has_ended = True, False

    def run_gradients(self) -> list[Tensor | None]:
        return list(self._run_gradients)

    @torch.no_grad()
    def load(self, gradients: Sequence[Tensor | None]) -> None:
        super().load(gradients)
        self._is_summed = True

    def gradients(self) -> list[Tensor]:
        return [flat.gradient for flat in self.flats]

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Steps this rank's range, on its gradient times `scale`. The others do not see it before the broadcast."""
        self._check_fresh()
        self.take_in()
        super().step(scale)
        self._is_stale = self.collectives.world > 1 or self._offloads

    def _step_used(self) -> None:
        for flat in self.flats:
            if flat.host_gradient is not None:
                flat.host_gradient.copy_(flat.gradient)
        super()._step_used()

    def _forget(self) -> None:
        for flat in self.flats:
            if flat.whole_gradient is not None:
                flat.whole_gradient.zero_()
        for bucket in self._buckets:
            bucket.is_taken = False
        self.used.clear()
        self._idle = frozenset()
        self._is_summed = False

    @torch.no_grad()
    def take_in(self) -> None:
        for flat in self.flats:
            if flat.host is not None and not self._is_stale:
                flat.host.copy_(flat.own)

    @torch.no_grad()
    def broadcast_updated_params(self) -> None:
        """Sends each owner's range to all, and returns when every range is here: whatever reads a parameter next,
        in a forward or outside of one, must not find the old numbers."""
        for flat in self.flats:
            if flat.host is not None:
                flat.own.copy_(flat.host)
        self._is_stale = False
        parts = (
            (owner, bucket.of.numbers[start:end])
            for bucket in self._buckets
            for owner, start, end in self._parts_of(bucket)
        )
        self.collectives.start_broadcasts(parts).wait()

    share = broadcast_updated_params  # what every way to split calls it

    def _parts_of(self, bucket: _Bucket) -> Iterator[tuple[int, int, int]]:
        """Each owner of a part of it, and where that part starts and ends."""
        for shard in bucket.of.shards:
            start, end = max(shard.param_start, bucket.start), min(shard.param_end, bucket.end)
            if start < end:
                yield shard.rank, start, end

    def _check_fresh(self, *_: Any) -> None:
        if self._is_stale:
            raise ConfigError(
                "The parameters here are out of date: broadcast_updated_params() was not called after step(), so each"
                " rank has only its own range of the new ones. Call it after every step()."
            )

    # How it is made

    def _check(self, model: nn.Module) -> None:
        self._names = names = {id(parameter): name for name, parameter in model.named_parameters()}
        check_holds_some(self.optimizer, model.parameters())
        claim({names[id(parameter)]: parameter for parameter in self.parameters}, self)
        devices = sorted({str(parameter.device) for parameter in self.parameters})
        if len(devices) > 1:
            raise ConfigError(
                "Parameters of one sharded optimizer are on one device, and these are on"
                f" {' and '.join(devices)}. Move the model to one of them."
            )

    @torch.no_grad()
    def _flatten(self, shares: Sequence[float]) -> list[_Flat]:
        """Lay parameters flat by type, in the order in which the model has a first parameter of each."""
        kinds: dict[torch.dtype, dict[int, nn.Parameter]] = {}
        for index, parameter in enumerate(self.parameters):
            kinds.setdefault(parameter.dtype, {})[index] = parameter
        flats = []
        for alike in kinds.values():
            total = sum(parameter.numel() for parameter in alike.values())
            shards = [OptimizerShard.for_weights(rank, shares, total) for rank in range(self.collectives.world)]
            flats.append(_Flat(alike, shards, self.collectives.rank, keeps=self._keeps))
            if self._offloads:
                flats[-1].move_to_host()
        return flats

    def _point_optimizer(self) -> None:
        """Let the optimizer's groups hold what this rank's range has of each parameter, instead of the parameters."""
        home, numbered = homes(self.optimizer), []
        self._run_gradients: list[Tensor] = []
        for index, whole in enumerate(self.parameters):
            flat = self._flat_of[index]
            start, first = flat.starts[index], flat.shard.param_start
            begin, end = flat.part_in(start, start + whole.numel())
            if begin < end:
                own, gradient = (flat.own, flat.gradient) if flat.host is None else (flat.host, flat.host_gradient)
                span = Span(self._names[id(whole)], tuple(whole.shape), begin - start, end - start)
                numbered.append((home[id(whole)], run_of(own, gradient, begin - first, span)))
                self._run_gradients.append(flat.gradient[begin - first : end - first])
        self.runs = [run for _, run in numbered]
        self._point(numbered, {self._names[id(p)]: p for p in self.parameters})

    def _plan_buckets(self) -> list[_Bucket]:
        """Plan buckets from the last parameters to the first, as the backward gives their gradients."""
        buckets: list[_Bucket] = []
        filling: dict[_Flat, _Bucket] = {}
        for index in reversed(range(len(self.parameters))):
            flat = self._flat_of[index]
            start, end = flat.starts[index], flat.starts[index] + self.parameters[index].numel()
            bucket = filling.get(flat)
            if bucket is not None and bucket.end - start <= max(1, BUCKET_BYTES // flat.numbers.element_size()):
                bucket.start = start
                bucket.parameters.append(index)
            else:
                filling[flat] = _Bucket(flat, start, end, [index])
                buckets.append(filling[flat])
        for bucket in buckets:
            bucket.missing = set(bucket.parameters)
        # They leave in this order: one must not wait for a gradient that comes later than all of another's.
        return sorted(buckets, key=lambda bucket: -min(bucket.parameters))

    # Gradients

    def _hook(self, bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
        start, size = bucket.of.starts[index] - bucket.start, self.parameters[index].numel()
        name = self._names[id(self.parameters[index])]

        @torch.no_grad()
        def on_gradient(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._check_fresh()
            if parameter.grad.is_sparse:
                raise ConfigError(sparse_gradient(name))
            if index not in bucket.missing and self._is_armed and not self._has_ended:
                raise ConfigError(twice_in_one_backward(name))
            if (index not in bucket.missing or self._has_ended) and not self._keeps:
                self.finish()  # another backward before the step: the first one leaves now
            self._is_summed = False
            self._fill(bucket)
            assert bucket.gradient is not None
            own_gradient = bucket.gradient[start : start + size].view_as(parameter)
            if self._keeps:
                own_gradient.add_(parameter.grad)
            else:
                own_gradient.copy_(parameter.grad)
            parameter.grad = None
            self.used.add(name)
            if self._is_last or not self._keeps:
                bucket.missing.discard(index)
                self._send_in_order()

        return on_gradient

    def _fill(self, bucket: _Bucket) -> None:
        if bucket.gradient is not None:
            return
        if bucket.of.whole_gradient is not None:
            bucket.gradient = bucket.of.whole_gradient[bucket.start : bucket.end]
            return
        size, like = bucket.end - bucket.start, bucket.of.numbers
        known = enumerate(self._memory)
        fits = next((index for index, each in known if each.dtype == like.dtype and each.numel() >= size), None)
        memory = self._memory.pop(fits) if fits is not None else like.new_empty(size)
        bucket.gradient = memory[:size]

    def _clear_missing(self, bucket: _Bucket) -> None:
        """Zero the gradients that no backward of this rank has given. Gradients that are kept are left: an earlier
        backward may have given them."""
        assert bucket.gradient is not None
        for index in () if self._keeps else bucket.missing:
            start = bucket.of.starts[index] - bucket.start
            bucket.gradient[start : start + self.parameters[index].numel()].zero_()

    def _send_in_order(self) -> None:
        """Ranks that reduced in different orders would add up the wrong tensors."""
        for bucket in self._buckets:
            if bucket.is_sent:
                continue
            if bucket.missing:
                return
            if bucket.gradient is not None:
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        assert bucket.gradient is not None
        bucket.is_sent = True
        while len(self._on_their_way) >= MOST_ON_THEIR_WAY:
            self._take_in(self._on_their_way[0])
        parts, gradient, first = self._parts_of(bucket), bucket.gradient, bucket.start
        bucket.pending = self.collectives.start_reduces(
            (owner, gradient[a - first : b - first]) for owner, a, b in parts
        )
        self._on_their_way.append(bucket)

    def _take_in(self, bucket: _Bucket) -> None:
        """Take this rank's part of a bucket that has arrived; the rest is forgotten."""
        assert bucket.gradient is not None
        self._on_their_way.remove(bucket)
        bucket.pending.wait()
        start, end = bucket.of.part_in(bucket.start, bucket.end)
        if start < end:
            part, first = bucket.gradient[start - bucket.start : end - bucket.start], bucket.of.shard.param_start
            own_gradient = bucket.of.gradient[start - first : end - first]
            share = 1 / self.collectives.world if self._mean else 1.0
            if self._keeps:
                own_gradient.mul_(share)
            elif bucket.is_taken:
                own_gradient.add_(part, alpha=share)
            else:
                torch.mul(part, share, out=own_gradient)
        if not self._keeps and len(self._memory) <= MOST_ON_THEIR_WAY:
            self._memory.append(bucket.gradient)
        bucket.gradient, bucket.pending, bucket.is_taken = None, Done(), True
