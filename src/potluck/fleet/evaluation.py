"""A validation set in ranges, which those who look at it together take one by one. Pure."""

from array import array
from dataclasses import dataclass, field

from potluck.fleet.ledger import Range

Look = tuple[int, int, int]
"""What is looked at: (step, rows, rows of a range). Whoever tells another set looks at it alone."""
MOST_ROWS, MOST_RANGES = 1 << 48, 1 << 20
"""Each range that is done is kept as two numbers until all are: their sum must not depend on their order."""
MOST_AT_ONE_STEP = 64
"""Sets that one worker may look at in turn without a step between them."""


@dataclass
class Evaluation:
    rows: int
    size: int
    next: int = 0
    returned: list[Range] = field(default_factory=list)
    rows_done: int = 0
    loss_sums: "array[float]" = field(default_factory=lambda: array("d"))
    samples: "array[float]" = field(default_factory=lambda: array("d"))
    waiting: list[int] = field(default_factory=list)
    """Peers, for whom nothing was left."""
    longest_s: float = 0.0
    """That a range has taken."""

    def take(self) -> Range | None:
        if self.returned:
            return self.returned.pop()
        if self.next >= self.rows:
            return None
        start = self.next
        self.next = min(self.rows, start + self.size)
        return start, self.next

    def add(self, rows: int, loss_sum: float, samples: float, seconds: float) -> None:
        """A range that was given to one worker, and to nobody else, is done."""
        self.rows_done += rows
        self.loss_sums.append(loss_sum)
        self.samples.append(samples)
        self.longest_s = max(self.longest_s, seconds)

    @property
    def is_done(self) -> bool:
        return self.rows_done >= self.rows


def is_plausible(rows: int, size: int) -> bool:
    return 0 < rows <= MOST_ROWS and 0 < size <= rows and -(-rows // size) <= MOST_RANGES
