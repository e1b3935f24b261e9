"""Tells a person once of a run that else would stand still, or show something else than it seems to. Pure."""

import math
from dataclasses import dataclass, field

from potluck.events import Noticed
from potluck.fleet.coordinator_state import CoordinatorState
from potluck.fleet.effects import Effect, Emit
from potluck.fleet.planning import StepUnderWay
from potluck.words import plural


@dataclass
class Notices:
    run: CoordinatorState
    at_least: int
    """The number of workers that the first step waits for."""
    _has_begun: bool = field(default=False, init=False)
    """Whether a step was committed here. The run may go back to its start after that."""
    _told_of: int = field(default=0, init=False)
    """How many workers were there when it was last told that the first step waits for more."""
    _lossless: set[int] = field(default_factory=set, init=False)
    """The ids of plain peers of whom it was told that they report no loss."""

    def tell_waiting(self) -> list[Effect]:
        """A run that went back to its start waits for as many as at first."""
        ready = len(self.run.membership.ready)
        if not self._has_begun or self._told_of == ready or self.run.stopping:
            return []
        self._told_of = ready
        told = (
            f"The run is back at its start, and its first step waits for {plural(self.at_least, 'worker')}, as"
            f" --at-least says: {ready} {'is' if ready == 1 else 'are'} here, and {self.at_least - ready} more"
            f" {'has' if self.at_least - ready == 1 else 'have'} to join."
        )
        return [Emit(Noticed(sentence=told))]

    def tell_committed(self, under: StepUnderWay) -> list[Effect]:
        """A plain peer that sends parts reports no loss: of each, what the losses shown are of."""
        self._has_begun, self._told_of = True, 0
        lossless = {int(found.worker) for found in under.reports.values() if math.isnan(found.loss_sum)}
        new = [m for m in self.run.membership.ready if m.plain and m.worker_id in lossless - self._lossless]
        self._lossless |= {member.worker_id for member in new}
        told = "sends its gradient in parts, which report no loss: the losses shown are of the other workers' rows."
        return [Emit(Noticed(sentence=f"{member.name} {told}")) for member in new]
