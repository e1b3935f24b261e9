"""trackio: TRACKIO_PROJECT, TRACKIO_DIR and TRACKIO_SPACE_ID are its own. A resumed run has the same name."""

import uuid

import trackio

from potluck.trackers.known import Ended, TrackedRun, from_environment


class _Trackio:
    def start(self, run: TrackedRun) -> str:
        project = from_environment("TRACKIO_PROJECT")
        name = run.kept_id() or run.keep_id(f"{run.name}-{uuid.uuid4().hex[:4]}")  # runs are told apart by their names
        self._run = trackio.init(
            project=project,
            name=name,
            config=run.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return f"see the run {name} with trackio show --project {project}"

    def log(self, step: int, time_s: float, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def finish(self, how: Ended) -> None:
        self._run.finish()


make = _Trackio
