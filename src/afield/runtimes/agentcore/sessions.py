"""AgentCore session table in SQLite, since the service does not list sessions.

A session is recorded before it is invoked, so that the next process, or `afield cleanup`, knows the sessions
of a killed process. It counts as alive until a stop was answered or its lifetime is over. Several processes
may use the file; each call is one short transaction.
"""

from __future__ import annotations

import sqlite3
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct, convert

from afield.errors import UsageError
from afield.utils.sqlite import Database

BUSY_TIMEOUT_S = 10.0
# Retention of ended sessions in seconds; their logs stay available.
KEPT_S = 86_400.0
CLEANED_EVERY = 1000
# Tolerance in seconds: the service counts the lifetime from a slightly later time.
SLACK_S = 60.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, name TEXT NOT NULL, arn TEXT NOT NULL, qualifier TEXT NOT NULL,
  run TEXT NOT NULL, phase TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS alive ON sessions (until) WHERE phase != 'stopped';
"""
FIELDS = "session_id, name, arn, qualifier, run, phase, since, until"


class InvokeState(StrEnum):
    """Progress of a session."""

    ASKED = "asked"
    """The invoke was sent or is about to be; it is unknown whether it arrived."""
    TAKEN = "taken"
    """The service has answered the invoke."""
    STOPPED = "stopped"
    """The service has answered a stop."""


class AgentCoreSession(Struct, frozen=True, kw_only=True):
    """Row of the table."""

    session_id: str
    """Id of the attempt's session."""
    name: str
    """Session id of the service, derived from `session_id`."""
    arn: str
    """ARN of the agent runtime."""
    qualifier: str
    """Name of the agent runtime's endpoint."""
    run: str
    """Name of the run."""
    phase: InvokeState = InvokeState.ASKED
    """Progress of the session."""
    since: float
    """Time of the invoke, in seconds since the epoch."""
    until: float
    """Latest end of its lifetime, in seconds since the epoch."""

    @property
    def alive(self) -> bool:
        return self.phase is not InvokeState.STOPPED and time.time() < self.until


class SessionTable:
    """Sessions in one file, opened at first use; call `close` when done."""

    def __init__(self, path: Path) -> None:
        self._db = Database(
            path,
            SCHEMA,
            name="the table of AgentCore sessions",
            remedy="name a file on a local disk that can be written",
            busy_timeout_s=BUSY_TIMEOUT_S,
            error=UsageError,
        )
        self._inserts = 0

    def close(self) -> None:
        self._db.close()

    def note(self, entry: AgentCoreSession, most: int) -> AgentCoreSession | None:
        """Record a session before it is invoked.

        Returns the existing row if there is one, and None if `most` sessions are alive.
        """

        with self._db.transaction() as db:
            if row := _get(db, entry.session_id):
                return row
            if _alive(db) >= most:
                return None
            if self._inserts % CLEANED_EVERY == 0:
                db.execute("DELETE FROM sessions WHERE until < ?", (time.time() - KEPT_S,))
            self._inserts += 1
            values = [getattr(entry, name) for name in entry.__struct_fields__]
            db.execute(f"INSERT INTO sessions ({FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            return entry

    def mark(self, session_id: str, phase: InvokeState) -> None:
        """Change the state; ignores unknown and stopped sessions."""
        change = "UPDATE sessions SET phase = ? WHERE session_id = ? AND phase != 'stopped'"
        self._db.execute(change, phase, session_id)

    def forget(self, session_id: str) -> None:
        """Remove a session that never started."""
        self._db.execute("DELETE FROM sessions WHERE session_id = ?", session_id)

    def get(self, session_id: str) -> AgentCoreSession | None:
        row = self._db.fetch_one(f"SELECT {FIELDS} FROM sessions WHERE session_id = ?", session_id)
        return _entry(row) if row else None

    def alive(self, run: str) -> list[AgentCoreSession]:
        """Sessions of a run that are alive, oldest first."""
        query = f"SELECT {FIELDS} FROM sessions WHERE run = ? AND phase != 'stopped' AND until > ?"
        return [_entry(row) for row in self._db.fetch_all(f"{query} ORDER BY since", run, time.time())]


def _get(db: sqlite3.Connection, session_id: str) -> AgentCoreSession | None:
    row = db.execute(f"SELECT {FIELDS} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return _entry(row) if row else None


def _alive(db: sqlite3.Connection) -> int:
    query = "SELECT count(*) FROM sessions WHERE phase != 'stopped' AND until > ?"
    return db.execute(query, (time.time(),)).fetchone()[0]


def _entry(row: Any) -> AgentCoreSession:
    return convert(dict(zip(AgentCoreSession.__struct_fields__, row, strict=True)), AgentCoreSession)
