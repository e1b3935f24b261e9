"""What a worker has asked its host for, and waits for: a look at held-out data, or everybody's values. Pure."""

import itertools
from dataclasses import dataclass

from potluck.fleet.member_effects import SendToHost
from potluck.wire.messages import EvaluateNext, Gather, Gathered


@dataclass
class MemberEvaluation:
    """An evaluation of this worker's; it is under way until it has a loss."""

    step: int
    rows: int
    size: int
    loss: float | None = None

    def ask(self, start: int = 0, end: int = 0, total: float = 0.0, samples: float = 0.0) -> SendToHost:
        """Asks for the next range, and reports the last one."""
        return SendToHost(EvaluateNext(self.step, self.rows, self.size, start, end, total, samples))


@dataclass
class MemberGathering:
    """A value of this worker's own, and those of all; it is under way until they are found."""

    step: int
    call: int
    data: bytes
    found: list[bytes] | None = None
    """In an order that is the same on every worker; our own alone where the others are elsewhere in the run."""
    fault: str = ""

    def ask(self) -> SendToHost:
        return SendToHost(Gather(self.step, self.call, self.data))

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
