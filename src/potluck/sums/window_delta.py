"""WindowDelta: what a window changed in a replica, and how the mean of that becomes everybody's. Local SGD, once.

Replicas step by themselves; at the end of a window their mean takes their place. How the mean is formed is said by a
Mean: over a link parameters are averaged, by a host what each worker changed.
Where a replica is split over ranks, each of them has its own part here. Knows nothing of rows or of how it is stepped.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from potluck.link.link import Alone, Link
from potluck.replica.buckets import split_like
from potluck.replica.buffers import SavedBuffers
from potluck.replica.replica import Replica
from potluck.sharding.runs import FlatRun, total_norm
from potluck.sums.means import FlatBuffer, Mean

AT_ONCE = 1 << 18
"""Numbers that a CPU compares, subtracts and adds at a time."""


class Drift:
    """How far a replica is from the mean, as a fraction of the mean's norm."""

    def __init__(self) -> None:
        self._off = self._size = 0.0

    def add(self, off: Sequence[Tensor], size: Sequence[Tensor]) -> None:
        self._off += float(finite_norm(off)) ** 2
        self._size += float(finite_norm(size)) ** 2

    def share(self, within: Link) -> float:
        """The drift of the whole replica, whose parts the ranks of `within` hold."""
        off, size = (sum(column) for column in zip(*within.gather_rows([self._off, self._size]), strict=True))
        return math.sqrt(off / max(size, 1e-300))


class WindowDelta:
    """For each part of a window: begin, train, end; then apply."""

    def __init__(self, replica: Replica, mean: Mean, *, within: Link = Alone()) -> None:
        self._replica = replica
        self._mean = mean
        self.within = within
        """The ranks that are this replica together."""
        self._buffers = SavedBuffers(replica.model)
        self._agreed_buffers: list[Tensor] = []
        """The buffers where the part began, which is what all agreed on last."""
        self._weight = 0.0
        self._forgotten = 0
        """How often forget() was called."""
        self.is_agreed = True
        """Where changes travel: whether the parameters are what all agreed on last."""
        self.is_pending = False
        """Whether a part has left whose mean is not merged."""
        self.drift = 0.0
        """How far this replica was from the last mean, as a part of it."""
        self._flats = mean.lay_out(replica, self._buffers)
        self.start_anew()

    @property
    def runs(self) -> list[Sequence[FlatRun]]:
        """The runs that this rank holds of the replica, in the pieces in which they travel."""
        return [flat.runs for flat in self._flats]

    @torch.no_grad()
    def begin(self) -> None:
        """A part of a window begins, from what all agreed on."""
        self._replica.before_parts_are_used()
        if not self.is_agreed:  # a part that was begun before will never be sent
            self._go_back()
        self._agreed_buffers = self._buffers.copy()
        if not self._mean.of_changes:
            return
        self._mean.clear()  # what left last lies where this part's beginning is kept
        for flat in self._flats:
            flat.copy_to(flat.sum)
        self.is_agreed = False

    def exact(self) -> bytes:
        """Return what the part changed in buffers that have no mean. Call it before end()."""
        return self._buffers.for_host(self._agreed_buffers, 0.0)[1]

    @torch.no_grad()
    def end(self, weight: float) -> None:
        """The part is done, and leaves by its weight. Where changes travel, this replica is back where all began."""
        self._weight, self.is_pending = weight, True
        self._replica.before_parts_are_used()
        self._mean.clear()
        for index, flat in enumerate(self._flats):
            with self._mean.beside():
                self._fill(flat)
                # 0 times what is -inf for good would be NaN.
                flat.sum.mul_(weight) if weight else flat.sum.zero_()
            self._mean.start(index, flat.sum)
        self._mean.start_buffers(self._buffers, self._agreed_buffers, weight)
        if self._mean.of_changes:
            self._buffers.put(self._agreed_buffers)
            self.is_agreed = True
            self._replica.on_parts_written()

    def _fill(self, flat: FlatBuffer) -> None:
        """Fills it with what is sent: the parameters, or what the part has changed in them."""
        if not self._mean.of_changes:
            flat.copy_to(flat.sum)
            return
        ended = flat.joined()
        flat.copy_from(flat.sum)
        difference_(flat.sum, ended)

    @torch.no_grad()
    def apply(self) -> None:
        """Merges the mean."""
        drift = Drift()
        self._replica.before_parts_are_used()
        if not self.is_agreed:  # a part that was begun meanwhile will never be sent
            self._go_back()
        for flat, mean in zip(self._flats, self._mean.arriving(self._flats), strict=True):
            (self._take_change if self._mean.of_changes else self._take)(flat, mean, drift)
        self._mean.finish_buffers(self._buffers)
        self._weight, self.is_pending = 0.0, False
        self._replica.on_parts_written()
        self.drift = drift.share(self.within)

    @torch.no_grad()
    def settle(self) -> None:
        """Make what each replica keeps for the next mean the same everywhere. Over a link, call it on every rank
        alike."""
        self._mean.settle()

    def _take(self, flat: FlatBuffer, mean: Tensor, drift: Drift) -> None:
        """The mean of all parameters takes the place of this replica's."""
        torch._foreach_sub_(flat.tensors, split_like(mean, flat.tensors))  # own - mean
        drift.add(flat.tensors, [mean])
        flat.copy_from(mean)

    def _take_change(self, flat: FlatBuffer, mean: Tensor, drift: Drift) -> None:
        """From where all began, by what all changed."""
        torch._foreach_sub_(flat.tensors, split_like(mean, flat.tensors))
        drift.add([flat.sum / self._weight - mean] if self._weight else [], flat.tensors)

    # What all agreed on, while this replica is elsewhere

    def agreed(self) -> dict[int, Tensor]:
        """By the id of a run's parameter: what all agreed on, where that is not what it holds."""
        return {
            id(run.parameter): numbers
            for flat in ([] if self.is_agreed else self._flats)
            for run, numbers in zip(flat.runs, split_like(flat.sum, flat.tensors), strict=True)
        }

    @property
    def agreed_buffers(self) -> list[Tensor]:
        return self._buffers.now() if self.is_agreed else self._agreed_buffers

    @torch.no_grad()
    def forget(self) -> None:
        """Forget what was computed since the last agreement: the model is again as it was."""
        if not self.is_agreed:
            self._go_back()
        if self.is_pending:
            self._mean.forget()
        self._clear()

    @torch.no_grad()
    def start_anew(self) -> None:
        """The model's state has been replaced."""
        self._clear()
        self._mean.start_anew(self._replica.outer, self._flats)

    def _clear(self) -> None:
        self.is_agreed, self.is_pending, self._weight = True, False, 0.0
        self._forgotten += 1

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """The model as all agreed on it last, also in the middle of a window."""
        if self.is_agreed:
            yield
            return
        self._replica.before_parts_are_used()
        tensors = [*self._buffers.now(), *(tensor for flat in self._flats for tensor in flat.tensors)]
        own, forgotten = [tensor.clone() for tensor in tensors], self._forgotten
        with torch.no_grad():
            self._go_back()
        try:
            yield
        finally:
            if forgotten == self._forgotten:  # else the window was lost meanwhile, with the connection
                self.is_agreed = False
                with torch.no_grad():
                    torch._foreach_copy_(tensors, own)
                self._replica.on_parts_written()

    def _go_back(self) -> None:
        for flat in self._flats:
            flat.copy_from(flat.sum)
        self._buffers.put(self._agreed_buffers)
        self.is_agreed = True
        self._replica.on_parts_written()


def difference_(a: Tensor, b: Tensor) -> Tensor:
    """a - b, in a's memory. Of what is equal it is 0, also of two -inf, which a parameter may be for good."""
    if a.device.type != "cpu":
        return _compared_difference_(a, b)
    for own, other in zip(torch.split(a, AT_ONCE), torch.split(b, AT_ONCE), strict=True):  # they stay in the caches
        if own.sum().isfinite():
            own.sub_(other).add_(0.0)  # no -0, as of 0 and -0
        else:
            _compared_difference_(own, other)
    return a


def _compared_difference_(a: Tensor, b: Tensor) -> Tensor:
    is_same = a == b
    return a.sub_(b).masked_fill_(is_same, 0.0)


def finite_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Over the finite numbers: a parameter that is -inf on every replica does not make them drift apart."""
    norm = total_norm(tensors)
    return norm if norm.isfinite() else total_norm([tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in tensors])
