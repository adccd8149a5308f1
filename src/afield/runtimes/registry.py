"""The roster of a run: which sessions run now, where, and under which controller; and what keeps it.

A session is noted before it is launched and struck off when it has ended, so that a controller that is killed
leaves a row for each session it may have left running. Owners are processes, told apart from later ones with
the same number by when they started. Rows of sessions that cannot outlive their controller go with it.
Several processes may use one roster.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from afield.errors import RateLimited, RolloutFailure, Unavailable, UsageError
from afield.interfaces.runtime import Capabilities, Exit, Phase, Runtime, SessionStatus
from afield.private_files import private_database, private_directory
from afield.process_tree import start_time
from afield.types import Attempt

WAIT_S = 10.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, runtime TEXT NOT NULL, place TEXT NOT NULL, phase TEXT NOT NULL,
    owner TEXT NOT NULL, since REAL NOT NULL, outlives INTEGER NOT NULL, process TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, since REAL NOT NULL) WITHOUT ROWID;
"""
COLUMNS = "session_id, runtime, place, phase, owner, since, outlives, process"


class ProcessRef(Struct, frozen=True):
    """A process of some machine. `started` is empty where the machine does not tell."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started}"

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(socket.gethostname(), pid, start_time(pid))

    @classmethod
    def parse(cls, text: str) -> Self:
        host, pid, started = text.rsplit(":", 2)
        return cls(host, int(pid), started)

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool | None:
        """None where it is another machine's."""
        if not self.here:
            return None
        if self.started:
            return start_time(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Entry(Struct, frozen=True, kw_only=True):
    """One session. `process` is what runs it on this machine, where that is known."""

    session_id: str
    runtime: str
    where: str
    phase: Phase
    owner: ProcessRef
    since: float
    outlives: bool
    process: ProcessRef | None = None

    @property
    def orphan(self) -> bool:
        return self.owner.alive is False


class SessionRegistry:
    """Opened on first use; every verb is one transaction of some tens of microseconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def note(self, session_id: str, runtime: str, owner: ProcessRef, *, outlives: bool, phase: Phase) -> None:
        """Before a launch, or when a session is taken over: then only phase and owner change."""
        self._do(
            f"INSERT INTO sessions ({COLUMNS}) VALUES (?, ?, '', ?, ?, ?, ?, '') ON CONFLICT (session_id)"
            " DO UPDATE SET owner = excluded.owner, phase = excluded.phase, runtime = excluded.runtime",
            (session_id, runtime, phase, str(owner), time.time(), outlives),
        )

    def place(self, session_id: str, phase: Phase, where: str) -> None:
        """Where it runs; a session that was struck off meanwhile stays so."""
        process = _process_of(where)
        self._do(
            "UPDATE sessions SET phase = ?, place = ?, process = ? WHERE session_id = ?",
            (phase, where, str(process) if process else "", session_id),
        )

    def remove(self, session_id: str) -> None:
        self._do("DELETE FROM sessions WHERE session_id = ?", (session_id,))

    def enter(self, owner: ProcessRef) -> None:
        """A controller begins. What could not outlive a dead one is struck off."""
        self._do("INSERT OR IGNORE INTO owners VALUES (?, ?)", (str(owner), time.time()))
        for entry in self.entries():
            if entry.orphan and not entry.outlives:
                self.remove(entry.session_id)
        for other in self.owners():
            if other.alive is False:
                self._do("DELETE FROM owners WHERE owner = ?", (str(other),))

    def leave(self, owner: ProcessRef) -> None:
        """A controller ends in order, and with it all it had."""
        self._do("DELETE FROM sessions WHERE owner = ?", (str(owner),))
        self._do("DELETE FROM owners WHERE owner = ?", (str(owner),))

    def owners(self) -> list[ProcessRef]:
        """Controllers that have not ended in order; some may be dead."""
        return [ProcessRef.parse(text) for (text,) in self._do("SELECT owner FROM owners ORDER BY since")]

    def entries(self) -> list[Entry]:
        rows = self._do(f"SELECT {COLUMNS} FROM sessions ORDER BY since, session_id")
        return [_entry(row) for row in rows]

    def entry(self, session_id: str) -> Entry | None:
        rows = self._do(f"SELECT {COLUMNS} FROM sessions WHERE session_id = ?", (session_id,))
        return _entry(rows[0]) if rows else None

    def _do(self, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._readable():
            return self._open().execute(statement, values).fetchall()

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            private_directory(self.path.parent, (self.path.name,))
            private_database(self.path)
            db = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
            # Written through to the system with each change, which outlives any process.
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(SCHEMA)
            self._db = db
        return self._db

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"the roster {self.path} cannot be used: {error}") from error


class TrackedRuntime:
    """A runtime whose sessions are in a roster; everything else is the runtime's own.

    Places that would stay, and cost something, after this process was killed have a `guard` beside it.
    """

    def __init__(
        self,
        runtime: Runtime,
        roster: SessionRegistry,
        runtime_name: str,
        guard: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        self.runtime = runtime
        self._guard = guard
        self._guarding = contextlib.AsyncExitStack()
        self._roster = roster
        self._name = runtime_name
        self._us: ProcessRef | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self.runtime.capabilities

    async def __aenter__(self) -> Self:
        self._check_others()
        await self.runtime.__aenter__()
        self._us = ProcessRef.of(os.getpid())
        self._outlives = self.capabilities.outlives
        self._reaches = self.capabilities.reaches
        try:
            self._roster.enter(self._us)
            if self._guard and self._outlives and self.capabilities.lingers:
                await self._guarding.enter_async_context(self._guard())
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    def _check_others(self) -> None:
        """What a dead controller left in another kind of place could not be found from here."""
        left = [e for e in self._roster.entries() if e.orphan and e.outlives and e.runtime != self._name]
        if left:
            ids = ", ".join(entry.session_id for entry in left[:5])
            said = f"{len(left)} sessions may still run in {left[0].runtime} ({ids})"
            remedy = f"end them first: afield cleanup {self._roster.path.parent}"
            gone = f"if that place is gone for good, remove {self._roster.path}"
            self._roster.close()
            raise UsageError(f"{said}; {remedy}; {gone}")

    async def __aexit__(self, *exc: object) -> None:
        """If the runtime cannot be closed, the rows stay, for whoever reaps."""
        await self.runtime.__aexit__(*exc)
        if self._us is not None:
            self._roster.leave(self._us)
        self._roster.close()
        await self._guarding.aclose()

    async def check(self) -> None:
        await self.runtime.check()

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        self._note(attempt, Phase.STARTING)
        try:
            await self.runtime.launch(attempt, payload)
        except (RolloutFailure, RateLimited):
            self._roster.remove(attempt.session_id)
            raise
        # Asking one that others can reach is a call to a service; whoever wants to know asks there.
        if self._reaches:
            self._roster.place(attempt.session_id, Phase.RUNNING, "")
            return
        live = await self.runtime.status(attempt)
        if live.phase is Phase.ENDED:  # a repeated launch; whoever waited for it will not again
            self._roster.remove(attempt.session_id)
        else:
            self._roster.place(attempt.session_id, live.phase, live.where)

    async def adopt(self, attempt: Attempt) -> bool | None:
        adopted = await self.runtime.adopt(attempt)
        if adopted is False:
            self._roster.remove(attempt.session_id)
        else:
            self._note(attempt, Phase.RUNNING if adopted else Phase.UNKNOWN)
        return adopted

    async def wait(self, attempt: Attempt) -> Exit:
        ended = await self.runtime.wait(attempt)
        if not ended.lingers:
            self._roster.remove(attempt.session_id)
        return ended

    async def stop(self, attempt: Attempt) -> None:
        await self.runtime.stop(attempt)
        self._roster.remove(attempt.session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        return await self.runtime.status(attempt)

    async def list(self) -> list[SessionStatus]:
        return await self.runtime.list()

    async def logs(self, attempt: Attempt) -> str:
        return await self.runtime.logs(attempt)

    def _note(self, attempt: Attempt, phase: Phase) -> None:
        if self._us is None:
            raise RuntimeError("launch is called inside 'async with runtime'")
        self._roster.note(attempt.session_id, self._name, self._us, outlives=self._outlives, phase=phase)


def _entry(row: tuple[Any, ...]) -> Entry:
    session_id, runtime, place, phase, owner, since, outlives, process = row
    return Entry(
        session_id=session_id,
        runtime=runtime,
        where=place,
        phase=Phase(phase),
        owner=ProcessRef.parse(owner),
        since=since,
        outlives=bool(outlives),
        process=ProcessRef.parse(process) if process else None,
    )


def _process_of(where: str) -> ProcessRef | None:
    """Places on this machine are told as `pid N`, with more behind it."""
    found = re.match(r"pid (\d+)\b", where)
    return ProcessRef.of(int(found[1])) if found else None
