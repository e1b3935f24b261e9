"""Units: parameters that are gathered together, and otherwise split over the ranks in proportion to weights.

    unit      the parameters of one block, or all that are in no block
    stretch   a unit's parameters of one type that are all trained or all frozen, end to end; each rank owns a range
    home      a rank's ranges of all stretches, as far as one of the optimizer's groups steps them: one flat tensor

A gathered stretch is one flat tensor, of which the parameters are views. Only its storage comes and goes: autograd's
saved views of it find their numbers again once it is gathered again. Knows nothing of when that has to happen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, nn

from potluck.sharding.absent import AbsentParameter, check_unwritten, name_parameter, watch
from potluck.sharding.collectives import Collectives, Done, Pending
from potluck.sharding.optimizer_shard import OptimizerShard
from potluck.sharding.runs import Span


class Placement(Enum):
    """Where a unit's bytes are."""

    SPLIT = auto()  # each rank's own ranges alone
    ARRIVING = auto()  # there is memory for all of it, which the owners fill
    WHOLE = auto()  # its parameters can be used


@dataclass(frozen=True, slots=True)
class FlatParamMember:
    """A parameter of a stretch."""

    name: str
    parameter: nn.Parameter
    group: int | None
    """Index of its group in the optimizer; none: this parameter is frozen."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The optimizer's dtype for it; it may compute in another one."""

    @property
    def is_trained(self) -> bool:
        return self.group is not None


class OwnedShard:
    """Holds the numbers of one dtype that one of the optimizer's groups steps on this rank, or numbers that it does not
    step."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, *, is_trained: bool) -> None:
        self.flat = torch.empty(size, dtype=dtype, device=device)  # [size]
        self.gradient = torch.zeros_like(self.flat) if is_trained else None  # [size]
        self.spans: dict[int, Span] = {}
        """What is in it, by where that begins."""
        self._filled = 0

    def take(self, member: FlatParamMember, span: Span) -> slice:
        """Copies some of a parameter's numbers. Returns where they are."""
        place = slice(self._filled, self._filled + span.size)
        self.flat[place].copy_(member.parameter.detach().reshape(-1)[span.start : span.end])
        self.spans[place.start] = span
        self._filled = place.stop
        return place


@dataclass(frozen=True, slots=True)
class FlatParamPiece:
    """A part of a stretch that lies in one home."""

    start: int
    end: int
    numbers: Tensor  # [end - start]
    gradient: Tensor | None  # [end - start]


class FlatParam:
    def __init__(
        self,
        members: Sequence[FlatParamMember],
        rank: int,
        weights: Sequence[float],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: in which it is gathered."""
        self.members = sorted(members, key=lambda member: -1 if member.group is None else member.group)
        self.is_trained = self.members[0].is_trained
        ends = list(accumulate(member.parameter.numel() for member in self.members))
        self.starts = [0, *ends]
        shards = [OptimizerShard.for_weights(other, weights, ends[-1]) for other in range(len(weights))]
        self.own = shards[rank]
        self._ranges = [(each.rank, slice(each.param_start, each.param_end)) for each in shards if each.shard_size]
        """What each rank owns, if it owns any."""
        self.pieces: list[FlatParamPiece] = []
        self.whole = torch.empty(ends[-1], dtype=dtype, device=device)  # [all numbers], if gathered
        self._whole_bytes = self.whole.untyped_storage().nbytes()
        cuts = pairwise(self.starts)
        self._views = [self.whole[a:b].view(m.shape) for (a, b), m in zip(cuts, self.members, strict=True)]
        self.whole.untyped_storage().resize_(0)
        self._classes = [type(member.parameter) for member in self.members]
        # What reads one that is not gathered, below Python, must see nonsense that shows, and not memory that is gone.
        nothing = torch.full(
            (), float("nan") if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=device
        )
        self._absent = [nothing.expand(member.shape) for member in self.members]
        self._gradient: Tensor | None = None  # [all numbers], while it arrives
        self._arrived: set[int] = set()
        self._pending: Pending = Done()

    def own_spans(self) -> list[tuple[int, Span]]:
        """List the spans of its members that this rank owns, each with its member's index."""
        spans = []
        for index, (member, (start, end)) in enumerate(zip(self.members, pairwise(self.starts), strict=True)):
            low, high = max(start, self.own.param_start), min(end, self.own.param_end)
            if low < high:
                spans.append((index, Span(member.name, member.shape, low - start, high - start)))
        return spans

    def move_into(self, homes: dict[tuple[torch.dtype, int | None], OwnedShard]) -> None:
        """Each rank keeps its own range, and the parameters lose their memory."""
        at = self.own.param_start
        for group, spans in groupby(self.own_spans(), key=lambda found: self.members[found[0]].group):
            home = homes[self.members[0].dtype, group]
            places = [home.take(self.members[index], span) for index, span in spans]
            place = slice(places[0].start, places[-1].stop)
            end = at + place.stop - place.start
            gradient = home.gradient[place] if home.gradient is not None else None
            self.pieces.append(FlatParamPiece(at, end, home.flat[place], gradient))
            at = end
        for member, tensor in zip(self.members, self._absent, strict=True):
            member.parameter.data = tensor
            name_parameter(member.parameter, member.name)

    def _point(self, tensors: list[Tensor], *, absent: bool) -> None:
        for member, tensor, own in zip(self.members, tensors, self._classes, strict=True):
            parameter = member.parameter
            parameter.__class__ = own
            parameter.data = tensor
            if absent:
                parameter.__class__ = AbsentParameter

    def hide(self) -> None:
        """Whatever uses a parameter that is not gathered is told, and gets no numbers."""
        self._point(self._absent, absent=True)

    def start_gather(self, over: Collectives) -> None:
        self.whole.untyped_storage().resize_(self._whole_bytes)
        self._pending = self._start_broadcasts(self.whole, over)

    def gather_aside(self, over: Collectives) -> None:
        """Sends this rank's range to others that gather it now, while this rank has all of it already."""
        self._start_broadcasts(torch.empty_like(self.whole), over).wait()

    def _start_broadcasts(self, whole: Tensor, over: Collectives) -> Pending:
        """Begin to fill this memory from the owners, of which this rank is one."""
        for piece in self.pieces:
            whole[piece.start : piece.end].copy_(piece.numbers)
        return over.start_broadcasts((owner, whole[place]) for owner, place in self._ranges)

    def show(self) -> None:
        self._pending.wait()
        self._point(self._views, absent=False)
        self._versions = [member.parameter._version for member in self.members]

    def watch(self) -> None:
        watch(member.parameter for member in self.members)

    def check_unwritten(self) -> None:
        check_unwritten((m.parameter, version) for m, version in zip(self.members, self._versions, strict=True))

    def release(self) -> None:
        self._pending.wait()
        self.hide()
        self.whole.untyped_storage().resize_(0)

    # Gradients

    def add_gradient(self, index: int) -> None:
        """Moves a parameter's gradient to where it leaves from."""
        parameter = self.members[index].parameter
        assert parameter.grad is not None
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if self._gradient is None:
            self._gradient = torch.empty(self.starts[-1], dtype=self.members[0].dtype, device=self.whole.device)
        part = self._gradient[self.starts[index] : self.starts[index + 1]].view(self.members[index].shape)
        if index in self._arrived:
            part.add_(gradient)
        else:
            part.copy_(gradient)
        self._arrived.add(index)
        parameter.grad = None

    def start_reduce(self, over: Collectives) -> "Sum":
        """Begin to sum the gradient over the ranks, to each range's owner. Numbers that no backward of this rank has
        used count as zeros."""
        gradient = self._gradient
        if gradient is None:
            gradient = torch.zeros(self.starts[-1], dtype=self.members[0].dtype, device=self.whole.device)
        else:
            for index in range(len(self.members)):
                if index not in self._arrived:
                    gradient[self.starts[index] : self.starts[index + 1]].zero_()
        self.forget_gradient()
        return Sum(self.pieces, gradient, over.start_reduces((owner, gradient[place]) for owner, place in self._ranges))

    def forget_gradient(self) -> None:
        self._gradient = None
        self._arrived.clear()


@dataclass(frozen=True, slots=True)
class Sum:
    """A stretch's gradients on their way to their owners."""

    pieces: list[FlatParamPiece]
    gradient: Tensor  # [all numbers of the stretch]
    work: Pending

    def take_in(self, share: float, sum_over_nodes: Callable[[Tensor], None] | None = None) -> None:
        self.work.wait()
        for piece in self.pieces:
            assert piece.gradient is not None
            if sum_over_nodes is not None:
                sum_over_nodes(self.gradient[piece.start : piece.end])
            piece.gradient.add_(self.gradient[piece.start : piece.end], alpha=share)


class ParamGroup:
    def __init__(self, stretches: list[FlatParam]) -> None:
        self.stretches = stretches
        self.placement = Placement.SPLIT
        self.in_use = False
        """Whether this rank computes with it, or has to keep it whole until it does."""
        self.began = 0
        """Where autograd's count of operations stood when its forward began."""
        self.uses = 0
        """Forwards whose backwards have not come yet."""
        self.owes_sums = False
        """Whether a backward has used it since its gradients left."""

    def start_gather(self, over: Collectives) -> None:  # SPLIT -> ARRIVING
        if self.placement is Placement.SPLIT:
            for stretch in self.stretches:
                stretch.start_gather(over)
            self.placement = Placement.ARRIVING

    def gather_aside(self, over: Collectives) -> None:
        for stretch in self.stretches:
            stretch.gather_aside(over)

    def gather(self, over: Collectives) -> None:  # SPLIT or ARRIVING -> WHOLE
        self.start_gather(over)
        if self.placement is Placement.ARRIVING:
            for stretch in self.stretches:
                stretch.show()
            self.placement = Placement.WHOLE

    def release(self) -> None:  # ARRIVING or WHOLE -> SPLIT
        self.in_use = False
        if self.placement is not Placement.SPLIT:
            self.check_unwritten()
            for stretch in self.stretches:
                stretch.release()
            self.placement = Placement.SPLIT

    def watch(self) -> None:
        """Have the next check refuse what is written from now on."""
        for stretch in self.stretches:
            stretch.watch()

    def check_unwritten(self) -> None:
        if self.placement is Placement.WHOLE:
            for stretch in self.stretches:
                stretch.check_unwritten()

    def hide(self) -> None:
        for stretch in self.stretches:
            stretch.hide()

    def forget(self) -> None:
        self.uses, self.owes_sums = 0, False
        for stretch in self.stretches:
            stretch.forget_gradient()
