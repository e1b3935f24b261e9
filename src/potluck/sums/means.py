"""Mean: how the mean of all replicas is formed. LinkMean adds up parameters over a link, CodedLinkMean what was changed
in them, in fewer bits; HostMean has a host average what each worker changed. What travels passes through start(), and
nowhere else. ErrorFeedback sends with the next numbers what coding left out of these. Knows nothing of windows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import round_
from potluck.errors import ConfigError
from potluck.fleet.description import Part
from potluck.link.link import Link, Pending
from potluck.replica.buckets import Allocate, split_like
from potluck.replica.buffers import SavedBuffers
from potluck.replica.moments import HostMoments
from potluck.replica.outer_state import PREFIX, OuterState
from potluck.replica.replica import Replica
from potluck.sharding.blocks import find_blocks
from potluck.sharding.runs import FlatRun
from potluck.sums.slices import check_float32, plan_parts

if TYPE_CHECKING:
    from potluck.sums.node_sums import CollectParts, NodeParts

FLAT_BYTES = 32 << 20
"""The size of one buffer: while one of them travels, the next is filled."""


class FlatBuffer:
    """Holds some runs end to end between two agreements. Each buffer is [sum of the runs' sizes]."""

    def __init__(self, runs: Sequence[FlatRun], allocate: Callable[[int, Tensor], Tensor]) -> None:
        self.runs = runs
        self.tensors = [run.parameter.data for run in runs]
        self.sum = allocate(sum(tensor.numel() for tensor in self.tensors), self.tensors[0])
        """What leaves, weighted; over a link, the sum of all replicas' takes its place. Where changes travel, what all
        agreed on last lies here while the parameters are elsewhere."""

    def copy_to(self, flat: Tensor) -> Tensor:
        torch._foreach_copy_(split_like(flat, self.tensors), self.tensors)
        return flat

    def copy_from(self, flat: Tensor) -> None:
        torch._foreach_copy_(self.tensors, split_like(flat, self.tensors))

    def joined(self) -> Tensor:
        """The parameters as they are now; a copy."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors])


def pack(runs: Sequence[FlatRun]) -> list[FlatBuffer]:
    """Runs of one type after the other, in buffers of some size."""
    flats: list[FlatBuffer] = []
    for dtype in dict.fromkeys(run.parameter.dtype for run in runs):
        group: list[FlatRun] = []
        for run in (run for run in runs if run.parameter.dtype == dtype):
            if group and sum(other.parameter.nbytes for other in group) + run.parameter.nbytes > FLAT_BYTES:
                flats.append(FlatBuffer(group, _allocate))
                group = []
            group.append(run)
        flats.append(FlatBuffer(group, _allocate))
    return flats


def _allocate(total: int, like: Tensor) -> Tensor:
    half = like.dtype in (torch.float16, torch.bfloat16)  # their mean would lose digits
    return torch.empty(total, dtype=torch.float32 if half else like.dtype, device=like.device)


RESIDUAL = f"{PREFIX}residual"


class ErrorFeedback:
    """Remainders that coding left out of what was sent, kept to be sent with what comes next.

    Without it numbers that are small beside their block's largest would be rounded away window after window. They are a
    worker's own: a newcomer begins without any, and so does one whose last change was lost. Knows nothing of windows.
    """

    def __init__(self, coding: Coding) -> None:
        self.coding = coding
        self._left: dict[int, Tensor] = {}
        """By the number of a flat buffer; weighted, as what is sent is."""
        self._is_shared = True

    def code(self, index: int, numbers: Tensor) -> None:
        """The numbers of a flat buffer become what will arrive of them and of what was left out before."""
        left = self._of(index, numbers)
        numbers.add_(left)
        left.copy_(numbers)
        round_(self.coding, numbers)
        left.sub_(numbers).nan_to_num_(0.0, 0.0, 0.0)  # what is not finite must not stay here for good
        self._is_shared = False

    def clear(self) -> None:
        for left in self._left.values():
            left.zero_()
        self._is_shared = True

    def share(self, link: Link) -> None:
        """Each worker's becomes the mean of all: their sum is what matters, and a checkpoint has one for everybody."""
        if self._is_shared:
            return
        for left in self._left.values():
            link.start_coded_sum(left, self.coding).wait()
            left.mul_(1 / link.world)
        self._is_shared = True

    def keep_in(self, outer: OuterState, flats: Sequence[FlatBuffer]) -> None:
        """With the optimizer's state; and what was loaded with that is taken."""
        for index, flat in enumerate(flats):
            pieces = split_like(self._of(index, flat.sum), flat.tensors)
            for run, piece in zip(flat.runs, pieces, strict=True):
                name = outer.names.get(id(run.parameter), "")
                if (loaded := outer.loaded.get(name, {}).pop(RESIDUAL, None)) is not None:
                    piece.copy_(loaded)
                if name:
                    outer.kept.setdefault(name, {})[RESIDUAL] = piece

    def _of(self, index: int, numbers: Tensor) -> Tensor:
        if index not in self._left:
            self._left[index] = torch.zeros_like(numbers)
        return self._left[index]


class Mean(Protocol):
    of_changes: bool
    """Whether changes travel, and the replica is back where it began meanwhile; else the parameters do."""

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[FlatBuffer]:
        """Lay out what this rank holds of a replica, in the pieces in which it travels. Called once."""

    def clear(self) -> None:
        """Waits until what was sent before may be overwritten."""

    def beside(self) -> AbstractContextManager[object]:
        """A context in which what is sent is prepared."""

    def start(self, index: int, numbers: Tensor) -> None:
        """Starts to send the weighted numbers of a flat buffer."""

    def start_buffers(self, buffers: SavedBuffers, before: list[Tensor], weight: float) -> None:
        """Starts to send what has changed in the buffers since then."""

    def arriving(self, flats: Sequence[FlatBuffer]) -> Iterator[Tensor]:
        """Yields the mean of each, as soon as it is here. Do not overwrite it."""

    def finish_buffers(self, buffers: SavedBuffers) -> None:
        """The buffers, which are what all agreed on last, become what all agree on now."""

    def settle(self) -> None:
        """All replicas have agreed: what each keeps for the next mean becomes the same everywhere."""
        return

    def start_anew(self, outer: OuterState, flats: list[FlatBuffer]) -> None:
        """The replica's state has been replaced, and with it what is kept here; `outer` has what was saved."""
        return

    def forget(self) -> None:
        """Forget a mean that was under way: what has left was lost."""
        return


class LinkMean(Mean):
    """The sum over all ranks of a link, of parameters whose weights add up to 1."""

    of_changes = False

    def __init__(self, link: Link) -> None:
        """`link`: the ranks that hold the same part of other replicas."""
        self._link = link
        self._pending: list[Pending] = []
        self._stream: torch.cuda.Stream | None = None

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[FlatBuffer]:
        flats = pack(replica.owned())
        device = flats[0].sum.device if flats else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        return flats

    def clear(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def start(self, index: int, numbers: Tensor) -> None:
        self._join()  # what was copied there must not change under it
        with self.beside():
            self._pending.append(self._link.start_sum(numbers))

    def start_buffers(self, buffers: SavedBuffers, before: list[Tensor], weight: float) -> None:
        """Buffers are small, and not all of them have a mean: they are shared at once."""
        buffers.average(self._link, weight, before)

    def arriving(self, flats: Sequence[FlatBuffer]) -> Iterator[Tensor]:
        for flat, pending in zip(flats, self._pending, strict=True):
            with self.beside():
                pending.wait()
            self._join()
            yield flat.sum
        self._pending = []

    def finish_buffers(self, buffers: SavedBuffers) -> None:
        """Nothing to do: they already are."""

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class CodedLinkMean(LinkMean):
    """The sum over all ranks of a link, of changes whose weights add up to 1, in fewer bits."""

    of_changes = True

    def __init__(self, link: Link, coding: Coding) -> None:
        super().__init__(link)
        self._feedback = ErrorFeedback(coding)
        self._sums: list[Tensor] = []
        self._changed: tuple[list[Tensor], list[Tensor], float] = [], [], 0.0
        """The buffers of this replica, where they began, and its weight."""

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[FlatBuffer]:
        flats = super().lay_out(replica, buffers)
        if any(run.parameter.dtype != torch.float32 for flat in flats for run in flat.runs):
            raise ConfigError(
                "What windows change travels in fewer bits where parameters are float32, and some here are not. Keep"
                " parameters in float32 and use step.precision = bf16 to compute in bf16, or leave out wire."
            )
        return flats

    def start(self, index: int, numbers: Tensor) -> None:
        self._join()
        with self.beside():
            self._feedback.code(index, numbers)
            self._sums.append(numbers.clone())
            self._pending.append(self._link.start_coded_sum(self._sums[-1], self._feedback.coding))

    def start_buffers(self, buffers: SavedBuffers, before: list[Tensor], weight: float) -> None:
        self._changed = buffers.copy(), before, weight

    def arriving(self, flats: Sequence[FlatBuffer]) -> Iterator[Tensor]:
        for _, sum_ in zip(super().arriving(flats), self._sums, strict=True):
            yield sum_
        self._sums = []

    def finish_buffers(self, buffers: SavedBuffers) -> None:
        own, before, weight = self._changed
        if own:
            buffers.put(own)
            buffers.average(self._link, weight, before)

    def settle(self) -> None:
        self._feedback.share(self._link)

    def start_anew(self, outer: OuterState, flats: list[FlatBuffer]) -> None:
        self._feedback.clear()
        self._feedback.keep_in(outer, flats)


class HostMean(Mean):
    """A host forms it, part by part, from what its workers send."""

    of_changes = True

    def __init__(
        self,
        send: Callable[[int, Tensor], None],
        clear: Callable[[], None],
        allocate: Allocate | None = None,
        coding: Coding | None = None,
        *,
        has_moments: bool = False,
        collect_parts: "CollectParts | None" = None,
    ) -> None:
        """`send(part, numbers)`; `clear()`: until what was sent has left. `allocate`: for tensors that it prefers.

        `coding`: how changes travel. A state that a worker sends is everybody's, and so has no error feedback in it.
        `has_moments`: what the optimizer keeps travels too, and nothing that coding left out of it is kept.
        `collect_parts`: how they are put together, where several ranks hold the replica. The first of them sends all.
        """
        self._has_moments = has_moments
        self.moments: HostMoments | None = None
        self._send = send
        self._clear = clear
        self._feedback = ErrorFeedback(coding) if coding is not None else None
        self._allocate = allocate or _zeros
        self._collect_parts = collect_parts
        self.collected: NodeParts | None = None
        self.described: tuple[Part, ...] = ()
        self._told: tuple[Sequence[Tensor], bytes] = (), b""

    def lay_out(self, replica: Replica, buffers: SavedBuffers) -> list[FlatBuffer]:
        model = replica.model
        planned = plan_parts(model, find_blocks(model))
        parts = tuple(part for part, _ in planned)
        held = replica.held()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[held[names[id(each)]] for each in of] for _, of in planned]
        runs: list[list[FlatRun]] = [[run for own in group for run in own] for group in groups]
        check_float32([run.parameter for each in runs for run in each])
        if self._has_moments:
            optimizer, known, within = replica.optimizer, replica.outer.names, replica.within
            self.moments = HostMoments(optimizer, known, groups, within, self._allocate)
            parts += self.moments.describe(parts)
        self.described = parts + buffers.parts
        self._moments_at = len(planned)
        if self._collect_parts is not None:
            each = len(self.moments.blocks) if self.moments is not None else 0
            own = runs + [run for run in runs for _ in range(each)]
            self.collected = self._collect_parts(self.described[: len(own)], own, self.described[len(own) :])
        return [FlatBuffer(each, self._allocate) for each in runs]

    def clear(self) -> None:
        self._clear()

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def start(self, index: int, numbers: Tensor) -> None:
        if self.collected is not None:
            if (whole := self.collected.collect(index, numbers)) is None:
                return
            numbers = whole
        if self._feedback is not None and index < self._moments_at:
            self._feedback.code(index, numbers)
        self._send(index, numbers)

    def start_buffers(self, buffers: SavedBuffers, before: list[Tensor], weight: float) -> None:
        if self.moments is not None:
            self.moments.send(weight, lambda number, numbers: self.start(self._moments_at + number, numbers))
        if len(buffers):
            self._send(len(self.described) - 1, buffers.for_host(before, weight)[0])

    def take(self, means: Sequence[Tensor], exact: bytes = b"") -> None:
        """Take what the host has told: the mean of each part, in host memory, and what changed in buffers and has
        none."""
        self._told = means, exact

    def arriving(self, flats: Sequence[FlatBuffer]) -> Iterator[Tensor]:
        means, _ = self._told
        for flat, mean in zip(flats, means, strict=False):
            yield mean[: len(flat.sum)].to(flat.sum.device)  # norms of gradients may come with it

    def finish_moments(self) -> None:
        """The mean of what all optimizers keep becomes every worker's."""
        if self.moments is not None:
            self.moments.receive(self._told[0][self._moments_at :])

    def finish_buffers(self, buffers: SavedBuffers) -> None:
        if len(buffers):
            means, exact = self._told
            buffers.apply_from_host(buffers.copy(), means[-1], exact)

    def start_anew(self, outer: OuterState, flats: list[FlatBuffer]) -> None:
        self.forget()

    def forget(self) -> None:
        if self._feedback is not None:
            self._feedback.clear()


def _zeros(total: int, like: Tensor) -> Tensor:
    return torch.zeros(total, device=like.device)
