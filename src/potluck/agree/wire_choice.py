"""WireChoice: in which form gradients travel where that is measured (`wire = "auto"`). Pure.

Every worker hears the same figures of each step and so takes the same form from the same step on. A run begins in fp32.
Where agreeing is seen to cost something, int4 is tried for some steps; it stays if these became shorter.
"""

from dataclasses import dataclass, field
from statistics import median

from potluck.coded_numbers import Wire

WATCHED = 8
"""Steps of which the median counts."""
PASSED_OVER = 2
"""Steps after a change, and at the beginning, that tell nothing yet."""
WORTH = 0.03
"""Part of a step that has to be gained."""


@dataclass
class WireChoice:
    wire: Wire = "fp32"
    is_settled: bool = False
    _before: tuple[float, float] | None = None
    """Seconds that agreeing took in fp32, and the whole step, while int4 is tried."""
    _seen: list[tuple[float, float]] = field(default_factory=list)

    def report(self, agree_s: float, step_s: float) -> str | None:
        """Report one step: the seconds in which no worker computed, and all of them. Returns a sentence where the form
        changes."""
        if self.is_settled:
            return None
        self._seen.append((agree_s, step_s))
        if len(self._seen) < PASSED_OVER + WATCHED:
            return None
        agree_s, step_s = (median(column) for column in zip(*self._seen[PASSED_OVER:], strict=True))
        self._seen.clear()
        return self._compare(agree_s, *self._before) if self._before is not None else self._try(agree_s, step_s)

    def resume(self, wire: Wire) -> None:
        """A run continues with what it had chosen."""
        self.wire, self.is_settled, self._before = wire, wire != "fp32", None
        self._seen.clear()

    def _try(self, agree_s: float, step_s: float) -> str | None:
        if agree_s <= WORTH * step_s:
            return None
        self.wire, self._before = "int4", (agree_s, step_s)
        return (
            f"Agreeing takes {agree_s / step_s:.0%} of each step ({1000 * agree_s:.0f} of {1000 * step_s:.0f} ms):"
            " from now on gradients travel as int4, in an eighth of the bytes."
        )

    def _compare(self, agree_s: float, before_s: float, step_s: float) -> str | None:
        self.is_settled, self._before = True, None
        if before_s - agree_s > WORTH * step_s:
            return None
        self.wire = "fp32"
        return (
            f"Fewer bytes have not made agreeing shorter ({1000 * agree_s:.0f} ms, and {1000 * before_s:.0f} before):"
            " gradients travel as fp32 again."
        )
