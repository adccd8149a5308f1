"""`afield kill` and `afield cleanup`: end sessions and remove leftovers.

1. `kill` ends named sessions; `cleanup` ends orphans, whose controller process is dead.
2. A runtime that other processes can reach stops its sessions itself. Sessions in local processes get
   SIGTERM, then SIGKILL, sent only to the process in the session registry.
3. A controller starts `cleanup --when-stdin-ends` as a child process: it acts when the controller is dead and
   no other controller has taken over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from afield.cli import disk_usage as disk
from afield.cli import sessions as shown
from afield.cli.sessions import Part, Session
from afield.errors import AfieldError, UsageError
from afield.interfaces import Runtime
from afield.interfaces.runtime import Phase
from afield.types import Attempt

AT_ONCE = 16
"""Sessions that a runtime stops concurrently."""
TRIES = 4
"""Attempts to stop a session."""
POLL_S = 0.5
"""Interval between checks for a new controller, in seconds."""
TERM_S = 3.0
"""Time from SIGTERM to SIGKILL, in seconds."""
START_S = 10.0
"""Time to wait for a starting session to get its process, in seconds."""
KILL_S = 10.0
"""Time to wait for a process to end after SIGKILL, in seconds."""


class Ended(Struct, frozen=True):
    """Result of ending one session."""

    run: str
    """Run id."""
    session: str
    """Session id; `*` if the runtime could not be queried."""
    ended: bool
    """Whether the session has ended."""
    said: str
    """Result for the user: the reason if it has not ended."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "kill", help="end sessions", description="End sessions; their collector, if any, may try them again."
    )
    command.add_argument("session", nargs="*", metavar="SESSION")
    command.add_argument("--run", dest="name", metavar="RUN", help="those of this run; alone: all of them")
    command.add_argument("--orphans", action="store_true", help="all whose collector is dead")
    command.add_argument("--json", action="store_true", help="the same as JSON")
    command.set_defaults(run=kill)
    command = commands.add_parser(
        "cleanup",
        help="end and remove what runs left behind",
        description="End the sessions whose collector is dead, show the disk use of all runs or of one, and"
        " remove what is asked for.",
    )
    command.add_argument("name", nargs="?", metavar="RUN", help="id, path, or latest")
    command.add_argument("--when-stdin-ends", action="store_true", help="wait for that first, then --grace-s")
    command.add_argument(
        "--grace-s", type=float, default=20.0, metavar="S", help="for another collector to take over"
    )
    command.add_argument("--rollouts", action="store_true", help="remove rollouts but those of 3 last steps")
    command.add_argument(
        "--store", action="store_true", help="remove sessions that are over from the gateway's store"
    )
    command.add_argument(
        "--queues", action="store_true", help="delete the SQS queues that were made for the experiment"
    )
    command.add_argument("--json", action="store_true", help="the same as JSON")
    command.set_defaults(run=cleanup)


def kill(args: argparse.Namespace) -> int:
    if not (args.session or args.name or args.orphans):
        raise UsageError("say which: SESSION..., --run RUN, or --orphans")
    running = shown.sessions(shown.parts(args.name))
    wanted = running
    if args.session:
        known = {session.id for session in running}
        for session_id in args.session:
            if session_id not in known:
                raise shown.unknown(session_id, known)
            shown.check_one_run(session_id, running)
        wanted = [session for session in running if session.id in args.session]
    if args.orphans:
        wanted = [session for session in wanted if session.entry.orphan]
    return _tell(asyncio.run(_end(wanted)), as_json=args.json)


def cleanup(args: argparse.Namespace) -> int:
    if args.grace_s < 0:
        raise UsageError(f"--grace-s {args.grace_s:g} must be 0 or more")
    if args.when_stdin_ends:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        deadline = time.monotonic() + args.grace_s
        while time.monotonic() < deadline and any(_left(part) for part in shown.parts(args.name)):
            time.sleep(min(POLL_S, args.grace_s))
    cautious = args.when_stdin_ends
    ended = asyncio.run(_reap(shown.parts(args.name), cautious=cautious))
    if args.when_stdin_ends:
        return _tell(ended, as_json=args.json)
    choice = disk.Choice(rollouts=args.rollouts, store=args.store, queues=args.queues)
    return _tell(ended, as_json=args.json, usages=disk.run_usage(args.name, choice))


def _left(part: Part) -> bool:
    """Whether all controllers of these sessions are dead."""
    roster = part.roster()
    try:
        owners = roster.owners()
        return any(o.alive is False for o in owners) and not any(o.alive is not False for o in owners)
    finally:
        roster.close()


async def _reap(among: Sequence[Part], *, cautious: bool) -> list[Ended]:
    """End orphans. With `cautious`, skip sessions whose run has a live controller."""
    done: list[Ended] = []
    for part in among:
        roster = part.roster()
        owned = any(owner.alive is not False for owner in roster.owners())
        roster.close()
        if owned and cautious:
            continue
        orphans = [s for s in shown.sessions([part]) if s.entry.orphan]
        done += await _end_part(part, orphans, others=not owned)
        _forget_dead(part)
    return done


def _forget_dead(part: Part) -> None:
    """Remove entries of sessions that ended with their controller, and dead controllers without sessions."""
    roster = part.roster()
    try:
        for entry in roster.entries():
            if Session(part, entry).stale:
                roster.remove(entry.session_id)
        orphaned = {entry.owner for entry in roster.entries()}
        for owner in roster.owners():
            if owner.alive is False and owner not in orphaned:
                roster.remove_owner(owner)
    finally:
        roster.close()


async def _end(wanted: Sequence[Session]) -> list[Ended]:
    done: list[Ended] = []
    for part in dict.fromkeys(session.part for session in wanted):
        done += await _end_part(part, [s for s in wanted if s.part == part], others=False)
    return done


async def _end_part(part: Part, wanted: Sequence[Session], *, others: bool) -> list[Ended]:
    """End these sessions; with `others`, also sessions that the runtime lists and no registry has."""
    if not wanted and not others:
        return []
    try:
        runtime = part.runtime()
        can = runtime.capabilities
        if not can.reaches:
            ids = {session.id for session in wanted}
            return list(await asyncio.gather(*(_end_process(session, ids) for session in wanted)))
        async with runtime:
            attempts = [session.attempt for session in wanted]
            if others and can.lists:
                noted = {session.id for session in wanted}
                listed = [live.session_id for live in await runtime.list()]
                attempts += [Attempt.from_session_id(s) for s in listed if s not in noted]
            room = asyncio.Semaphore(AT_ONCE)
            return list(await asyncio.gather(*(_stop(part, runtime, a, room) for a in attempts)))
    except AfieldError as error:
        said = f"the place cannot be asked: {error}"
        return [Ended(part.run.id, session.id, False, said) for session in wanted] or [
            Ended(part.run.id, "*", False, said)
        ]


async def _stop(part: Part, runtime: Runtime, attempt: Attempt, room: asyncio.Semaphore) -> Ended:
    async with room:
        for tried in range(1, TRIES + 1):
            try:
                await runtime.stop(attempt)
                break
            except AfieldError as error:
                if tried == TRIES:
                    return Ended(part.run.id, attempt.session_id, False, str(error))
                await asyncio.sleep(tried)
    _strike(part, attempt.session_id)
    return Ended(part.run.id, attempt.session_id, True, "stopped")


async def _placed(session: Session) -> Session | None:
    """Wait until a starting session has a process; None if it ended before that."""
    end = time.monotonic() + START_S
    while session.entry.process is None and session.entry.phase is Phase.STARTING and time.monotonic() < end:
        await asyncio.sleep(POLL_S / 5)
        now = [other for other in shown.sessions([session.part]) if other.id == session.id]
        if not now:
            return None
        session = now[0]
    return session


async def _end_process(wanted: Session, ending: set[str]) -> Ended:
    """End the process of a session by signals. `ending` are the ids of all sessions that the command ends."""
    session = await _placed(wanted)
    if session is None:
        return Ended(wanted.part.run.id, wanted.id, True, "it has ended by itself")
    entry, run = session.entry, session.part.run.id
    process = entry.process
    if process is None and entry.phase is Phase.STARTING:
        said = f"it is still starting after {START_S:g} s; ask again, or stop pid {entry.owner.pid}"
        return Ended(run, session.id, False, said)
    if process is None or process == entry.owner:
        said = f"it runs inside its collector: stop that, pid {entry.owner.pid} on {entry.owner.host}"
        return Ended(run, session.id, False, said)
    if process.alive is None:
        return Ended(run, session.id, False, f"it runs on {process.host}: kill it there")
    beside = _beside(session, ending)  # read first: the collector starts them again once the process ends
    for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        end = time.monotonic() + seconds
        if process.alive:
            _signal(process.pid, number)
        while process.alive and time.monotonic() < end:
            await asyncio.sleep(0.05)
    if process.alive:
        return Ended(run, session.id, False, f"pid {process.pid} does not end")
    _strike(session.part, session.id)
    return Ended(run, session.id, True, f"pid {process.pid} has ended{beside}")


def _beside(session: Session, ending: set[str]) -> str:
    """Describe other sessions of the same prewarmed worker, which end with it; empty without any."""
    process = session.entry.process
    roster = session.part.roster()
    try:
        others = [
            e.session_id for e in roster.entries() if e.process == process and e.session_id not in ending
        ]
    finally:
        roster.close()
    if not others:
        return ""
    told = ", ".join(others[:10]) + (" and more" if len(others) > 10 else "")
    return f", and with it what it served beside: {told}; their collector tries those again"


def _signal(pid: int, number: int) -> None:
    """Signal the process group if the process leads it, otherwise the process alone: others may share it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number) if os.getpgid(pid) == pid else os.kill(pid, number)


def _strike(part: Part, session_id: str) -> None:
    roster = part.roster()
    try:
        roster.remove(session_id)
    finally:
        roster.close()


def _tell(done: Sequence[Ended], *, as_json: bool, usages: Sequence[disk.Usage] | None = None) -> int:
    failed = [one for one in done if not one.ended]
    if as_json:
        lines = [{"run": d.run, "session": d.session, "ended": d.ended, "said": d.said} for d in done]
        told: dict[str, Any] = {"sessions": lines, "ended": len(done) - len(failed), "failed": len(failed)}
        told |= {} if usages is None else {"runs": msgspec.to_builtins(usages)}
        print(json.dumps(told))
    else:
        for one in done:
            print(f"{one.run}  {one.session}  {one.said if one.ended else f'NOT ENDED: {one.said}'}")
        if not done:
            print("nothing to end")
        for line in disk.lines(usages or ()):
            print(line)
    return 1 if failed else 0
