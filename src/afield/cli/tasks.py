"""`afield tasks`: check, list and convert the tasks of a dataset."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from afield.datasets.harbor import HarborTask, survey
from afield.datasets.reader import is_harbor, read_tasks
from afield.datasets.tables import write_rows
from afield.errors import UsageError
from afield.harbor.native import ignored_keys, refused_keys, summary
from afield.integrations.verl import dataset
from afield.types import Task


def add(commands: Any) -> None:
    command = commands.add_parser(
        "tasks",
        help="check and list the tasks of a dataset, and convert them",
        description="Check a dataset of any format that `afield train --tasks` reads, and list its tasks."
        " With --out, write them for a trainer; a file that has the same tasks already is left alone.",
    )
    command.add_argument(
        "path", type=Path, metavar="PATH", help="directory of Harbor tasks, or another dataset"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="file to write: FILE.parquet or FILE.jsonl")
    command.add_argument(
        "--rows",
        choices=("afield", "verl"),
        default="afield",
        help="columns of the written rows: those of the tasks, or those of veRL (default: afield)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    harbor, problems = survey(args.path) if is_harbor(args.path) else ([], [])
    tasks = [task.to_task() for task in harbor] if harbor or problems else read_tasks(args.path)
    listing = [_described(task) for task in harbor] or [{"id": task.id} for task in tasks]
    refused = [str(key) for one in harbor for key in refused_keys(one.path, agent=True, verifier=True)]
    written: dict[str, Any] = {}
    if args.out and not problems:
        written = {"out": str(args.out), "written": write_rows(args.out, _rows(args, tasks))}
    if args.json:
        print(json.dumps({"tasks": listing, "broken": problems, "refused_in_sandboxes": refused, **written}))
    else:
        for entry in listing:
            print("  ".join(str(value) for name, value in entry.items() if name != "path"))
        if written:
            verb = "wrote" if written["written"] else "unchanged:"
            print(f"{verb} {len(tasks)} tasks in {args.out}")
        if refused:
            print("runs in sandboxes of this machine refuse:", *refused, sep="\n  ", file=sys.stderr)
        for line in summary(key for one in harbor for key in ignored_keys(one.path)):
            print(f"warning: in sandboxes of this machine: {line}", file=sys.stderr)
    if problems:
        if not args.json:
            total = len(problems) + len(tasks)
            print(f"{len(problems)} of {total} tasks are broken:", *problems, sep="\n  ", file=sys.stderr)
        return 2
    return 0


def _rows(args: argparse.Namespace, tasks: list[Task]) -> list[dict[str, Any]]:
    if args.rows == "verl":
        return dataset.rows(tasks, source=args.path.resolve().name)
    for task in tasks:
        if task.input.get("id", task.id) != task.id:
            raise UsageError(
                f"task {task.id!r} has the field id = {task.input['id']!r} in its row; make them equal"
            )
    return [{"id": task.id, **task.input} for task in tasks]


def _described(task: HarborTask) -> dict[str, Any]:
    config = task.config
    return {
        "id": task.id,
        "digest": task.digest[:12],
        "agent_timeout_s": config.agent.timeout_sec,
        "image": config.environment.docker_image or "environment/Dockerfile",
        "path": str(task.path),
    }
