"""Turns: where a run has several optimizers, whose turn it is. Each batch is given once for each of them. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Turns:
    count: int = 1
    now: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the batch is done with this turn."""
        return self.now == self.count - 1

    def next(self) -> None:
        self.now = (self.now + 1) % self.count

    def go_to(self, turn: int) -> None:
        """A run that is resumed may have fewer optimizers than it had."""
        self.now = min(turn, self.count - 1)

    def steps_of(self, turn: int, steps: int) -> int:
        """How many of the first `steps` steps of a run are of this turn."""
        return max(0, -(-(steps - turn) // self.count))
