"""Trackio tracker."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

import trackio  # pyright: ignore[reportMissingImports]

from afield.trackers.base import RunStatus, TrackedRun


class Trackio:
    """Logs to trackio's local store (TRACKIO_DIR), or to the Hugging Face Space of the address."""

    def start(self, run: TrackedRun, id: str) -> str:
        with redirect_stdout(sys.stderr):  # trackio prints hints, and stdout may be a line of JSON
            self._run = trackio.init(
                project=run.project,
                name=id or run.name,
                space_id=run.uri or None,
                config=dict(run.config),
                resume="must" if id else "never",
                embed=False,
            )
        return self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: RunStatus) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()
