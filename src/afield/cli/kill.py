"""`afield kill`: end sessions by runtime calls or signals.

1. A runtime that other processes can reach stops its sessions itself.
2. Sessions in local processes get SIGTERM, then SIGKILL, sent only to the process in the session registry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import msgspec
from msgspec import Struct

from afield.cli.sessions import RunSession, SessionGroup, running_sessions, unknown_session
from afield.errors import AfieldError, UsageError
from afield.interfaces import Runtime
from afield.interfaces.runtime import Phase
from afield.types import Attempt

CONCURRENT_STOPS = 16
"""Sessions that a runtime stops concurrently."""
STOP_ATTEMPTS = 4
"""Attempts to stop a session."""
POLL_S = 0.1
"""Interval between checks for the process of a starting session, in seconds."""
TERM_S = 3.0
"""Time from SIGTERM to SIGKILL, in seconds."""
START_S = 10.0
"""Time to wait for a starting session to get its process, in seconds."""
KILL_S = 10.0
"""Time to wait for a process to end after SIGKILL, in seconds."""


class StopResult(Struct, frozen=True):
    """Result of ending one session."""

    run: str
    """Run id."""
    session: str
    """Session id; `*` if the runtime could not be queried."""
    ended: bool
    """Whether the session has ended."""
    message: str
    """How it ended, or why it did not."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "kill",
        help="end sessions",
        description="End sessions. A controller that still runs may retry their rollouts.",
    )
    command.add_argument("session", nargs="*", metavar="SESSION", help="session id, as `afield ps` lists it")
    command.add_argument(
        "--run", dest="name", metavar="RUN", help="run of the sessions; without SESSION: end all of them"
    )
    command.add_argument("--orphans", action="store_true", help="end the sessions whose controller is dead")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not (args.session or args.name or args.orphans):
        raise UsageError("name the sessions to end: SESSION..., --run RUN or --orphans")
    chosen = running_sessions(args.name)
    if args.session:
        chosen = _chosen(args.session, chosen)
    else:  # a pool replaces a gateway that is killed
        chosen = [session for session in chosen if session.group.role != "gateway" or session.entry.orphan]
    if args.orphans:
        chosen = [session for session in chosen if session.entry.orphan]
    results = asyncio.run(_end_all(chosen))
    if args.json:
        print(json.dumps(as_json(results)))
    else:
        print("\n".join(lines(results)))
    return exit_code(results)


def _chosen(session_ids: Sequence[str], running: Sequence[RunSession]) -> list[RunSession]:
    """Sessions of these ids; refuses an id that is unknown or that several runs use."""
    for session_id in session_ids:
        runs = sorted({session.group.run.id for session in running if session.id == session_id})
        if not runs:
            raise unknown_session(session_id, (session.id for session in running))
        if len(runs) > 1:
            raise UsageError(f"session {session_id!r} runs in {', '.join(runs)}; choose one with --run RUN")
    return [session for session in running if session.id in session_ids]


def as_json(results: Sequence[StopResult]) -> dict[str, Any]:
    ended = sum(result.ended for result in results)
    return {"sessions": msgspec.to_builtins(results), "ended": ended, "failed": len(results) - ended}


def lines(results: Sequence[StopResult]) -> list[str]:
    return [
        f"{result.run}  {result.session}  {'' if result.ended else 'NOT ENDED: '}{result.message}"
        for result in results
    ] or ["no sessions to end"]


def exit_code(results: Sequence[StopResult]) -> int:
    return 0 if all(result.ended for result in results) else 1


async def _end_all(sessions: Sequence[RunSession]) -> list[StopResult]:
    results: list[StopResult] = []
    for group in dict.fromkeys(session.group for session in sessions):
        own = [session for session in sessions if session.group == group]
        results += await end_sessions(group, own, unregistered=False)
    return results


async def end_sessions(
    group: SessionGroup, sessions: Sequence[RunSession], *, unregistered: bool
) -> list[StopResult]:
    """End these sessions; with `unregistered`, also those that the runtime lists and no registry has."""
    if not sessions and not unregistered:
        return []
    try:
        runtime = group.runtime()
        ids = {session.id for session in sessions}
        if runtime is None or not runtime.capabilities.reaches:
            return list(await asyncio.gather(*(_end_process(session, ids) for session in sessions)))
        async with runtime:
            attempts = [session.attempt for session in sessions]
            if unregistered and runtime.capabilities.lists:
                listed = [status.session_id for status in await runtime.list()]
                attempts += [Attempt.from_session_id(name) for name in listed if name not in ids]
            slots = asyncio.Semaphore(CONCURRENT_STOPS)
            return list(await asyncio.gather(*(_stop(group, runtime, a, slots) for a in attempts)))
    except AfieldError as error:
        message = f"cannot query the runtime: {error}"
        failed = [session.id for session in sessions] or ["*"]
        return [StopResult(group.run.id, session_id, False, message) for session_id in failed]


async def _stop(
    group: SessionGroup, runtime: Runtime, attempt: Attempt, slots: asyncio.Semaphore
) -> StopResult:
    async with slots:
        for number in range(1, STOP_ATTEMPTS + 1):
            try:
                await runtime.stop(attempt)
                break
            except AfieldError as error:
                if number == STOP_ATTEMPTS or isinstance(error, UsageError):
                    return StopResult(group.run.id, attempt.session_id, False, str(error))
                await asyncio.sleep(number)
    group.remove(attempt.session_id)
    return StopResult(group.run.id, attempt.session_id, True, "stopped")


async def _end_process(registered: RunSession, ending: set[str]) -> StopResult:
    """End the process of a session by signals. `ending` are the ids of all sessions that the command ends."""

    def result(ended: bool, message: str) -> StopResult:
        return StopResult(registered.group.run.id, registered.id, ended, message)

    session = await _with_process(registered)
    if session is None:
        return result(True, "already ended")
    process, owner = session.entry.process, session.entry.owner
    if process is None and session.entry.phase is Phase.STARTING:
        return result(False, f"still starting after {START_S:g} s; try again, or stop pid {owner.pid}")
    if process is None or process == owner:
        return result(False, f"runs inside its controller; stop pid {owner.pid} on {owner.host}")
    if process.alive is None:
        return result(False, f"runs on {process.host}; run afield kill there")
    others = _others(session, ending)  # read first: the controller restarts them once the process ends
    for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        end = time.monotonic() + seconds
        if process.alive:
            _signal(process.pid, number)
        while process.alive and time.monotonic() < end:
            await asyncio.sleep(0.05)
    if process.alive:
        return result(False, f"pid {process.pid} still runs {KILL_S:g} s after SIGKILL")
    session.group.remove(session.id)
    return result(True, f"pid {process.pid} has ended{others}")


async def _with_process(session: RunSession) -> RunSession | None:
    """Wait until a starting session has a process; None if it ended before that."""
    end = time.monotonic() + START_S
    while session.entry.process is None and session.entry.phase is Phase.STARTING and time.monotonic() < end:
        await asyncio.sleep(POLL_S)
        sessions = [running for running in session.group.sessions() if running.id == session.id]
        if not sessions:
            return None
        session = sessions[0]
    return session


def _others(session: RunSession, ending: set[str]) -> str:
    """Describe other sessions of the same worker process, which end with it; empty without any."""
    with closing(session.group.registry()) as registry:
        same = [entry for entry in registry.entries() if entry.process == session.entry.process]
    others = [entry.session_id for entry in same if entry.session_id not in ending]
    if not others:
        return ""
    ids = ", ".join(others[:10]) + (" and more" if len(others) > 10 else "")
    return f", and with it the sessions that it also served: {ids}; their controller retries them"


def _signal(pid: int, number: int) -> None:
    """Signal the process group if the process leads it, otherwise the process alone: others may share it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number) if os.getpgid(pid) == pid else os.kill(pid, number)
