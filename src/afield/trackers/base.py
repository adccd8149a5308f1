"""Tracker interface: adapter of one experiment tracker.

An adapter is one module with one class, and one line of `factory.registry.TRACKERS`. All methods are called
from one thread. An adapter may raise anything: the run goes on, and the failure is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct

RunStatus = Literal["finished", "failed", "stopped"]
"""End of a process: it did its work, an error ended it, or a signal did."""


class TrackedRun(Struct, frozen=True, kw_only=True):
    """Description of a run for a tracker."""

    name: str
    """Name of the run in the tracker."""
    project: str
    """Project or experiment that the run belongs to."""
    kind: str
    """Program that made the run, such as train or eval."""
    directory: Path
    """Directory of the run, for trackers that write files."""
    uri: str
    """Address of the tracker's server or store; empty takes the tracker's own default."""
    config: Mapping[str, Any]
    """Settings of the run by dotted key, without secrets."""
    step: int
    """Last step whose metrics were sent before; 0 for a new run."""


class Tracker(Protocol):
    """Adapter of an experiment tracker."""

    def start(self, run: TrackedRun, id: str) -> str:
        """Open the tracker's run and return its id; a non-empty `id` continues that run."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step. Steps may repeat, and validation may come after later steps."""
        ...

    def finish(self, status: RunStatus) -> None:
        """Send what is buffered and close the tracker's run."""
        ...
