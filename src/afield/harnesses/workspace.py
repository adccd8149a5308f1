"""Workspace of a harness: its directory, and what it submits.

1. The row of a Harbor task has an `environment`: see `afield.sdk.workspace`.
2. Any other row may have `files`, a mapping of relative paths to texts, which are written into a new
   directory. The submission has the files that the agent created or changed, by path.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from afield.errors import TaskFailure
from afield.sdk import workspace as sdk_workspace
from afield.types import Reason

SUBMITTED_BYTES = 4 * 1024 * 1024
"""Largest size of all submitted files."""


class TaskWorkspace(Protocol):
    """Where a client works."""

    @property
    def directory(self) -> Path:
        """Working directory."""
        ...

    def submission(self) -> dict[str, Any]:
        """The agent's work, as the verifier gets it."""
        ...


def prepare(task: Mapping[str, Any], scratch: Path) -> TaskWorkspace:
    """Make the workspace of a row, below `scratch` unless the row has an `environment`."""
    environment = task.get("environment")
    if isinstance(environment, Mapping) and "workdir" in environment:
        return sdk_workspace.Workspace.open(task)
    return FileWorkspace(scratch / "work", task.get("files") or {})


class FileWorkspace:
    """Directory with the files of a row."""

    def __init__(self, directory: Path, files: Mapping[str, Any]) -> None:
        self.directory = directory
        directory.mkdir()
        self._initial: dict[str, bytes] = {}
        for name, text in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or not isinstance(text, str):
                raise TaskFailure(
                    f"files: {name!r} must be a relative path with text as its content", Reason.LAUNCH
                )
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
            self._initial[str(path)] = text.encode()

    def submission(self) -> dict[str, Any]:
        """Files that were created or changed, by path: text, or {"base64": ...}; names of deleted files.

        Files that no longer fit into SUBMITTED_BYTES are named in `omitted`.
        """
        changed: dict[str, Any] = {}
        omitted: list[str] = []
        left = SUBMITTED_BYTES
        paths = sorted(path for path in self.directory.rglob("*") if path.is_file() and not path.is_symlink())
        for path in paths:
            name = path.relative_to(self.directory).as_posix()
            if ".git" in path.relative_to(self.directory).parts:
                continue
            if path.stat().st_size > left:
                omitted.append(name)
                continue
            content = path.read_bytes()
            if self._initial.get(name) != content:
                changed[name] = _encoded(content)
                left -= len(content)
        present = {path.relative_to(self.directory).as_posix() for path in paths}
        return {"files": changed, "deleted": sorted(self._initial.keys() - present), "omitted": omitted}


def _encoded(content: bytes) -> Any:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
