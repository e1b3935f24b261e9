"""Gradients in flat buckets, each summed over the ranks as soon as the backward has filled it.

Does what DistributedDataParallel's reducer does, and three things it does not (docs/decisions/0003):
it sums instead of averaging, so that shares may differ; a rank without rows can take part; and buckets
never change their order, so that a resumed run adds in the same order.
Knows nothing of who is at the other end: `start_sum` is handed in.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from potluck.errors import ConfigError
from potluck.link.link import Pending
from potluck.sharding.runs import sparse_gradient, twice_in_one_backward

FIRST_BYTES = 1 << 20
"""The first bucket is small, so that the first sum starts early in the backward."""
BUCKET_BYTES = 25 << 20
FINE_PARTS = 16
"""Where gradients travel in fewer bits links are slow, and the earlier the first ones leave the better: then a bucket
has this part of a model, but no less than the first bucket."""


Allocate = Callable[[int, Tensor], Tensor]


def _allocate(total: int, like: Tensor) -> Tensor:
    return torch.zeros(total, dtype=like.dtype, device=like.device)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor as pieces of these tensors' shapes, which are views of it."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


class GradBucket:
    """Some parameters' gradients, end to end in one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter], allocate: Allocate | None = None) -> None:
        """`allocate`: makes a tensor of a given number of elements, like the given one."""
        self.parameters = parameters
        total = sum(parameter.numel() for parameter in parameters)
        self.flat = (allocate or _allocate)(total, parameters[0])  # [sum of numel]
        self.views = split_like(self.flat, parameters)
        self.missing = set(range(len(parameters)))
        """Which gradients of the step's last backward have yet to arrive."""
        self.arrived = [False] * len(parameters)
        """Which gradients any backward of this step has given."""

    def take(self, index: int) -> None:
        """Moves a fresh gradient into its view; later backwards of the step then add to the view in place."""
        parameter, view = self.parameters[index], self.views[index]
        assert parameter.grad is not None
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        self.arrived[index] = True

    def on_gradient(self, index: int, name: str, *, is_last: bool) -> None:
        """A backward has given a gradient. `is_last`: it is the backward after which all have to be here."""
        grad = self.parameters[index].grad
        if grad is not None and grad.is_sparse:
            raise ConfigError(sparse_gradient(name))
        self.take(index)
        if is_last:
            if index not in self.missing:
                raise ConfigError(twice_in_one_backward(name))
            self.missing.remove(index)

    def complete(self) -> None:
        """Zeros for what no backward of this rank has given."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if self.arrived[index]:
                continue
            if parameter.grad is not None:  # a backward that was cut in two gives weights' gradients without a word
                self.take(index)
            else:
                view.zero_()
                parameter.grad = view

    def reset(self) -> None:
        self.missing = set(range(len(self.parameters)))
        self.arrived = [False] * len(self.parameters)


class BucketQueue:
    """Buckets that the backward fills, each of which is handed on as soon as it is whole.

    Always in the order of the list: ranks that summed in different orders would add up the wrong tensors.
    """

    def __init__(self, buckets: list[GradBucket], names: dict[int, str], hand_on: Callable[[GradBucket], None]) -> None:
        """`names`: of the parameters, by their ids."""
        self.buckets, self.names, self._hand_on = buckets, names, hand_on
        self.is_idle = False
        """Whether backwards are none of ours now."""
        self._communicate = False
        self._handed_on = 0
        self._hooks: list[RemovableHandle] = []
        for bucket in buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = self._hook(bucket, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def arm(self, *, communicate: bool) -> None:
        """Before each backward. Only the last one moves gradients on."""
        self._communicate = communicate

    def start_rest(self) -> None:
        """After the last backward: hands on the buckets that it has not filled."""
        while self._handed_on < len(self.buckets):
            self._hand_on_next()

    def reset(self) -> None:
        """The next backward brings fresh gradients."""
        self._handed_on, self._communicate = 0, False
        for bucket in self.buckets:
            bucket.reset()
            for parameter in bucket.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Gradients are the parameters' own again."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: GradBucket, index: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            if self.is_idle:
                return
            bucket.on_gradient(index, self.names[id(parameter)], is_last=self._communicate)
            if self._communicate:
                while self._handed_on < len(self.buckets) and not self.buckets[self._handed_on].missing:
                    self._hand_on_next()

        return on_gradient

    def _hand_on_next(self) -> None:
        bucket = self.buckets[self._handed_on]
        self._handed_on += 1
        bucket.complete()
        self._hand_on(bucket)


class GradBuckets(BucketQueue):
    """The gradients of one model. For each step: arm, backward (many times), start_rest, finish."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        start_sum: Callable[[Tensor], Pending],
        *,
        is_fine: bool = False,
    ) -> None:
        """`is_fine`: buckets are small."""
        self._pending: list[Pending] = []
        # The backward reaches the last layers first, so the buckets start from the end.
        units = list(reversed(find_units(model, blocks)))
        total_bytes = sum(parameter.nbytes for unit in units for parameter in unit)
        limit_bytes = min(BUCKET_BYTES, max(FIRST_BYTES, total_bytes // FINE_PARTS)) if is_fine else BUCKET_BYTES
        super().__init__(
            [GradBucket(group) for group in group_units(units, limit_bytes)],
            {id(parameter): name for name, parameter in model.named_parameters()},
            lambda bucket: self._pending.append(start_sum(bucket.flat)),
        )

    @property
    def flats(self) -> list[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def finish(self) -> float:
        """Waits for all sums. Returns the seconds spent waiting."""
        self.start_rest()
        start = time.perf_counter()
        for pending in self._pending:
            pending.wait()
        return time.perf_counter() - start

    def arrivals(self) -> list[bool]:
        """For each parameter in bucket order: whether this rank's backwards gave it a gradient."""
        return [arrived for bucket in self.buckets for arrived in bucket.arrived]

    @property
    def parameter_names(self) -> list[str]:
        """In bucket order."""
        return [self.names[id(parameter)] for bucket in self.buckets for parameter in bucket.parameters]

    def drop(self, used: list[bool]) -> None:
        """No gradient for what no rank used, as in one process: an optimizer must not decay or move it."""
        parameters = (parameter for bucket in self.buckets for parameter in bucket.parameters)
        for parameter, was_used in zip(parameters, used, strict=True):
            if not was_used:
                parameter.grad = None

    def reset(self) -> None:
        """After the optimizer's step."""
        super().reset()
        self._pending.clear()


def find_units(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Trained parameters that the backward completes together: those of one repeated block, or of one layer."""
    home = {id(p): f"block {index}" for index, block in enumerate(blocks) for p in block.parameters()}
    units: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            units.setdefault(home.get(id(parameter), name.rpartition(".")[0]), []).append(parameter)
    return list(units.values())


def group_units(units: list[list[nn.Parameter]], limit_bytes: int | None = None) -> list[list[nn.Parameter]]:
    """Units in buckets. A bucket ends where a unit does, unless one unit outgrows it.

    Within a block the first parameter is the last to get its gradient: a bucket that held only the end of a block
    would wait for what is not its own, and all later ones with it.
    """
    limit_bytes = limit_bytes or BUCKET_BYTES
    each = ([[parameter] for parameter in reversed(unit)] for unit in units)
    pieces = [piece for unit in each for piece in _pack(unit, limit_bytes, limit_bytes)]
    return _pack(pieces, FIRST_BYTES, limit_bytes)


def _pack(runs: list[list[nn.Parameter]], first_limit: int, other_limit: int) -> list[list[nn.Parameter]]:
    """Joins neighbours of one type and device as long as they fit."""
    packed: list[list[nn.Parameter]] = []
    for run in runs:
        limit = first_limit if len(packed) == 1 else other_limit
        alike = packed and (packed[-1][0].dtype, packed[-1][0].device) == (run[0].dtype, run[0].device)
        if alike and sum(parameter.nbytes for parameter in packed[-1] + run) <= limit:
            packed[-1] = packed[-1] + run
        else:
            packed.append(run)
    return packed
