"""MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are its own. A resumed run has the same id."""

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from potluck.trackers.known import Ended, TrackedRun, from_environment

STATES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
LONGEST_VALUE = 500
"""Longest value of a parameter, by MLflow's own limit; and MOST_PARAMETERS at once."""
MOST_PARAMETERS = 100


class _MLflow:
    def start(self, run: TrackedRun) -> str:
        self._client = MlflowClient()
        known = run.kept_id()
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            self._id = self._create(run)
        return ""

    def _create(self, run: TrackedRun) -> str:
        name = from_environment("MLFLOW_EXPERIMENT_NAME")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        # Kept before anything is logged: a run that is killed now is found again, and not made twice.
        own = run.keep_id(self._client.create_run(experiment, run_name=run.name).info.run_id)
        # Parameters cannot be changed afterwards: those of the beginning stay.
        params = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in run.settings.items()]
        for start in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(own, params=params[start : start + MOST_PARAMETERS])
        return own

    def log(self, step: int, time_s: float, scalars: dict[str, float]) -> None:
        at_ms = int(1000 * time_s)
        self._client.log_batch(self._id, [Metric(name, value, at_ms, step) for name, value in scalars.items()])

    def finish(self, how: Ended) -> None:
        self._client.set_terminated(self._id, STATES[how])


make = _MLflow
