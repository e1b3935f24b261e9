"""JoinedView: what a person sees who has joined a host's run with a script of their own."""

import sys
import time
from pathlib import Path

from potluck.engine.run_parts import RunParts
from potluck.events import RunEnded, RunStarted
from potluck.show.progress import Progress


class JoinedView:
    def __init__(self, run: RunParts, parameters: int, workers: int) -> None:
        self._run = run
        self._progress, self._shown_at = Progress(), time.monotonic()
        run.events.listeners.append(self._progress)
        run.events.emit(
            RunStarted(
                name=Path(sys.argv[0]).stem,
                folder="the host's run folder",
                workers=workers,
                device=str(run.device),
                parameters=parameters,
                unit="rows",
                batch_size=run.loader.batch.size if run.loader is not None else 0,
                steps_total=run.loop.about.get("steps_total", 0),
                from_step=run.progress.step_number,
            )
        )

    def close(self) -> None:
        run, last = self._run, self._run.events.last_step
        self._progress(
            RunEnded(
                reason="interrupted" if run.progress.stopping else "finished",
                step=run.progress.step_number,
                rows_seen=run.progress.rows_seen,
                seconds=time.monotonic() - self._shown_at,
                loss=last.loss if last is not None else None,
                validation_loss=None,
                skipped=run.progress.at.skipped,
            )
        )
