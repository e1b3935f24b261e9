"""Copies: what ranks keep in memory of their own and of their neighbours' parts, so that a run outlives a loss."""

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.events import Recovered

if TYPE_CHECKING:
    from potluck.engine.engine import Engine
    from potluck.save.buddies import Buddies


class Copies:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._buddies: Buddies | None = None
        self._recovered: Recovered | None = None
        """Told with the first step, when everybody listens."""

    @property
    def has_just_recovered(self) -> bool:
        return self._recovered is not None

    def begin(self) -> None:
        """Goes on from what those who are left had kept, if one was lost; from here on, all keep copies anew."""
        engine = self._engine
        if not engine.composition.buddy_every:
            return
        from potluck.save.buddies import Buddies, recover

        recovery = engine.recovery
        if recovery is not None:
            standing = recover(recovery, engine._sharded())
            engine._prepared().remember_buffers()
            engine._check_standing(Path("What the workers had kept in memory"), standing)
            engine._stand_at(standing)
            engine.seed_random(standing["seed"])
            self._recovered = Recovered(step=engine.step_number, lost=recovery.lost, workers=engine.world)
        if engine.world > 1:
            self._buddies = Buddies(engine.link, engine.composition.buddy_every)
        self.refresh()
        if recovery is not None and engine.rank == 0:
            recovery.forget()

    def tell(self) -> None:
        if self._recovered is not None:
            self._engine.events.emit(self._recovered)
            self._recovered = None

    def refresh_if_due(self) -> None:
        if self._buddies is not None and self._buddies.is_due(self._engine.step_number):
            self.refresh()

    def refresh(self) -> None:
        engine = self._engine
        if self._buddies is not None:
            folder = str(engine.run_folder) if engine.run_folder is not None else None
            self._buddies.refresh(engine._sharded(), engine._standing_as_json() | {"folder": folder})
