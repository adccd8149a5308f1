"""Runs that the UI shows: chosen ones, or all below a directory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from afield.orchestrator.state import RunDirectory
from afield.ui.data import RunData

RUN_FILES = ("run.json", "info.json")
"""Files that describe a run; the programs that make runs write at least one of them."""


class RunList:
    """Run directories with open indexes; new runs below `parent` appear if none were chosen."""

    def __init__(self, chosen: Sequence[RunDirectory], parent: Path) -> None:
        self._chosen = chosen
        self._parent = parent
        self._open: dict[Path, RunData] = {}
        self._lock = threading.Lock()

    def current(self) -> list[RunData]:
        """Runs, newest first."""
        with self._lock:
            if self._chosen:
                directories = list(self._chosen)
            else:
                files = [path for name in RUN_FILES for path in self._parent.glob(f"*/{name}")]
                newest = sorted(files, key=_changed, reverse=True)
                directories = [RunDirectory(path) for path in dict.fromkeys(file.parent for file in newest)]
            paths = {directory.path for directory in directories}
            for path in [path for path in self._open if path not in paths]:
                self._open.pop(path).close()
            for directory in directories:
                if directory.path not in self._open:
                    self._open[directory.path] = RunData(directory, self._key(directory))
            return [self._open[directory.path] for directory in directories]

    def _key(self, directory: RunDirectory) -> str:
        taken = {run.key for run in self._open.values()}
        names = (directory.id if n == 1 else f"{directory.id}~{n}" for n in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)


def _changed(path: Path) -> float:
    """Time of change; 0 for a file that was removed meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
