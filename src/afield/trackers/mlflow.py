"""MLflow tracker."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
from mlflow.tracking import MlflowClient, is_tracking_uri_set  # pyright: ignore[reportMissingImports]

from afield.trackers.base import RunStatus, TrackedRun

STATUSES: dict[RunStatus, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
BATCH = 100
"""Parameters per request, which MLflow limits."""
VALUE = 500
"""Length of a parameter's value in characters, which older servers limit."""
NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")


class MLflow:
    """Logs to an MLflow server or store: the address of the settings, else MLflow's own variables.

    Without either, the store is `mlflow.sqlite` in the directory of runs.
    """

    def start(self, run: TrackedRun, id: str) -> str:
        shared = run.directory.parent
        own = None if is_tracking_uri_set() else f"sqlite:///{shared / 'mlflow.sqlite'}"
        self._client = MlflowClient(tracking_uri=run.uri or own)
        if id:
            self._id = id
            self._client.update_run(id, status="RUNNING")
            return id
        experiment = self._client.get_experiment_by_name(run.project)
        artifacts = None if run.uri or own is None else str(shared / "mlflow-artifacts")
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(run.project, artifact_location=artifacts)
        )
        tags = {"afield.kind": run.kind, "afield.directory": str(run.directory)}
        self._id = self._client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:VALUE]) for key, value in run.config.items()]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(self._id, params=params[start : start + BATCH])
        return self._id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        batch = [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch, tags=[RunTag("afield.step", str(step))])

    def finish(self, status: RunStatus) -> None:
        self._client.set_terminated(self._id, STATUSES[status])


def _name(name: str) -> str:
    return NOT_IN_NAMES.sub("_", name)
