"""Session registry of a run: running sessions and their controllers.

1. A session is recorded before its launch and removed when it has ended, so that a killed controller leaves a
row for each session that may still run.
2. A controller is identified by host, process id and start time, which distinguishes reused process ids.
3. Rows of sessions that end with their controller are removed once the controller is dead.

Several processes may share one registry.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from afield.errors import RateLimited, RolloutFailure, UsageError
from afield.interfaces.runtime import Capabilities, Exit, Phase, Runtime, SessionStatus, TaskPreparer
from afield.types import Attempt, Task
from afield.utils.process_tree import start_time
from afield.utils.sqlite import Database

BUSY_TIMEOUT_S = 10.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, runtime TEXT NOT NULL, place TEXT NOT NULL, phase TEXT NOT NULL,
    owner TEXT NOT NULL, since REAL NOT NULL, outlives INTEGER NOT NULL, process TEXT NOT NULL,
    log TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, since REAL NOT NULL) WITHOUT ROWID;
"""
COLUMNS = "session_id, runtime, place, phase, owner, since, outlives, process, log"


class ProcessRef(Struct, frozen=True):
    """Reference to a process on some machine."""

    host: str
    """Host name of the machine."""
    pid: int
    """Process id on that machine."""
    started: str
    """Start time in clock ticks since boot; empty if the system does not provide it."""

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
        """Whether the process runs; None for a process of another machine."""
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


class SessionEntry(Struct, frozen=True, kw_only=True):
    """Row of the registry."""

    session_id: str
    """Id of the attempt's session."""
    runtime: str
    """Name of the runtime, such as `docker`."""
    where: str
    """Location for operators, such as `pid 4711`; empty if unknown."""
    phase: Phase
    """Phase at the last update."""
    owner: ProcessRef
    """Controller that launched or adopted the session."""
    since: float
    """Launch time in seconds since the epoch."""
    outlives: bool
    """Whether the session continues when its controller dies."""
    process: ProcessRef | None = None
    """Local process that runs the session; None if unknown or not on this machine."""
    log: str = ""
    """Name of the log file of that process; empty if it has none."""

    @property
    def orphan(self) -> bool:
        """Whether the owner is known to be dead."""
        return self.owner.alive is False


class SessionRegistry:
    """SQLite table of sessions and controllers, opened at first use.

    Each call is one transaction of some tens of microseconds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = Database(
            path, SCHEMA, name="the session registry", remedy="check the disk", busy_timeout_s=BUSY_TIMEOUT_S
        )

    def close(self) -> None:
        self._db.close()

    def record(
        self, session_id: str, runtime: str, owner: ProcessRef, *, outlives: bool, phase: Phase
    ) -> None:
        """Record a session before its launch; for an adopted session, update owner, phase and runtime."""
        self._db.execute(
            f"INSERT INTO sessions ({COLUMNS}) VALUES (?, ?, '', ?, ?, ?, ?, '', '') ON CONFLICT (session_id)"
            " DO UPDATE SET owner = excluded.owner, phase = excluded.phase, runtime = excluded.runtime",
            *(session_id, runtime, phase, str(owner), time.time(), outlives),
        )

    def record_process(
        self, name: str, runtime: str, owner: ProcessRef, process: ProcessRef, *, where: str, log: str
    ) -> None:
        """Record a process that ends with its owner, such as a gateway, in place of an earlier one."""
        values = (name, runtime, where, Phase.RUNNING, str(owner), time.time(), False, str(process), log)
        self._db.execute(
            f"INSERT OR REPLACE INTO sessions ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *values
        )

    def update(self, status: SessionStatus) -> None:
        """Update phase, location and process; a session that was removed meanwhile stays removed."""
        process = ProcessRef.of(status.pid) if status.pid else None
        self._db.execute(
            "UPDATE sessions SET phase = ?, place = ?, process = ?, log = ? WHERE session_id = ?",
            *(status.phase, status.where, str(process) if process else "", status.log, status.session_id),
        )

    def remove(self, session_id: str) -> None:
        self._db.execute("DELETE FROM sessions WHERE session_id = ?", session_id)

    def add_owner(self, owner: ProcessRef) -> None:
        """Register a controller; removes dead controllers and the sessions that ended with them."""
        self._db.execute("INSERT OR IGNORE INTO owners VALUES (?, ?)", str(owner), time.time())
        for entry in self.entries():
            if entry.orphan and not entry.outlives:
                self.remove(entry.session_id)
        for other in self.owners():
            if other.alive is False:
                self._db.execute("DELETE FROM owners WHERE owner = ?", str(other))

    def remove_owner(self, owner: ProcessRef) -> None:
        """Remove a controller that ends normally, and its sessions."""
        self._db.execute("DELETE FROM sessions WHERE owner = ?", str(owner))
        self._db.execute("DELETE FROM owners WHERE owner = ?", str(owner))

    def owners(self) -> list[ProcessRef]:
        """Controllers that have not ended normally; some may be dead."""
        return [
            ProcessRef.parse(text)
            for (text,) in self._db.fetch_all("SELECT owner FROM owners ORDER BY since")
        ]

    def entries(self) -> list[SessionEntry]:
        rows = self._db.fetch_all(f"SELECT {COLUMNS} FROM sessions ORDER BY since, session_id")
        return [_entry(row) for row in rows]

    def entry(self, session_id: str) -> SessionEntry | None:
        row = self._db.fetch_one(f"SELECT {COLUMNS} FROM sessions WHERE session_id = ?", session_id)
        return _entry(row) if row else None


class TrackedRuntime:
    """Runtime wrapper that records sessions in a registry.

    `guard` opens a separate process that stops sessions which would continue, and cost money, after this
    process is killed; None opens none.
    """

    def __init__(
        self,
        runtime: Runtime,
        registry: SessionRegistry,
        runtime_name: str,
        guard: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        self.runtime = runtime
        self._guard = guard
        self._guarding = contextlib.AsyncExitStack()
        self._registry = registry
        self._name = runtime_name
        self._owner: ProcessRef | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self.runtime.capabilities

    async def __aenter__(self) -> Self:
        self._check_orphans()
        await self.runtime.__aenter__()
        self._owner = ProcessRef.of(os.getpid())
        self._outlives = self.capabilities.outlives
        self._reaches = self.capabilities.reaches
        try:
            self._registry.add_owner(self._owner)
            if self._guard and self._outlives and self.capabilities.lingers:
                await self._guarding.enter_async_context(self._guard())
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    def _check_orphans(self) -> None:
        """Raise UsageError while sessions of a dead controller may run in another runtime.

        This runtime could not stop them.
        """
        left = [e for e in self._registry.entries() if e.orphan and e.outlives and e.runtime != self._name]
        if left:
            ids = ", ".join(entry.session_id for entry in left[:5])
            self._registry.close()
            raise UsageError(
                f"{len(left)} sessions may still run in {left[0].runtime} ({ids}); end them first:"
                f" afield cleanup {self._registry.path.parent}; if {left[0].runtime} no longer exists, remove"
                f" {self._registry.path}"
            )

    async def __aexit__(self, *exc: object) -> None:
        """Close the runtime. If that fails, the rows stay for `afield cleanup`."""
        await self.runtime.__aexit__(*exc)
        if self._owner is not None:
            self._registry.remove_owner(self._owner)
        self._registry.close()
        await self._guarding.aclose()

    async def check(self) -> None:
        await self.runtime.check()

    async def prepare(self, task: Task) -> None:
        if isinstance(self.runtime, TaskPreparer):
            await self.runtime.prepare(task)

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        self._record(attempt, Phase.STARTING)
        try:
            await self.runtime.launch(attempt, payload)
        except (RolloutFailure, RateLimited):
            self._registry.remove(attempt.session_id)
            raise
        # For runtimes that other processes can query, `status` costs a remote call; skip it.
        if self._reaches:
            self._registry.update(SessionStatus(session_id=attempt.session_id, phase=Phase.RUNNING))
            return
        live = await self.runtime.status(attempt)
        # a repeated launch of an ended attempt, which no task waits for any more
        if live.phase is Phase.ENDED:
            self._registry.remove(attempt.session_id)
        else:
            self._registry.update(live)

    async def adopt(self, attempt: Attempt) -> bool | None:
        adopted = await self.runtime.adopt(attempt)
        if adopted is False:
            self._registry.remove(attempt.session_id)
        else:
            self._record(attempt, Phase.RUNNING if adopted else Phase.UNKNOWN)
        return adopted

    async def wait(self, attempt: Attempt) -> Exit:
        ended = await self.runtime.wait(attempt)
        if not ended.lingers:
            self._registry.remove(attempt.session_id)
        return ended

    async def stop(self, attempt: Attempt) -> None:
        await self.runtime.stop(attempt)
        self._registry.remove(attempt.session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        return await self.runtime.status(attempt)

    async def list(self) -> list[SessionStatus]:
        return await self.runtime.list()

    async def logs(self, attempt: Attempt) -> str:
        return await self.runtime.logs(attempt)

    def _record(self, attempt: Attempt, phase: Phase) -> None:
        if self._owner is None:
            raise RuntimeError("call launch inside 'async with runtime'")
        self._registry.record(
            attempt.session_id, self._name, self._owner, outlives=self._outlives, phase=phase
        )


def _entry(row: tuple[Any, ...]) -> SessionEntry:
    session_id, runtime, place, phase, owner, since, outlives, process, log = row
    return SessionEntry(
        session_id=session_id,
        runtime=runtime,
        where=place,
        phase=Phase(phase),
        owner=ProcessRef.parse(owner),
        since=since,
        outlives=bool(outlives),
        process=ProcessRef.parse(process) if process else None,
        log=log,
    )
