"""`afield cleanup`: end orphaned sessions, show disk usage, remove data of runs.

1. Orphans are sessions whose controller process is dead.
2. A controller starts `cleanup --when-stdin-ends` as a child process: it acts when the controller is dead and
   no other controller has taken over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afield import factory
from afield.cli import kill
from afield.cli.sessions import RunSession, SessionGroup, runs_named, session_groups
from afield.cli.train import saved_config
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory
from afield.settings.environment import Environment

POLL_S = 0.5
"""Interval between checks for a new controller, in seconds."""
DIRECTORIES = (
    *("rollouts", "rollout_store", "checkpoints", "weights", "gateway", "outcomes", "logs", "validation"),
)
"""Directories of a run whose sizes are shown."""
KEPT_STEPS = 3
"""Newest steps whose rollouts `--rollouts` keeps."""
UNITS = ("B", "kB", "MB", "GB", "TB")


class DiskUsage(Struct, frozen=True, kw_only=True):
    """Disk usage of one run."""

    run: str
    """Name of the run."""
    bytes: dict[str, int]
    """Bytes of each subdirectory of the run, and of the whole run as `total`."""
    removed: dict[str, int | list[int] | list[str]] = {}
    """Removed data: step numbers for `rollouts`, number of sessions for `store`, names for `queues`."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "cleanup",
        help="end orphaned sessions and remove data of runs",
        description="End the sessions whose controller is dead, show the disk usage of all runs or of one,"
        " and remove the data that the options name.",
    )
    command.add_argument("name", nargs="?", metavar="RUN", help="run id, path, or latest (default: all runs)")
    command.add_argument(
        "--when-stdin-ends",
        action="store_true",
        help="start when standard input closes and --grace-s has passed without a new controller",
    )
    command.add_argument(
        "--grace-s",
        type=float,
        default=20.0,
        metavar="S",
        help="seconds that another controller has to take over (default: 20)",
    )
    command.add_argument(
        "--rollouts", action="store_true", help=f"remove the rollouts of all but the last {KEPT_STEPS} steps"
    )
    command.add_argument(
        "--store", action="store_true", help="remove ended sessions from the store of the run's gateway"
    )
    command.add_argument(
        "--queues", action="store_true", help="delete the SQS queues that were created for the run"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.grace_s < 0:
        raise UsageError(f"--grace-s {args.grace_s:g} must be 0 or more")
    if args.when_stdin_ends:
        _wait_for_takeover(args.name, args.grace_s)
        results = asyncio.run(_end_orphans(session_groups(args.name), abandoned_only=True))
        usages = None
    else:
        results = asyncio.run(_end_orphans(session_groups(args.name), abandoned_only=False))
        usages = _clean_runs(args)
    if args.json:
        report = kill.as_json(results) | ({} if usages is None else {"runs": msgspec.to_builtins(usages)})
        print(json.dumps(report))
    else:
        print("\n".join([*kill.lines(results), *usage_lines(usages or ())]))
    return kill.exit_code(results)


# --- orphans ----------------------------------------------------------------------------------


def _wait_for_takeover(name: str | None, seconds: float) -> None:
    """Wait until standard input closes, then until a new controller takes over or the time is up."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(_abandoned, session_groups(name))):
        time.sleep(min(POLL_S, seconds))


def _abandoned(group: SessionGroup) -> bool:
    """Whether there are controllers in the registry, and all of them are dead."""
    with closing(group.registry()) as registry:
        owners = registry.owners()
    return bool(owners) and all(owner.alive is False for owner in owners)


async def _end_orphans(groups: Sequence[SessionGroup], *, abandoned_only: bool) -> list[kill.StopResult]:
    """End orphans. With `abandoned_only`, skip runs that have a live controller."""
    results: list[kill.StopResult] = []
    for group in groups:
        with closing(group.registry()) as registry:
            has_controller = any(owner.alive is not False for owner in registry.owners())
        if has_controller and abandoned_only:
            continue
        orphans = [session for session in group.sessions() if session.entry.orphan]
        results += await kill.end_sessions(group, orphans, unregistered=not has_controller)
        _remove_dead(group)
    return results


def _remove_dead(group: SessionGroup) -> None:
    """Remove entries of sessions that ended with their controller, and dead controllers without sessions."""
    with closing(group.registry()) as registry:
        for entry in registry.entries():
            if RunSession(group, entry).stale:
                registry.remove(entry.session_id)
        with_sessions = {entry.owner for entry in registry.entries()}
        for owner in registry.owners():
            if owner.alive is False and owner not in with_sessions:
                registry.remove_owner(owner)


# --- disk usage -------------------------------------------------------------------------------


def _clean_runs(args: argparse.Namespace) -> list[DiskUsage]:
    """Remove the chosen data of one run; returns the disk usage of this run or of all runs after it."""
    removes = args.rollouts or args.store or args.queues
    if removes and args.name is None:
        raise UsageError("name the run to remove data of, such as: afield cleanup RUN --rollouts")
    return [
        DiskUsage(run=run.id, removed=_remove_data(run, args) if removes else {}, bytes=sizes(run))
        for run in runs_named(args.name)
    ]


def _remove_data(run: RunDirectory, args: argparse.Namespace) -> dict[str, int | list[int] | list[str]]:
    """Remove the chosen data of a run; refuses a run that is in use."""
    removed: dict[str, int | list[int] | list[str]] = {}
    with run.locked("collect", "learn"):
        if args.rollouts:
            removed["rollouts"] = run.prune_rollouts(0, keep_steps=KEPT_STEPS)
        stores = list(run.gateway.rglob("gateway.sqlite"))
        if args.store and stores:
            removed["store"] = sum(map(factory.remove_ended_sessions, stores))
        if args.queues:
            removed["queues"] = asyncio.run(_remove_queues(run))
    return removed


async def _remove_queues(run: RunDirectory) -> list[str]:
    config = saved_config(run)
    notifier: Any = getattr(factory.transport(config, run), "notifier", None)
    if not hasattr(notifier, "remove_queues"):
        return []
    async with notifier:
        return await notifier.remove_queues(config.exp_id or run.id)


def sizes(run: RunDirectory) -> dict[str, int]:
    """Bytes of each subdirectory that is not empty, and of the whole run as `total`."""
    sizes = {name: _size(run.path / name) for name in DIRECTORIES}
    return {**{name: size for name, size in sizes.items() if size}, "total": _size(run.path)}


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # removed since it was listed
                total += (Path(folder) / name).lstat().st_size
    return total


def usage_lines(usages: Sequence[DiskUsage]) -> list[str]:
    """Lines to print: runs by size, the largest first, and the free disk space."""
    lines: list[str] = []
    for usage in sorted(usages, key=lambda usage: -usage.bytes["total"]):
        parts = [f"{name} {human(size)}" for name, size in usage.bytes.items() if name != "total"]
        parted = f"  ({', '.join(parts)})" if parts else ""
        lines.append(f"{usage.run}  {human(usage.bytes['total'])}{parted}")
        for kind, removed in usage.removed.items():
            unit = {"rollouts": "steps", "store": "sessions", "queues": "queues"}[kind]
            number = removed if isinstance(removed, int) else len(removed)
            lines.append(f"{usage.run}  removed {number} {unit}")
    if usages:
        with suppress(OSError):
            free = shutil.disk_usage(Environment.read().runs).free
            total = sum(usage.bytes["total"] for usage in usages)
            lines.append(f"total {human(total)}, free {human(free)}")
    return lines


def human(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size:g} {UNITS[0]}"
