"""`afield runs`: list the runs of a directory."""

from __future__ import annotations

import argparse
import sqlite3
import sys
import time
from typing import Any

import msgspec

from afield.cli.tables import print_table
from afield.errors import AfieldError, UsageError
from afield.orchestrator.state import RunDirectory, list_runs
from afield.runs.cost import cost_of
from afield.settings.environment import Environment

COLUMNS = ("run", "kind", "status", "steps", "rollouts", "reward", "validation", "failed", "created", "agent")


def open_run(name: str) -> RunDirectory:
    """A run by id or path, or the store of a gateway, given by its path."""
    from afield import factory

    return factory.open_run(Environment.read().runs, name)


def add(commands: Any) -> None:
    command = commands.add_parser(
        "runs", help="list runs", description="List all runs: training, evaluations, clients, veRL and TRL."
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    root = Environment.read().runs
    runs = list_runs(root)
    if not runs:
        raise UsageError(f"there is no run under {root} yet: start one with `afield demo`")
    print_table(map(line_or_error, runs), COLUMNS, as_json=args.json)
    return 0


def line_or_error(run: RunDirectory) -> dict[str, Any]:
    """A run in one line; of one that cannot be read, its name and the error, so that others are listed."""
    try:
        return line_of(run)
    except (AfieldError, OSError, sqlite3.Error) as error:
        print(f"afield: run {run.id} cannot be read: {error}", file=sys.stderr)
        return {"run": run.id, "status": "unreadable", "error": str(error), "path": str(run.path)}


def line_of(run: RunDirectory) -> dict[str, Any]:
    """A run in one line; its reward is that of the last step, or of all rollouts without steps."""
    info = run.info
    with run.index as index:
        index.refresh()
        (total,) = index.query(
            "SELECT count(*) AS rollouts, sum(reward IS NULL) AS failed, max(step) AS steps FROM rollouts"
        )
        last = (
            "SELECT avg(reward) AS reward FROM rollouts WHERE split='{}' AND step IS (SELECT max(step) FROM"
        )
        last += " rollouts WHERE split='{}')"
        reward, validation = (
            index.query(last.format(split, split))[0]["reward"] for split in ("train", "val")
        )
        cost = cost_of(run.path, info.kind, index.query)
    return {
        "run": run.id,
        "kind": info.kind,
        "status": run.status,
        "steps": total["steps"] if info.steps is None else f"{total['steps'] or 0}/{info.steps}",
        "rollouts": total["rollouts"],
        "reward": reward,
        "validation": validation,
        "failed": total["failed"] or 0,
        "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created)),
        "agent": info.agent,
        "model": info.model,
        "path": str(run.path),
        "cost": msgspec.to_builtins(cost),
    }
