"""`afield ps`: list running sessions, and gateways of pools.

Sessions come from the session registry of each run; `ps --all` queries the runtimes as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from afield.cli.sessions import SessionGroup, session_groups
from afield.cli.tables import print_table
from afield.errors import AfieldError
from afield.settings.environment import Environment

COLUMNS = ("run", "session", "runtime", "phase", "where", "age", "owner")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "ps", help="list running sessions", description="List the running sessions of all runs, or of one."
    )
    command.add_argument("name", nargs="?", metavar="RUN", help="run id, path, or latest (default: all runs)")
    command.add_argument(
        "--all",
        action="store_true",
        help="also query the runtimes, which may have sessions that are not in the registry",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    groups = session_groups(args.name)
    rows = [session.row() for group in groups for session in group.sessions()]
    if args.all:
        rows = asyncio.run(_with_runtimes(groups, rows))
    if args.json:
        print(json.dumps({"sessions": rows}))
    elif rows:
        print_table(map(_line, rows), COLUMNS)
    elif args.name:
        print(f"no running sessions in {args.name}")
    else:
        print(f"no running sessions in {Environment.read().runs}; AFIELD_RUNS sets another directory")
    return 0


async def _with_runtimes(groups: Sequence[SessionGroup], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Query the runtimes: update phases and locations, and add sessions that are in no registry."""
    by_session = {(row["run"], row["role"], row["session"]): row for row in rows}
    for group in groups:
        try:
            runtime = group.runtime()
            if runtime is None or not runtime.capabilities.lists:
                continue
            async with runtime:
                listed = await runtime.list()
        except AfieldError as error:
            print(f"afield: cannot query the runtime of {group.run.id}: {error}", file=sys.stderr)
            continue
        for status in listed:
            row = by_session.setdefault(
                (group.run.id, group.role, status.session_id),
                {
                    "run": group.run.id,
                    "session": status.session_id,
                    "role": group.role,
                    "runtime": group.runtime_name,
                    "phase": "",
                    "where": "",
                    "age_s": round(time.time() - status.since, 1) if status.since else None,
                    "owner": None,
                    "orphan": None,
                },
            )
            row.update(phase=str(status.phase), where=status.where or row["where"])
    return list(by_session.values())


def _line(row: dict[str, Any]) -> dict[str, Any]:
    run = row["run"] + ("" if row["role"] == "agent" else f" ({row['role']})")
    return {**row, "run": run, "age": _age(row["age_s"]), "owner": _owner(row)}


def _owner(row: dict[str, Any]) -> str:
    owner = row["owner"]
    if owner is None:
        return "not registered"
    if row["orphan"]:
        return f"ORPHAN of pid {owner['pid']}"
    return f"pid {owner['pid']}" + ("" if owner["alive"] else f" on {owner['host']}")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
