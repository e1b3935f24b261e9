"""JoinedView: what a person sees who has joined a host's run with a script of their own."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.events import RunEnded, RunStarted
from potluck.show.progress import Progress

if TYPE_CHECKING:
    from potluck.engine.engine import Engine


class JoinedView:
    def __init__(self, engine: "Engine", batch_size: int) -> None:
        self._engine = engine
        self._progress, self._shown_at = Progress(), time.monotonic()
        engine.events.listeners.append(self._progress)
        engine.events.emit(
            RunStarted(
                name=Path(sys.argv[0]).stem,
                folder="the host's run folder",
                workers=engine.world,
                device=str(engine.device),
                parameters=engine.parameters,
                unit="rows",
                batch_size=batch_size,
                steps_total=engine.told.get("steps_total", 0),
                from_step=engine.step_number,
            )
        )

    def close(self) -> None:
        engine, last = self._engine, self._engine.events.last_step
        self._progress(
            RunEnded(
                reason="interrupted" if engine.stopping else "finished",
                step=engine.step_number,
                rows_seen=engine.rows_seen,
                seconds=time.monotonic() - self._shown_at,
                loss=last.loss if last is not None else None,
                validation_loss=None,
                skipped=engine.skipped,
            )
        )
