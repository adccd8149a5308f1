"""`afield logs`: print or follow the output of a session.

The output is a log file, a section of a worker's log, or the logs that the runtime returns.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from afield.cli.log_format import without_keys
from afield.cli.sessions import RunSession, running_sessions, runs_named, unknown_session
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory
from afield.utils.log_tail import LogSlice, read_slices, slice_text

FOLLOW_S = 0.3
"""Interval between reads of a followed log, in seconds."""
READ = 2**16
"""Characters read from a log file at once."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "logs",
        help="print the output of a session",
        description="Print the output of a running or ended session.",
    )
    command.add_argument("session", metavar="SESSION", help="session id, as `afield ps` lists it")
    command.add_argument("--run", dest="name", metavar="RUN", help="run to search (default: all runs)")
    command.add_argument(
        "--follow", "-f", action="store_true", help="continue to print until the session has ended"
    )
    command.add_argument("--tail", type=int, metavar="N", help="print only the last N lines")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.tail is not None and args.tail < 0:
        raise UsageError(f"--tail {args.tail} must be 0 or more")
    run_paths = runs_named(args.name)
    directories = [home for run in run_paths for home in (run, RunDirectory(run.path / "verifiers"))]
    running = [session for session in running_sessions(args.name) if session.id == args.session]
    files = [directory.logs / f"{args.session}.log" for directory in directories]
    files += [session.group.logs / session.entry.log for session in running if session.entry.log]
    if file := next((file for file in files if file.is_file() and file.suffix == ".log"), None):
        _print_file(file, args)
        return 0
    slices = [(directory, part) for directory in directories for part in read_slices(directory.logs)]
    if own := [(directory, part) for directory, part in slices if part.session == args.session]:
        _print_slice(*own[-1], args)
        return 0
    if not running:
        candidates = [session.id for session in running_sessions(args.name)]
        candidates += [path.stem for directory in directories for path in directory.logs.glob("*.log")]
        raise unknown_session(args.session, [*candidates, *(part.session for _, part in slices)])
    asyncio.run(_print_from_runtime(running[0], args))
    return 0


def _print_file(file: Path, args: argparse.Namespace) -> None:
    with file.open(errors="replace") as lines:
        _print(_last(lines.read(), args.tail))
        while args.follow and _is_running(args):
            time.sleep(FOLLOW_S)
            while more := lines.read(READ):
                _print(more)
        if args.follow:
            _print(lines.read())


def _print_slice(directory: RunDirectory, part: LogSlice, args: argparse.Namespace) -> None:
    print(
        f"afield: session {part.session} has ended; this part of its worker's log"
        f" ({directory.logs / part.log}) may contain output of other sessions:",
        file=sys.stderr,
    )
    _print(_last(slice_text(directory.logs, part), args.tail))


async def _print_from_runtime(session: RunSession, args: argparse.Namespace) -> None:
    runtime = session.group.runtime()
    if runtime is None or not runtime.capabilities.reaches:
        raise UsageError(
            f"session {session.id} has no log of its own; see the output of its controller,"
            f" pid {session.entry.owner.pid}"
        )
    async with runtime:
        text = await runtime.logs(session.attempt)
        _print(_last(text, args.tail))
        while args.follow and _is_running(args):
            await asyncio.sleep(FOLLOW_S)
            before, text = text, await runtime.logs(session.attempt)
            _print(_added(before, text))


def _is_running(args: argparse.Namespace) -> bool:
    return any(session.id == args.session for session in running_sessions(args.name))


def _added(before: str, now: str) -> str:
    """Text added since `before`. A runtime may keep only the end of a log, so `now` may start later."""
    mark = before[-200:]
    at = now.rfind(mark)
    return now[at + len(mark) :] if at >= 0 else now


def _last(text: str, count: int | None) -> str:
    if count is None:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(lines[len(lines) - count :] if count < len(lines) else lines)


def _print(text: str) -> None:
    if text:
        print(without_keys(text), end="" if text.endswith("\n") else "\n", flush=True)
