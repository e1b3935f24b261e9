"""A virtual Link. It fails at once where two ranks are at different calls, which would be a deadlock of processes.

What travels is poisoned until it is waited for: a process group writes into it meanwhile.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from potluck.coded_numbers import Coding
from potluck.coded_tensors import decode, encode
from potluck.errors import WorkerLost
from potluck.link.link import Link, Pending, Rows

if TYPE_CHECKING:
    from tests.fleet.virtual.group import Group, Rank

STEP = "fleet.step()"
LOST = "Another worker stopped answering"
"""How the sentence of a lost worker begins in production."""


def lost() -> WorkerLost:
    return WorkerLost(f"{LOST}: the virtual connection was reset")


class Mistake(BaseException):
    """Two ranks are at different calls: the group has failed, and this rank unwinds."""


class Operation:
    """One collective operation, from the first rank that begins it to the last that ends it."""

    def __init__(self, group: "Group", number: int, kind: str, call: str, form: str) -> None:
        self.kind, self.call, self.form = kind, call, form
        self.given: dict[int, Any] = {}
        self.arrived: set[int] = set()
        """Ranks that have seen its end."""
        self._group, self._number = group, number
        self._given_at: dict[int, float] = {}
        draw = random.Random(f"{group.pace.delays} operation {number}")
        self._latency_s = group.pace.latency_s * draw.expovariate(1.0)
        self._is_cut = [draw.random() < 0.5 for _ in range(group.world)]
        """Whether a rank loses what is under way when a peer dies that had begun it; some may have it and some not."""

    def __str__(self) -> str:
        return f"operation {self._number}, {self.kind} of {self.form or 'nothing'} in {self.call}"

    def give(self, rank: "Rank", value: Any) -> None:
        self.given[rank.number], self._given_at[rank.number] = value, rank.now

    def ends_at(self, rank: "Rank") -> float:
        """When it is here for a rank, or known to be lost; never: inf."""
        if self.is_lost_for(rank):
            return max(each.left_at for each in self._dead if each.left_at is not None)
        missing = [number for number in self._needed(rank) if number not in self.given]
        return math.inf if missing else self._done_at(rank)

    def is_lost_for(self, rank: "Rank") -> bool:
        """Whether a peer has died that had no part in it yet, or while it was under way."""
        if rank.number in self.arrived:
            return False
        needed = self._needed(rank)
        if any(each.number in needed and each.number not in self.given for each in self._dead):
            return True
        if any(number not in self.given for number in needed):
            return False
        done_at, is_cut = self._done_at(rank), self._is_cut[rank.number]
        return is_cut and any(each.left_at is not None and each.left_at < done_at for each in self._dead)

    def is_refused_to(self, rank: "Rank") -> bool:
        """Whether a rank finds that a peer has died when it begins this, and not only when it waits."""
        return self._is_cut[rank.number] and any(each.left_at <= rank.now for each in self._dead if each.left_at)

    def is_here_for(self, rank: "Rank") -> bool:
        return not self.is_lost_for(rank) and self.ends_at(rank) <= rank.now

    def _done_at(self, rank: "Rank") -> float:
        return max((self._given_at[number] for number in self._needed(rank)), default=rank.now) + self._latency_s

    def _needed(self, rank: "Rank") -> Sequence[int]:
        """The ranks whose part this one waits for."""
        if self.kind == "broadcast":
            return (0,)
        if self.kind.startswith("fetch"):
            return (int(self.kind.split()[-1]),) if rank.number == 0 else ()
        return range(self._group.world)

    @property
    def _dead(self) -> list["Rank"]:
        return [each for each in self._group.ranks if each.is_dead]


class VirtualLink(Link):
    """Every rank makes the same calls in the same order, or the whole group fails with both calls."""

    group = None

    def __init__(self, rank: "Rank") -> None:
        self.rank, self.world = rank.number, rank.group.world
        self.count = 0
        self._own = rank
        self._call, self._after_step = STEP, 0
        self._is_closed = False

    def part(self, groups: Sequence[Sequence[int]]) -> Link:
        raise AssertionError("only models that are split or cut have parts of a link, and here they are whole")

    def start_sum(self, tensor: Tensor) -> Pending:
        def finish(operation: Operation) -> None:
            with torch.no_grad():
                terms = [operation.given[number] for number in range(self.world)]
                total = terms[0].clone()
                for term in terms[1:]:  # in order of rank: the same bits everywhere
                    total += term
                tensor.detach().copy_(total)

        begun = self._begin("sum", f"{tuple(tensor.shape)} {tensor.dtype}", tensor.detach().clone(), finish)
        _poison(tensor)
        return begun

    def start_coded_sum(self, tensor: Tensor, coding: Coding) -> Pending:
        def finish(operation: Operation) -> None:
            total = torch.zeros(tensor.numel())
            for number in range(self.world):
                total += decode(coding, operation.given[number], torch.empty(tensor.numel()))
            tensor.detach().copy_(total)

        begun = self._begin("coded sum", f"{tensor.numel()} as {coding}", encode(coding, tensor.detach()), finish)
        _poison(tensor)
        return begun

    def start_gather(self, row: Sequence[float]) -> Rows:
        return self._begin("gather", f"{len(row)} numbers", [float(number) for number in row], self._all)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        found: list[bytes] = self._begin("gather of bytes", "", bytes(data), self._all).wait()
        return found

    def broadcast(self, tensor: Tensor) -> None:
        def finish(operation: Operation) -> None:
            if self.rank != 0:
                tensor.detach().copy_(operation.given[0])

        value = tensor.detach().clone() if self.rank == 0 else None
        self._begin("broadcast", f"{tuple(tensor.shape)} {tensor.dtype}", value, finish).wait()

    def fetch(self, numbers: Tensor, of: int) -> None:
        def finish(operation: Operation) -> None:
            if self.rank == 0 != of:
                numbers.copy_(operation.given[of])

        value = numbers.clone() if self.rank == of else None
        self._begin(f"fetch of {of}", f"{numbers.numel()} bytes", value, finish).wait()

    def meet(self, what: str, notice: Callable[[str], None]) -> None:
        self._begin("meeting", what, None, self._all).wait()

    def within(self, call: str, after_step: int) -> AbstractContextManager[None]:
        return self._within(call, after_step)

    @contextmanager
    def _within(self, call: str, after_step: int) -> Iterator[None]:
        before = self._call, self._after_step
        self._call, self._after_step = call, after_step
        try:
            yield
        finally:
            self._call, self._after_step = before

    def note_call(self) -> None:
        self._begin("note", "", None, self._all)

    def end_well(self) -> None:
        self._own.pause()

    def close(self) -> None:
        self._is_closed = True

    @staticmethod
    def _all(operation: Operation) -> list[Any]:
        return [operation.given[number] for number in sorted(operation.given)]

    def _begin(self, kind: str, form: str, value: Any, finish: Callable[[Operation], Any]) -> "_Begun":
        rank, group = self._own, self._own.group
        assert not self._is_closed, f"worker {self.rank} asks for a {kind} after it has closed its link"
        rank.pause(0.01 * group.pace.latency_s * rank.draw.random())
        call = self._call if not self._after_step else f"{self._call} after step {self._after_step}"
        number, self.count = self.count, self.count + 1
        if number == len(group.operations):
            group.operations.append(Operation(group, number, kind, call, form))
        first = group.operations[number]
        if (first.kind, first.call, first.form) != (kind, call, form):
            other = next(iter(first.given), "that is lost now")
            own = f"{kind} of {form or 'nothing'} in {call}"
            group.fail(AssertionError(f"worker {other} is at {first}, and worker {self.rank} at {own}"))
            raise Mistake
        if kind != "note" and first.is_refused_to(rank):
            raise lost()
        first.give(rank, value)
        group.note(rank, f"{kind} {form} {call}")
        return _Begun(rank, first, finish)


class _Begun:
    """An operation that this rank has begun. Its end is looked at once, whoever asks how often."""

    def __init__(self, rank: "Rank", operation: Operation, finish: Callable[[Operation], Any]) -> None:
        self._rank, self._operation, self._finish = rank, operation, finish
        self._found: list[Any] = []

    def is_here(self) -> bool:
        self._rank.pause()
        return bool(self._found) or self._operation.is_here_for(self._rank)

    def wait(self) -> Any:
        if not self._found:
            self._rank.wait_for(self._operation)
            self._found.append(self._finish(self._operation))
        return self._found[0]


def _poison(tensor: Tensor) -> None:
    """What travels is nobody's to read until it is here: a process group writes into it meanwhile."""
    if tensor.is_floating_point():
        tensor.detach().fill_(math.nan)
