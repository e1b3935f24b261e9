"""WindowDelta: what a window changed in a replica, and how the mean of that becomes everybody's. Local SGD, once.

Replicas step by themselves; at the end of a window their mean takes their place, or an outer optimizer steps along it.
How the mean is formed is said by a Mean: over a link parameters are averaged, by a host what each worker changed.
With overlap a replica steps on while a mean is formed, and keeps what it changed meanwhile when that is merged.
Where a replica is split over ranks, each of them has its own part here. Knows nothing of rows or of how it is stepped.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from potluck.agree.policy import Outer
from potluck.engine.buckets import split_like
from potluck.engine.buffers import SavedBuffers
from potluck.engine.flats import FlatBuffer
from potluck.engine.means import Mean
from potluck.engine.replica import Replica
from potluck.link.link import Alone, Link
from potluck.sharding.runs import FlatRun, total_norm

MOMENTUM, START = "outer_momentum", "outer_start"
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
    """For each part of a window: begin, train, end; then apply, at once or, with overlap, when the next one is done."""

    def __init__(
        self,
        replica: Replica,
        mean: Mean,
        outer: Outer | None = None,
        *,
        overlap: bool = False,
        within: Link = Alone(),
    ) -> None:
        """`within`: the ranks that hold the other parts of this replica."""
        self._replica = replica
        self._mean = mean
        self._outer = outer
        self._overlap = overlap
        self._within = within
        self._buffers = SavedBuffers(replica.model)
        self._before: list[Tensor] = []
        """The buffers where the part began."""
        self._agreed_buffers: list[Tensor] = []
        self._aside: list[Tensor] | None = None
        """The buffers of a part that is set aside; what it changed in the parameters is in each flat's `start`."""
        self._is_again = self._is_exact = False
        self._weight = 0.0
        self._forgotten = 0
        """How often forget() was called."""
        self.is_open = False
        """Whether a part is under way."""
        self.is_agreed = True
        """Under a host: whether the parameters are what all agreed on last."""
        self.is_pending = False
        """Whether a part has left whose mean is not merged."""
        self.drift = 0.0
        """How far this replica was from the last mean, as a part of it."""
        self._flats = mean.lay_out(replica, self._buffers)
        for flat in self._flats:
            if overlap or (outer is not None and not mean.of_changes):
                flat.start = flat.another()
            flat.agreed = flat.another() if overlap and mean.of_changes else flat.start
            flat.momentum = flat.another() if outer is not None else flat.sum
        self.start_anew()

    @property
    def runs(self) -> list[Sequence[FlatRun]]:
        """What this rank holds of the replica, in the pieces in which it travels."""
        return [flat.runs for flat in self._flats]

    @torch.no_grad()
    def begin(self, *, again: bool = False) -> None:
        """A part of a window begins, from the parameters as they are.

        `again`: of a window of which one part has left already, so it begins from what all agreed on. What the next
        window has changed by now is set aside until apply().
        """
        self._replica.before_parts_are_used()
        if again:
            self._set_aside()
        if self.is_agreed:
            self._agreed_buffers = self._buffers.copy()
        if self._aside is None:
            self._before = self._agreed_buffers if self.is_agreed else self._buffers.copy()
        self._is_again = again
        self.is_open = True
        if not self._mean.of_changes:
            return
        if not self._overlap:  # what left last lies where this part's beginning is kept
            self._mean.clear()
        for flat in self._flats:
            if self.is_agreed:
                flat.copy_to(flat.agreed)
            if self._overlap and self._aside is None:
                flat.copy_to(flat.start)
        self.is_agreed = False

    def exact(self) -> bytes:
        """What the part changed in buffers that have no mean. Before end()."""
        return self._buffers.for_host(self._began(), 0.0)[1]

    @torch.no_grad()
    def end(self, weight: float, *, exactly: bool = False) -> None:
        """The part is done, and leaves by its weight. A host's worker without overlap is back where all began.

        `exactly`: with overlap over a link, nothing is done until apply(), so that all replicas are equal then.
        """
        self._weight, self._is_exact, self.is_open, self.is_pending = weight, exactly, False, True
        self._replica.before_parts_are_used()
        self._mean.clear()
        for index, flat in enumerate(self._flats):
            with self._mean.beside():
                self._fill(flat)
                # 0 times what is -inf for good would be NaN.
                flat.sum.mul_(weight) if weight else flat.sum.zero_()
            self._mean.start(index, flat.sum)
        if not exactly:
            self._mean.start_buffers(self._buffers, self._began(), weight)
        if self._mean.of_changes and not self._overlap:
            self._buffers.put(self._before)
            self.is_agreed = True
            self._replica.on_parts_written()

    def _fill(self, flat: FlatBuffer) -> None:
        """Fills it with what is sent: the parameters, or what the part has changed in them."""
        if not self._mean.of_changes:
            if self._overlap and not self._is_exact:
                flat.sum.copy_(flat.copy_to(flat.start))
            else:
                flat.copy_to(flat.sum)
        elif self._overlap:
            difference_(flat.sum.copy_(flat.agreed if self._is_again else flat.start), flat.joined())
        else:
            ended = flat.joined()
            flat.copy_from(flat.start)
            difference_(flat.sum, ended)

    @torch.no_grad()
    def apply(self) -> None:
        """Merges the mean."""
        drift = Drift()
        self._replica.before_parts_are_used()
        if self._mean.of_changes:
            self._set_aside()
        for flat, mean in zip(self._flats, self._mean.arriving(self._flats), strict=True):
            if self._mean.of_changes:
                self._take_change(flat, mean, drift)
            elif self._overlap and not self._is_exact:
                self._correct(flat, mean, drift)
            else:
                self._take(flat, mean, drift)
        self._mean.finish_buffers(self._buffers)
        self._weight, self.is_pending = 0.0, False
        self._resume()
        self._replica.on_parts_written()
        found = drift.share(self._within)
        self.drift = self.drift if self._is_exact else found

    def settle(self, weight: float) -> None:
        """All replicas are equal after this, also with overlap. Over a link, and on every rank alike."""
        if self.is_pending:
            self.apply()
            if not self._mean.of_changes:
                self.end(weight, exactly=True)
                self.apply()
        with torch.no_grad():
            self._mean.settle()

    def _take(self, flat: FlatBuffer, mean: Tensor, drift: Drift) -> None:
        """The mean of all parameters takes the place of this replica's; or the outer optimizer steps towards it."""
        torch._foreach_sub_(flat.tensors, split_like(mean, flat.tensors))  # own - mean
        drift.add(flat.tensors, [mean])
        if self._outer is None:
            flat.copy_from(mean)
        else:
            change = flat.start - mean
            flat.momentum.mul_(self._outer.momentum).add_(change)
            flat.start.sub_(change.add_(flat.momentum, alpha=self._outer.momentum), alpha=self._outer.lr)
            flat.copy_from(flat.start)

    def _correct(self, flat: FlatBuffer, mean: Tensor, drift: Drift) -> None:
        """Of what this replica had when the mean was begun, with what it changed since."""
        moved = difference_(flat.start, mean)
        drift.add([moved], [mean])
        moves = split_like(moved, flat.tensors)
        if moved.dtype == flat.tensors[0].dtype:
            torch._foreach_sub_(flat.tensors, moves)
        else:
            torch._foreach_copy_(flat.tensors, torch._foreach_sub([t.float() for t in flat.tensors], moves))

    def _take_change(self, flat: FlatBuffer, mean: Tensor, drift: Drift) -> None:
        """From where all began, by what all changed."""
        moved = mean
        if self._outer is not None:
            # One operation at a time: a fused one rounds otherwise on some devices, and all must have the same bits.
            flat.momentum.mul_(self._outer.momentum).add_(mean)
            moved = flat.momentum.mul(self._outer.momentum).add_(mean).mul_(self._outer.lr)
        torch._foreach_sub_(flat.tensors, split_like(moved, flat.tensors))
        drift.add([flat.sum / self._weight - mean] if self._weight else [], flat.tensors)

    # What all agreed on, while this replica is elsewhere

    def agreed(self) -> dict[int, Tensor]:
        """By the id of a run's parameter: what all agreed on, where that is not what it holds."""
        return {
            id(run.parameter): numbers
            for flat in ([] if self.is_agreed else self._flats)
            for run, numbers in zip(flat.runs, split_like(flat.agreed, flat.tensors), strict=True)
        }

    @property
    def agreed_buffers(self) -> list[Tensor]:
        return self._buffers.now() if self.is_agreed else self._agreed_buffers

    @torch.no_grad()
    def forget(self) -> None:
        """What was computed since the last agreement is of no use: the model is again as it was."""
        if not self.is_agreed:
            self._go_back()
        if self.is_pending:
            self._mean.forget()
        self._clear()

    @torch.no_grad()
    def follow(self) -> None:
        """All have stepped together: the outer optimizer continues from there."""
        for flat in self._flats if self._outer is not None and not self._mean.of_changes else ():
            flat.copy_to(flat.start)

    @torch.no_grad()
    def start_anew(self) -> None:
        """The model's state has been replaced, and with it what the outer optimizer keeps."""
        self._clear()
        for flat in self._flats if self._outer is not None else ():
            flat.momentum.zero_()
            if not self._mean.of_changes:
                flat.copy_to(flat.start)
            self._take_outer(flat)
        self._mean.start_anew(self._replica.outer, self._flats)
        self._replica.outer.drop_loaded()

    def _take_outer(self, flat: FlatBuffer) -> None:
        """What was loaded; and from here on, what is saved."""
        outer = self._replica.outer
        momenta, starts = split_like(flat.momentum, flat.tensors), split_like(flat.start, flat.tensors)
        for run, momentum, start in zip(flat.runs, momenta, starts, strict=True):
            name = outer.names.get(id(run.parameter), "")
            loaded, kept = outer.loaded.get(name, {}), {MOMENTUM: momentum}
            if MOMENTUM in loaded:
                momentum.copy_(loaded[MOMENTUM])
            if start.dtype != run.parameter.dtype:  # it has digits that the parameter has not
                kept[START] = start
                if START in loaded and torch.equal(loaded[START].to(start).to(run.parameter.dtype), run.parameter.data):
                    start.copy_(loaded[START])
            if name:
                outer.kept.setdefault(name, {}).update(kept)

    def _clear(self) -> None:
        self.is_open = self.is_pending = False
        self.is_agreed, self._aside, self._weight = True, None, 0.0
        self._forgotten += 1

    @contextmanager
    def as_agreed(self) -> Iterator[None]:
        """The model as all agreed on it last, also in the middle of a window."""
        if self.is_agreed:
            yield
            return
        self._replica.before_parts_are_used()
        tensors = [*self._buffers.now(), *(tensor for flat in self._flats for tensor in flat.tensors)]
        own, forgotten, is_open = [tensor.clone() for tensor in tensors], self._forgotten, self.is_open
        with torch.no_grad():
            self._go_back()
        self.is_open = False
        try:
            yield
        finally:
            if forgotten == self._forgotten:  # else the window was lost meanwhile, with the connection
                self.is_open, self.is_agreed = is_open, False
                with torch.no_grad():
                    torch._foreach_copy_(tensors, own)
                self._replica.on_parts_written()

    def _go_back(self) -> None:
        for flat in self._flats:
            flat.copy_from(flat.agreed)
        self._buffers.put(self._agreed_buffers)
        self.is_agreed = True
        self._replica.on_parts_written()

    def _began(self) -> list[Tensor]:
        """The buffers where the part began that is under way."""
        return self._agreed_buffers if self._is_again else self._before

    def _set_aside(self) -> None:
        """The model is what all agreed on; what a part has changed that has not left is kept."""
        if self.is_agreed:
            return
        if self._overlap and self.is_open and not self._is_again:
            for flat in self._flats:
                difference_(flat.start, flat.joined())
            self._aside = self._buffers.copy()
        self._go_back()

    def _resume(self) -> None:
        """What was set aside continues from what all agree on now."""
        if self._aside is None:
            return
        for flat in self._flats:
            flat.copy_to(flat.agreed)
            flat.copy_from(flat.agreed - flat.start)
            flat.start.copy_(flat.agreed)
        own, self._aside = self._aside, None
        self._agreed_buffers = self._buffers.copy()
        self._buffers.put(self._buffers.carried(self._before, own, self._agreed_buffers))
        self._before = self._agreed_buffers
        self.is_open, self.is_agreed, self._is_again = True, False, False


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
