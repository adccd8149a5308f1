"""Dataset reader: tasks from a path, by its format.

| path | format |
| --- | --- |
| `FILE.jsonl` | one JSON object per line |
| `FILE.parquet`, or a directory of such files of one split | one row per task |
| a directory that `datasets.save_to_disk` wrote | one row per task; `DIR/SPLIT` for one of several splits |
| a Harbor task directory, or a directory of them | one task per `task.toml` |

Rows reach the agent as they are. `id` names a task; without one, its position does.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from afield.datasets import harbor
from afield.datasets.jsonl import read_jsonl
from afield.errors import UsageError
from afield.types import Task

Row = Mapping[str, Any]


def read_tasks(path: Path) -> list[Task]:
    """Read all tasks of a dataset; raises UsageError with file and line of what is wrong."""
    if not path.exists():
        raise UsageError(f"there is no dataset {path}")
    if path.is_file():
        if path.suffix == ".parquet":
            return _tasks(path, _parquet([path]))
        return read_jsonl(path)
    if is_harbor(path):
        return [task.to_task() for task in harbor.scan(path)]
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        choices = ", ".join(str(path / split) for split in splits)
        raise UsageError(f"{path} has several splits; choose one of: {choices}")
    if (path / "state.json").is_file():
        return _tasks(path, _arrow(path))
    if files := sorted(path.glob("*.parquet")):
        _check_one_split(path, files)
        return _tasks(path, _parquet(files))
    raise UsageError(
        f"{path} is not a dataset: it has no task.toml, no Parquet files and no state.json of Hugging Face"
        " datasets; give a JSONL file with one task per line otherwise"
    )


def _check_one_split(path: Path, files: list[Path]) -> None:
    """Refuse a directory with the files of several splits, as those of a hub: one may be for tests only."""
    names = [re.fullmatch(r"(.+?)(?:-\d{5}-of-\d{5}(?:-[0-9a-f]+)?)", file.stem) for file in files]
    splits = sorted({name[1] for name in names if name})
    if len(splits) > 1:
        raise UsageError(
            f"{path} has the files of several splits: {', '.join(splits)}; put those of one into a directory"
        )


def is_harbor(path: Path) -> bool:
    """Whether the path is a Harbor task directory, or a directory of them."""
    return path.is_dir() and (harbor.is_task(path) or any(map(harbor.is_task, _folders(path))))


def _folders(path: Path) -> Iterator[Path]:
    return (child for child in sorted(path.iterdir()) if child.is_dir())


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value


def _tasks(path: Path, rows: Iterable[Row]) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows):
        task_id = row.get("id")
        plain = {name: _plain(value, f"{path} row {number}, column {name!r}") for name, value in row.items()}
        task = Task(f"row-{number}" if task_id is None else str(task_id), plain)
        if task.id in tasks:
            raise UsageError(f"{path} row {number}: duplicate task id {task.id!r}; give each task its own")
        tasks[task.id] = task
    if not tasks:
        raise UsageError(f"{path} has no rows")
    return list(tasks.values())


def _plain(value: Any, place: str) -> Any:
    """The value as JSON has it: times in ISO format, bytes in base64, NaN (a missing number) as null."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise UsageError(f"{place}: {value} has no JSON form; convert the column")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, place) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, place) for inner in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise UsageError(f"{place}: a value of type {type(value).__name__} has no JSON form; convert the column")


def _parquet(files: list[Path]) -> Iterator[Row]:
    with needs_pyarrow():
        from pyarrow import ArrowException, parquet
    for file in files:
        try:
            with parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
        except (OSError, ValueError, OverflowError, ArrowException) as error:
            raise UsageError(f"{file} cannot be read as Parquet: {error}") from error


def _arrow(path: Path) -> Iterator[Row]:
    """Rows of a directory that `datasets.save_to_disk` wrote."""
    with needs_pyarrow():
        from pyarrow import ArrowException, ipc
    files = [path / str(entry.get("filename")) for entry in _json(path / "state.json").get("_data_files", [])]
    if not files:
        raise UsageError(f"{path / 'state.json'} names no data files; save the dataset again")
    for file in files:
        try:
            with file.open("rb") as opened, ipc.open_stream(opened) as reader:
                for batch in reader:
                    yield from batch.to_pylist()
        except (OSError, ValueError, OverflowError, ArrowException) as error:
            raise UsageError(f"{file} cannot be read as an Arrow stream: {error}") from error


@contextmanager
def needs_pyarrow() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            "Parquet and Hugging Face datasets need pyarrow: pip install 'afield[batches]'"
        ) from error
