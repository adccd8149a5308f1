"""Weights & Biases tracker."""

from __future__ import annotations

from collections.abc import Mapping

import wandb  # pyright: ignore[reportMissingImports]

from afield.errors import UsageError
from afield.trackers.base import RunStatus, TrackedRun

STEP = "step"
"""Metric that is the x axis of all charts: W&B's own step refuses validations of earlier steps."""


class WeightsAndBiases:
    """Logs to W&B with its own settings: WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY, ...

    Offline files are below `wandb/` in the run's directory.
    """

    def start(self, run: TrackedRun, id: str) -> str:
        server = {"base_url": run.uri} if run.uri else {}
        mode = wandb.setup().settings.mode
        # Without a key, wandb.init would ask for one on the terminal.
        if mode == "online" and not wandb.login(host=run.uri or None, prompt=False, verify=False):
            raise UsageError("W&B has no key: run `wandb login`, set WANDB_API_KEY or WANDB_MODE=offline")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=id or None,
            resume="allow" if id else None,
            config=dict(run.config),
            job_type=run.kind,
            dir=str(run.directory),
            settings=wandb.Settings(console="off", silent=True, **server),
            reinit="create_new",
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, STEP: step})

    def finish(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
