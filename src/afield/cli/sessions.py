"""`afield ps` and `afield logs`: running sessions of all runs and runtimes.

1. Sessions come from the session registry of each run; `ps --all` queries the runtimes as well.
2. A session whose controller process is dead is an orphan.
3. `logs` prints a log file, a slice of a worker's log, or the logs that the runtime returns.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.cli.log_format import without_keys
from afield.cli.train import saved_config
from afield.errors import AfieldError, UsageError
from afield.interfaces import Runtime
from afield.log_tail import LogSlice, read_slices, slice_text
from afield.orchestrator.state import RunDirectory, find_run
from afield.settings.environment import Environment
from afield.types import Attempt

FOLLOW_S = 0.3
"""Interval between reads of a followed log, in seconds."""
READ = 2**16
"""Characters read from a log file at once."""


class Part(Struct, frozen=True):
    """Agents or verifiers of a run; each role has its own session registry and runtime."""

    run: RunDirectory
    """Directory of the run."""
    verifying: bool = False
    """True for verifiers, False for agents."""

    @property
    def home(self) -> RunDirectory:
        return RunDirectory(self.run.path / "verifiers") if self.verifying else self.run

    def roster(self) -> Any:
        from afield import factory

        return factory.session_registry(self.home.sessions)

    def runtime(self) -> Runtime:
        """Build the runtime from the run's saved settings, without writing to its session registry."""
        from afield import factory

        config = saved_config(self.run)
        build = factory.verifier_runtime if self.verifying else factory.runtime
        runtime = build(config, self.run, factory.transport(config, self.run))
        assert runtime is not None  # its registry exists only if it has one
        return factory.untracked(runtime)


class Session(Struct, frozen=True):
    """An entry of a session registry, with the run and role that it belongs to."""

    part: Part
    """Agents or verifiers that the session belongs to."""
    entry: Any
    """Entry of the session registry (`afield.runtimes.registry.SessionEntry`)."""

    @property
    def id(self) -> str:
        return self.entry.session_id

    @property
    def attempt(self) -> Attempt:
        return Attempt.from_session_id(self.id)

    @property
    def stale(self) -> bool:
        """Whether the session ended with its dead controller, although its entry remains."""
        gone = self.entry.process is None or not self.entry.process.alive
        return self.entry.orphan and not self.entry.outlives and gone

    def told(self) -> dict[str, Any]:
        entry, owner = self.entry, self.entry.owner
        return {
            "run": self.part.run.id,
            "session": entry.session_id,
            "role": "verifier" if self.part.verifying else "agent",
            "runtime": entry.runtime,
            "phase": str(entry.phase),
            "where": entry.where,
            "age_s": round(max(0.0, time.time() - entry.since), 1),
            "owner": {"host": owner.host, "pid": owner.pid, "alive": owner.alive},
            "orphan": entry.orphan,
        }


def add(commands: Any) -> None:
    from afield.cli import cleanup

    command = commands.add_parser(
        "ps", help="sessions that run now", description="Sessions that run now, of all runs or of one."
    )
    command.add_argument("name", nargs="?", metavar="RUN", help="id, path, or latest")
    command.add_argument(
        "--all", action="store_true", help="ask the places too: also sessions that are in no roster"
    )
    command.add_argument("--json", action="store_true", help="the same as JSON")
    command.set_defaults(run=ps)
    command = commands.add_parser(
        "logs", help="what a session printed", description="What a session printed, or prints."
    )
    command.add_argument("session", metavar="SESSION")
    command.add_argument("--run", dest="name", metavar="RUN", help="look in this run only")
    command.add_argument("--follow", "-f", action="store_true", help="go on until the session has ended")
    command.add_argument("--tail", type=int, metavar="N", help="the last N lines only")
    command.set_defaults(run=logs)
    cleanup.add(commands)


# --- running sessions ---------------------------------------------------------------------------------------


def parts(name: str | None) -> list[Part]:
    """Agents and verifiers of one run, or of all runs, that have a session registry."""
    runs = Environment.read().runs
    if name is not None:
        found = [find_run(runs, name)]
    else:
        found = [RunDirectory(path.parent) for path in sorted(runs.glob("*/run.json"))]
    both = [Part(run, verifying) for run in found for verifying in (False, True)]
    return [part for part in both if part.home.sessions.exists()]


def sessions(among: Iterable[Part]) -> list[Session]:
    found: list[Session] = []
    for part in among:
        roster = part.roster()
        try:
            found += [Session(part, entry) for entry in roster.entries()]
        finally:
            roster.close()
    return [session for session in found if not session.stale]


def ps(args: argparse.Namespace) -> int:
    among = parts(args.name)
    lines = [session.told() for session in sessions(among)]
    if args.all:
        lines = asyncio.run(_asked(among, lines))
    if args.json:
        print(json.dumps({"sessions": lines}))
        return 0
    if not lines:
        looked = f"in {args.name}" if args.name else f"under {Environment.read().runs}"
        print(f"no session runs {looked}" + ("" if args.name else "; AFIELD_RUNS names another folder"))
        return 0
    head = ("RUN", "SESSION", "RUNTIME", "PHASE", "WHERE", "AGE", "OWNER")
    _table([head, *(_line(line) for line in lines)])
    return 0


async def _asked(among: Sequence[Part], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Query the runtimes: update phases and locations, and add sessions that are in no registry."""
    known = {(line["run"], line["role"], line["session"]): line for line in lines}
    for part in among:
        try:
            runtime = part.runtime()
            if not runtime.capabilities.lists:
                continue
            async with runtime:
                listed = await runtime.list()
        except AfieldError as error:
            print(f"afield: {part.run.id} cannot be asked: {error}", file=sys.stderr)
            continue
        role = "verifier" if part.verifying else "agent"
        config = saved_config(part.run)
        kind = config.verifier_runtime if part.verifying else config.runtime_name
        for live in listed:
            line = known.setdefault(
                (part.run.id, role, live.session_id),
                {
                    "run": part.run.id,
                    "session": live.session_id,
                    "role": role,
                    "runtime": kind,
                    "phase": "",
                    "where": "",
                    "age_s": round(time.time() - live.since, 1) if live.since else None,
                    "owner": None,
                    "orphan": None,
                },
            )
            line.update(phase=str(live.phase), where=live.where or line["where"])
    return list(known.values())


def _line(told: dict[str, Any]) -> tuple[str, ...]:
    owner = told["owner"]
    if owner is None:
        whose = "not in the roster"
    elif told["orphan"]:
        whose = f"ORPHAN of pid {owner['pid']}"
    else:
        whose = f"pid {owner['pid']}" + ("" if owner["alive"] else f" on {owner['host']}")
    run = told["run"] + (" (verifier)" if told["role"] == "verifier" else "")
    where = told["where"] or "-"
    return run, told["session"], told["runtime"], told["phase"], where, _age(told["age_s"]), whose


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def unknown(session_id: str, known: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(session_id, sorted(set(known)), n=5)
    hint = f"; did you mean {', '.join(near)}?" if near else "; `afield ps` lists what runs"
    return UsageError(f"unknown session {session_id!r}{hint}")


def check_one_run(session_id: str, among: Iterable[Session]) -> None:
    """Refuse a session id that several runs use; separate runs may number their rollouts alike."""
    whose = sorted({session.part.run.id for session in among if session.id == session_id})
    if len(whose) > 1:
        raise UsageError(f"{session_id!r} runs in {', '.join(whose)}; say which with --run RUN")


# --- logs -----------------------------------------------------------------------------------


def logs(args: argparse.Namespace) -> int:
    if args.tail is not None and args.tail < 0:
        raise UsageError(f"--tail {args.tail} must be 0 or more")
    runs = Environment.read().runs
    found = (
        [find_run(runs, args.name)]
        if args.name
        else [RunDirectory(p.parent) for p in runs.glob("*/run.json")]
    )
    homes = [home for run in found for home in (run, RunDirectory(run.path / "verifiers"))]
    running = [s for s in sessions(parts(args.name)) if s.id == args.session]
    files = [home.logs / f"{args.session}.log" for home in homes]
    # A prewarmed worker has its own log file, which it names in `where`.
    files += [s.part.home.logs / s.entry.where.rpartition("(")[2].rstrip(")") for s in running]
    if file := next((file for file in files if file.is_file() and file.suffix == ".log"), None):
        _print_file(file, args)
        return 0
    if ended := [
        (home, part) for home in homes for part in read_slices(home.logs) if part.session == args.session
    ]:
        _print_part(*ended[-1], args)
        return 0
    if not running:
        stems = [path.stem for home in homes for path in home.logs.glob("*.log")]
        stems += [part.session for home in homes for part in read_slices(home.logs)]
        raise unknown(args.session, [*(s.id for s in sessions(parts(args.name))), *stems])
    return asyncio.run(_print_logs(running[0], args))


def _print_file(file: Path, args: argparse.Namespace) -> None:
    with file.open(errors="replace") as lines:
        _print(_last(lines.read(), args.tail))
        while args.follow and _runs(args):
            time.sleep(FOLLOW_S)
            while more := lines.read(READ):
                _print(more)
        if args.follow:
            _print(lines.read())


def _print_part(home: RunDirectory, part: LogSlice, args: argparse.Namespace) -> None:
    told = f"what its process printed meanwhile, for other sessions, too ({home.logs / part.log})"
    print(f"afield: {part.session} has ended; {told}:", file=sys.stderr)
    _print(_last(slice_text(home.logs, part), args.tail))


async def _print_logs(session: Session, args: argparse.Namespace) -> int:
    runtime = session.part.runtime()
    if not runtime.capabilities.reaches:
        said = f"{session.id} prints nothing that is kept; its collector is pid {session.entry.owner.pid}"
        raise UsageError(said)
    async with runtime:
        told = await runtime.logs(session.attempt)
        _print(_last(told, args.tail))
        while args.follow and _runs(args):
            await asyncio.sleep(FOLLOW_S)
            before, told = told, await runtime.logs(session.attempt)
            _print(_beyond(before, told))
    return 0


def _runs(args: argparse.Namespace) -> bool:
    return any(session.id == args.session for session in sessions(parts(args.name)))


def _beyond(before: str, now: str) -> str:
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
