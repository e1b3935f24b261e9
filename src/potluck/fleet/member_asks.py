"""Requests of a worker that its host has yet to answer: a look at held-out data, or everybody's values. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.fleet.member_effects import MemberEffect, Say, SendToHost
from potluck.wire.messages import Evaluated, EvaluateNext, Gather, Gathered


@dataclass
class MemberEvaluation:
    """An evaluation of this worker's."""

    step: int
    rows: int
    size: int
    is_under_way: bool = True
    names: str = ""
    """Names of figures, as JSON; empty: there is one, the loss."""
    figures: Sequence[float] = (math.nan,)
    """The sum of each."""
    samples: float = 0.0
    """None: this worker had no part in it."""

    def ask(
        self, start: int = 0, end: int = 0, names: str = "", figures: Sequence[float] = (0.0,), samples: float = 0.0
    ) -> SendToHost:
        """Asks for the next range, and reports the last one."""
        first, *others = figures
        further = np.array(others, "<f8")
        return SendToHost(EvaluateNext(self.step, self.rows, self.size, start, end, first, samples, names, further))

    def take(self, done: Evaluated) -> list[MemberEffect]:
        self.is_under_way, self.names, self.samples = False, done.names, done.samples
        self.figures = done.loss_sum, *map(float, done.sums)
        if done.samples or not done.names:
            return []
        told = f"The others report other figures of the held-out rows than this worker: {done.names[:200]}."
        return [Say(f"{told} It has no part in this validation; let its script report the same.")]

    def end(self) -> None:
        """There will be no answer."""
        self.is_under_way = False

    @property
    def loss(self) -> float:
        return self.figures[0] / self.samples if self.samples else math.nan


@dataclass
class MemberGathering:
    """A value of this worker's own, and those of all; it is under way until they are found."""

    step: int
    call: int
    first_id: int
    data: bytes
    found: list[bytes] | None = None
    """In an order that is the same on every worker; our own alone where the others are elsewhere in the run."""
    fault: str = ""

    def ask(self) -> SendToHost:
        return SendToHost(Gather(self.step, self.call, self.first_id, self.data))

    def take(self, message: Gathered) -> None:
        ends = list(itertools.accumulate(map(int, message.sizes)))
        self.fault = message.fault
        if ends and ends[-1] != len(message.data):
            self.fault = "The host gave other bytes than it said."
        starts = [0, *ends[:-1]]
        every = [bytes(message.data[start:end]) for start, end in zip(starts, ends, strict=False)]
        self.found = every or [self.data]

    def end(self) -> None:
        self.found = self.found or [self.data]
