"""Converts tasks to veRL dataset rows, and rows back to tasks.

    python -m afield.integrations.verl.dataset tasks.jsonl train.parquet

A task is stored as JSON text in `extra_info`, because table columns would give every task the keys of all
others. `prompt` is for veRL's length filter and for logs; the agent gets the task. Existing veRL datasets
work too: their rows, without the columns that veRL adds, are the tasks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from afield.datasets import read_tasks
from afield.errors import UsageError
from afield.types import Task

TEXT_KEYS = ("prompt", "question", "instruction", "problem", "task")
"""Keys under which tasks usually have their text."""
VERL_COLUMNS = frozenset(
    {
        *("uid", "index", "raw_prompt", "dummy_tensor", "tools_kwargs", "interaction_kwargs", "global_steps"),
        *("validate", "agent_name", "session_id", "__rollout_n__", "__do_sample__"),
    }
)


def rows(
    tasks: Sequence[Task], *, source: str, agent_name: str = "afield", key: str = ""
) -> list[dict[str, Any]]:
    """Dataset rows, one per task, with all columns of veRL's own datasets."""
    return [
        {
            "data_source": source,
            "agent_name": agent_name,
            "prompt": _messages(task, key),
            "ability": "agent",
            "reward_model": {"style": "agent", "ground_truth": ""},
            "extra_info": {
                "index": index,
                "task_id": task.id,
                "task": msgspec.json.encode(task.input).decode(),
            },
        }
        for index, task in enumerate(tasks)
    ]


def _messages(task: Task, key: str) -> list[dict[str, str]]:
    if key and key not in task.input:
        keys = ", ".join(task.input)
        raise UsageError(f"task {task.id!r} has no {key!r}; choose one of its keys for --prompt: {keys}")
    text_key = key or next((name for name in TEXT_KEYS if name in task.input), "")
    text = task.input[text_key] if text_key else task.input
    if isinstance(text, list) and text and all(isinstance(m, dict) and "role" in m for m in text):
        return [{"role": str(m["role"]), "content": _text(m.get("content", ""))} for m in text]
    return [{"role": "user", "content": _text(text)}]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def task_of(prompt: Mapping[str, Any]) -> Task:
    """The task of a dataset row."""
    extra = prompt.get("extra_info") or {}
    text = extra.get("task")
    if isinstance(text, str) and "task_id" in extra:
        try:
            return Task(str(extra["task_id"]), msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.MsgspecError, ValueError) as error:
            raise UsageError(f"extra_info.task of row {extra['task_id']!r} is not a task: {error}") from error
    row = {name: value for name, value in prompt.items() if name not in VERL_COLUMNS}
    row.setdefault("prompt", prompt.get("raw_prompt"))
    try:
        task: dict[str, Any] = json.loads(json.dumps(row, default=_plain, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise UsageError(f"row {extra.get('index')!r} of {row.get('data_source')!r}: {error}") from error
    digest = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:12]
    return Task(f"{row.get('data_source', 'row')}-{digest}", task)


def _plain(value: Any) -> Any:
    """numpy and torch values as Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be handed to an agent as JSON: {value!r:.100}")


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write Parquet or JSONL, by the file name; atomically."""
    partial = path.with_name(f"{path.name}.partial")
    if path.suffix == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise UsageError(
                "pyarrow is not installed: pip install pyarrow, or write a .jsonl file"
            ) from error
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
    elif path.suffix in (".jsonl", ".json"):
        partial.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    else:
        raise UsageError(f"{path} must end in .parquet or .jsonl, which are what veRL reads")
    partial.replace(path)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m afield.integrations.verl.dataset", description="Convert tasks to a veRL dataset."
    )
    parser.add_argument("tasks", type=Path, help="JSONL file with one task per line")
    parser.add_argument("out", type=Path, help="output file, .parquet or .jsonl")
    parser.add_argument("--source", default="", help="data_source column (default: the file name)")
    parser.add_argument("--agent-name", default="afield", help="agent_name column (default: afield)")
    parser.add_argument("--prompt", default="", metavar="KEY", help="task key that holds the prompt text")
    args = parser.parse_args(words)
    try:
        tasks = read_tasks(args.tasks)
        dataset = rows(
            tasks, source=args.source or args.tasks.stem, agent_name=args.agent_name, key=args.prompt
        )
        write(dataset, args.out)
    except (UsageError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{len(dataset)} rows in {args.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
