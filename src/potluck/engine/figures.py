"""Figures of a worker's part of a window, which its policy's planner asks for by name. A policy of one's own that needs
another adds it here, and finds it in each report: in a group and under a host.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from potluck.agree.records import Report


@dataclass
class WindowTrace:
    """Facts about a replica's window, from which figures are made."""

    drift: float = 0.0
    """How far it was from the mean at the agreement before, as a part of that mean's norm."""
    losses: list[float] = field(default_factory=list)
    """The mean loss of each batch, in order."""


FIGURES: dict[str, Callable[[WindowTrace], float]] = {
    "divergence": lambda trace: trace.drift,
}


class WindowFigures:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._trace = WindowTrace()

    def begin(self) -> None:
        self._trace = WindowTrace()

    def add(self, batch: Report) -> None:
        """A batch is done."""
        if batch.samples:
            self._trace.losses.append(batch.loss_sum / batch.samples)

    def of_window(self, drift: float) -> dict[str, float]:
        self._trace.drift = drift
        return {name: FIGURES[name](self._trace) for name in self._names}

    def to_json(self, drift: float) -> str:
        """Write the figures for a host, which is told the divergence with Applied; empty if there are no others."""
        found = {name: figure for name, figure in self.of_window(drift).items() if name != "divergence"}
        return json.dumps(found) if found else ""
