"""BuddyCopies: what ranks keep in memory of their own and their neighbours' parts, so that a run survives a loss."""

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.engine.run_state import RunState
from potluck.engine.saved_position import check_position, position_as_json, restore_position
from potluck.events import Recovered
from potluck.save.left_out import leave_out

if TYPE_CHECKING:
    from potluck.save.buddies import Buddies


class BuddyCopies:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self._buddies: Buddies | None = None
        self._recovered: Recovered | None = None
        """Told with the first step, when everybody listens."""

    @property
    def has_just_recovered(self) -> bool:
        return self._recovered is not None

    def begin(self) -> None:
        """If a rank was lost, continues from what the others had kept; from here on, all keep copies again."""
        run = self._run
        if not run.composition.buddy_every:
            return
        from potluck.save.buddies import Buddies, recover

        recovery = run.recovery
        if recovery is not None:
            standing = recover(recovery, run.sharded(), run.base)
            run.prepared().remember_buffers()
            check_position(run, Path("What the workers had kept in memory"), standing)
            restore_position(run, standing)
            run.seed_random(standing["seed"])
            self._recovered = Recovered(step=run.step_number, lost=recovery.lost, workers=run.link.world)
        if run.link.world > 1:
            self._buddies = Buddies(run.link, run.composition.buddy_every)
        self.refresh()
        if recovery is not None and run.link.rank == 0:
            recovery.forget()

    def tell(self) -> None:
        if self._recovered is not None:
            self._run.events.emit(self._recovered)
            self._recovered = None

    def refresh_if_due(self) -> None:
        if self._buddies is not None and self._buddies.is_due(self._run.step_number):
            self.refresh()

    def refresh(self) -> None:
        run = self._run
        if self._buddies is not None:
            folder = str(run.caller.folder) if run.caller.folder is not None else None
            without, told = leave_out(run.prepared(), run.link)
            standing = position_as_json(run) | told | {"folder": folder}
            self._buddies.refresh(run.sharded(), standing, without)
