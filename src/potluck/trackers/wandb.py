"""Weights & Biases: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the rest are its own. A resumed run has the same id."""

import wandb

from potluck.trackers.known import Ended, TrackedRun, from_environment


class _Wandb:
    def start(self, run: TrackedRun) -> str:
        self._run = wandb.init(
            project=from_environment("WANDB_PROJECT"),
            id=run.id_to_use(),
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=run.settings,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Steps may be done again after a restart, and validations come late: the step is a number like others.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return f"this run is at {self._run.url}" if self._run.url else f"this run is kept in {run.folder / 'wandb'}"

    def log(self, step: int, time_s: float, scalars: dict[str, float]) -> None:
        self._run.log(scalars | {"step": step, "_timestamp": time_s})

    def finish(self, how: Ended) -> None:
        self._run.finish(exit_code=0 if how == "finished" else 1)


make = _Wandb
