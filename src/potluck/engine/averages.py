"""The mean of the replicas' parameters, in few flat buffers. Knows nothing of models, windows, data or optimizers.

Where a replica is split over ranks, each of them forms the mean of its own part, with those who hold the same part.

With overlap the mean of a snapshot is formed while the next window computes, and merged at its end as a correction:
what a replica changed since the snapshot is kept.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from potluck.agree.policy import Outer
from potluck.engine.buckets import split_like
from potluck.link.link import Alone, Link, Pending
from potluck.shard.norm import total_norm

FLAT_BYTES = 32 << 20
"""Of one buffer: while one of them travels, the next is filled."""


class Flat:
    """Some tensors, and a buffer in which they lie end to end."""

    def __init__(self, tensors: list[Tensor]) -> None:
        first = tensors[0]
        half = first.dtype in (torch.float16, torch.bfloat16)  # their mean would lose digits
        self.tensors = tensors
        self.sum = torch.empty(
            sum(tensor.numel() for tensor in tensors),
            dtype=torch.float32 if half else first.dtype,
            device=first.device,
        )
        self.views = split_like(self.sum, tensors)
        self.before: Tensor | None = None
        """What the mean is compared with: this replica's own values."""

    def snapshot(self) -> Tensor:
        if self.before is None:
            self.before = torch.empty_like(self.sum)
        torch._foreach_copy_(split_like(self.before, self.tensors), self.tensors)
        return self.before


class Drift:
    """How far a replica is from the mean, as a part of it."""

    def __init__(self) -> None:
        self._off = self._size = torch.zeros((), dtype=torch.float64)

    def add(self, off: Sequence[Tensor], mean: Tensor) -> None:
        self._off = self._off + finite_norm(off).double().cpu() ** 2
        self._size = self._size + finite_norm([mean]).double().cpu() ** 2

    def share(self, within: Link) -> float:
        """Of the whole replica, whose parts all ranks of `within` hold."""
        told = within.gather_rows([float(self._off), float(self._size)])
        off, size = (sum(column) for column in zip(*told, strict=True))
        return math.sqrt(off / max(size, 1e-300))


class Averages:
    """For each agreement: start, and finish at once or after the next window."""

    def __init__(
        self,
        trained: Sequence[Tensor],
        link: Link,
        outer: Outer | None = None,
        *,
        within: Link | None = None,
    ) -> None:
        """`trained`: the memory of this rank's part of the parameters, which the ranks of the link hold of theirs.

        `within`: the ranks that hold the other parts of this replica.
        """
        self._link = link
        self._within = within or Alone()
        self._trained = _flats(trained)
        self._pending: list[Pending] = []
        device = next((tensor.device for tensor in trained), torch.device("cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._outer = outer
        self.begin_anew()

    def begin_anew(self) -> None:
        """The outer optimizer steps from the parameters as they are now: they were loaded, and not trained."""
        self._start = [flat.snapshot().clone() for flat in self._trained] if self._outer is not None else []
        self._momentum = [torch.zeros_like(start) for start in self._start]

    @property
    def is_pending(self) -> bool:
        return bool(self._pending)

    @torch.no_grad()
    def start(self, weight: float) -> None:
        """Begins the mean of all replicas as they stand now, by their weights, which add up to 1."""
        self._begin(weight, keeps=True)

    def _begin(self, weight: float, *, keeps: bool) -> None:
        """`keeps`: a snapshot, since the replica goes on meanwhile."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for flat in self._trained:
            with self._beside():
                if keeps:
                    flat.sum.copy_(flat.snapshot())
                else:
                    torch._foreach_copy_(flat.views, flat.tensors)
                # 0 times what is -inf for good would be NaN.
                flat.sum.mul_(weight) if weight else flat.sum.zero_()
            if self._stream is not None:  # what is copied there must not change under it
                torch.cuda.current_stream().wait_stream(self._stream)
            with self._beside():
                self._pending.append(self._link.start_sum(flat.sum))

    @torch.no_grad()
    def finish(self) -> float:
        """The mean becomes this replica's, with what it did since start(). How far it was from it then."""
        drift = Drift()
        for flat in self._arriving():
            assert flat.before is not None
            difference_(flat.before, flat.sum)  # own - mean
            drift.add([flat.before], flat.sum)
            moved = split_like(flat.before, flat.tensors)
            if flat.sum.dtype == flat.tensors[0].dtype:
                torch._foreach_sub_(flat.tensors, moved)
            else:
                torch._foreach_copy_(flat.tensors, torch._foreach_sub([t.float() for t in flat.tensors], moved))
        return drift.share(self._within)

    @torch.no_grad()
    def agree(self, weight: float) -> float:
        """The mean at once, so that all replicas are equal to the bit. How far this one was from it."""
        self._begin(weight, keeps=False)
        drift = Drift()
        for flat in self._arriving():
            torch._foreach_sub_(flat.tensors, flat.views)  # own - mean; the mean itself takes its place below
            drift.add(flat.tensors, flat.sum)
            torch._foreach_copy_(flat.tensors, flat.views)
        if self._outer is not None:
            self._step_outer(self._outer)
        return drift.share(self._within)

    def _arriving(self) -> Iterator[Flat]:
        """Each as soon as it holds the mean."""
        for flat, pending in zip(self._trained, self._pending, strict=True):
            with self._beside():
                pending.wait()
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
            yield flat
        self._pending = []

    def _step_outer(self, outer: Outer) -> None:
        """SGD with Nesterov momentum along the window's mean change."""
        for flat, start, momentum in zip(self._trained, self._start, self._momentum, strict=True):
            change = start - flat.sum
            momentum.mul_(outer.momentum).add_(change)
            start.sub_(change.add_(momentum, alpha=outer.momentum), alpha=outer.lr)
            torch._foreach_copy_(flat.tensors, split_like(start, flat.tensors))

    def _beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def difference_(a: Tensor, b: Tensor) -> Tensor:
    """a - b, in a's memory. Of what is equal it is 0, also of two -inf, which a parameter may be for good."""
    is_same = a == b
    return a.sub_(b).masked_fill_(is_same, 0.0)


def finite_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Over the finite numbers: a parameter that is -inf on every replica does not make them drift apart."""
    norm = total_norm(tensors)
    return norm if norm.isfinite() else total_norm([tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in tensors])


def _flats(tensors: Sequence[Tensor]) -> list[Flat]:
    """Tensors of one type after the other, in buffers of some size."""
    flats: list[Flat] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group: list[Tensor] = []
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            if group and sum(t.nbytes for t in group) + tensor.nbytes > FLAT_BYTES:
                flats.append(Flat(group))
                group = []
            group.append(tensor)
        flats.append(Flat(group))
    return flats
