"""JSONL datasets: one task per line."""

from __future__ import annotations

import codecs
from pathlib import Path

import msgspec

from afield.errors import UsageError
from afield.types import Task


def read_jsonl(path: Path) -> list[Task]:
    """Read a JSONL file of objects; `id` names a task, or else its line number."""
    tasks: dict[str, Task] = {}
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _task(path, number, line)
        if task.id in tasks:
            raise UsageError(f"{path} line {number}: duplicate task id {task.id!r}; give each task its own")
        tasks[task.id] = task
    if not tasks:
        raise UsageError(f"{path} has no tasks: write one JSON object per line")
    return list(tasks.values())


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        row = msgspec.json.decode(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        task_id = row.get("id")
        return Task(f"line-{number}" if task_id is None else str(task_id), row)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path} line {number}: {error}") from error
