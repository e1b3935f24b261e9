"""Passes: the order in which ranks begin their collectives, where each may run other blocks than the rest.

    unit   parameters that are gathered together, and whose gradients are summed together
    pass   a forward or a backward
    plan   what a pass begins, in order, on every rank: gather(unit) and sum(unit)
    want   a rank needs one of these now, because its rows led it there

Experts, branches and layers that are left out make ranks want different things, and ranks that began different
collectives would add up each other's numbers. So each begins what the plan says, also what it does not want itself:
there it sends its part of the parameters, or zeros. A rank that wants what is not left in the plan ends the plan first,
and then asks: all ranks that have ended theirs agree on one wish at a time, until nobody has any. The plan is a guess,
and what it costs to be wrong is time. It is learnt from passes that did not fit it, on all ranks alike.

Knows nothing of tensors of parameters, nor of how they are gathered.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from potluck.errors import ConfigError

Kind = Literal["forward", "backward"]
UNEQUAL = (
    "Some workers called backward() with last=False where others called the last one of the step. This strategy sums"
    " gradients in each backward, so every worker has to run as many of them. Cut batches with micro_batch_size= of"
    " prepare(), which gives each worker as many parts; or use NoShard, or ShardGradOp(keep_gradients=True)."
)


class Passes:
    def __init__(
        self,
        units: int,
        *,
        begin: Callable[[int, bool], None],
        skip: Callable[[int], None],
        may_begin_early: Callable[[int], bool],
        agree: Callable[[Tensor], None],
        used: Callable[[], Sequence[bool]] = tuple,
    ) -> None:
        """An operation is a number: gather(unit) or sum(unit).

        `begin`: takes part in one; and whether this rank wants it. `skip`: it was begun, and this rank does not want
        it. `may_begin_early`: a gather, before anybody wants it. `used`: what to tell of a backward beside its order.
        `agree`: a collective that makes each number the largest of all ranks'.
        """
        self.units = units
        self.kind: Kind | None = None
        """The pass that is under way."""
        self.used_by_any: list[bool] = []
        """What `used` gave in the last backward, by any rank."""
        self.announced: bool | None = None
        """Whether the backward that is to come is the step's last; None: none was announced, as for one in a loss."""
        self._differ = False
        self._lasts: list[int] = []
        """Whether any rank takes a backward for the last, and whether any does not."""
        self._begin, self._skip, self._may_begin_early = begin, skip, may_begin_early
        self._used, self._agree = used, agree
        self._plans: dict[Kind, list[int]] = {"forward": list(range(units)), "backward": self._way_back()}
        self._trace: list[int] = []
        """What this pass has begun so far, on every rank alike: first its plan, and then what was agreed on."""
        self._wanted: list[bool] = []
        self._at = 0
        """Of the trace: what comes before is passed; at most one gather was begun early and comes after."""
        self._early: int | None = None
        """Where in the trace a gather stands that was begun early, and that this rank may want yet."""

    def gather(self, unit: int) -> int:
        return unit

    def sum(self, unit: int) -> int:
        return self.units + unit

    def start(self, kind: Kind) -> None:
        if self.kind is not None:  # a stage has left the model's forward in the middle
            self.end(self.kind)
        self.kind = kind
        self._trace, self._wanted, self._at, self._early = [], [], 0, None

    def want(self, operation: int) -> None:
        """Returns once it has begun."""
        plan = self._plan
        if self._early is not None and operation < self.units:
            early, self._early = self._early, None
            if self._trace[early] == operation:
                self._wanted[early] = True
                self._at = max(self._at, early + 1)
                self.begin_early()
                return
            if early < self._at:  # it was passed, and kept
                self._skip(self._trace[early])
        if operation in plan[self._at :]:
            self._go_to(plan.index(operation, self._at), wanted=True)
        else:
            self._go_to(len(plan) - 1)
            while (agreed := self._ask(operation)) != operation:
                self._do(agreed)
            self._do(agreed, wanted=True)
        self.begin_early()

    def end(self, kind: Kind) -> None:
        """Takes part in what the others still want; if such a pass is under way."""
        if self.kind != kind:
            return
        if self._early is not None and self._early < self._at:
            self._skip(self._trace[self._early])
        self._early = None
        self._go_to(len(self._plan) - 1)
        nothing = 2 * self.units
        while (agreed := self._ask(nothing)) != nothing:
            self._do(agreed)
        self._learn()
        self.kind = None
        if kind == "backward" and self.announced is not None:
            self._differ, self.announced = all(self._lasts), None

    def check_lasts(self) -> None:
        """Check that all ranks took the same backward for the step's last: else some would wait for what never
        comes."""
        if self._differ:
            raise ConfigError(UNEQUAL)

    @property
    def _plan(self) -> list[int]:
        assert self.kind is not None
        return self._plans[self.kind]

    def _way_back(self) -> list[int]:
        """A unit is gathered before the one after it has its gradients, so that it arrives meanwhile."""
        operations: list[int] = []
        for unit in reversed(range(self.units)):
            operations.append(self.gather(unit))
            if unit + 1 < self.units:
                operations.append(self.sum(unit + 1))
        return [*operations, self.sum(0)] if self.units else []

    def _go_to(self, place: int, *, wanted: bool = False) -> None:
        """`wanted`: the operation at that place; what comes before it is skipped."""
        plan = self._plan
        for index in range(self._at, place + 1):
            if wanted and plan[place] >= self.units and index < place:
                self.begin_early()  # this rank has yet to say what it gathers next
            self._do(plan[index], wanted=wanted and index == place)

    def _do(self, operation: int, *, wanted: bool = False) -> None:
        place = self._at
        if place == len(self._trace):
            self._take_up(operation, wanted=wanted)
        self._wanted[place] = wanted
        self._at += 1
        if not wanted and place != self._early:
            self._skip(operation)

    def begin_early(self) -> None:
        """The next gather of the plan, so that it arrives while this rank computes."""
        place = self._at
        is_free = self._early is None and place == len(self._trace) < len(self._plan)
        if is_free and self._may_begin_early(self._plan[place]):
            self._early = place
            self._take_up(self._plan[place])

    def _take_up(self, operation: int, *, wanted: bool = False) -> None:
        self._trace.append(operation)
        self._wanted.append(False)
        self._begin(operation, wanted)

    def _ask(self, wish: int) -> int:
        """Agree on the operation that all ranks do now: the lowest number that one asks for. They ask at the same
        place, so their traces are alike."""
        lasts = self.announced is True, self.announced is False
        flags_of_ranks = torch.tensor([-wish, *lasts, *self._wanted, *self._used()], dtype=torch.int32)
        self._agree(flags_of_ranks)
        wished, *flags = flags_of_ranks.tolist()
        self._lasts, flags = flags[:2], flags[2:]
        self._wanted_by_any = [bool(flag) for flag in flags[: len(self._trace)]]
        self.used_by_any = [bool(flag) for flag in flags[len(self._trace) :]]
        return -int(wished)

    def _learn(self) -> None:
        """A pass that did more than its plan is the plan of the next, without what was begun in vain before it."""
        assert self.kind is not None
        if len(self._trace) > len(self._plan):
            told = list(zip(self._trace, self._wanted_by_any, strict=True))
            wanted = {operation for operation, by_any in told if by_any}
            self._plans[self.kind] = [each for each, by_any in told if by_any or each not in wanted]
