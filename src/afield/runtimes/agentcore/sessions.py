"""Which sessions we have on AgentCore: the service has no call that lists them.

A session is noted before it is asked for, so that whatever a killed process began is known to the next one,
and to a reaper. It counts as alive until a stop was answered, or its lifetime is over. A SQLite file that
several processes may use; each call is one short transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, convert

from afield.errors import UsageError
from afield.private_files import private_database, private_directory

T = TypeVar("T")
BUSY_S = 10.0
# Sessions that were stopped are remembered for this long, for their logs.
KEPT_S = 86_400.0
CLEANED_EVERY = 1000
# A lifetime is counted over there, from a little later than here.
SLACK_S = 60.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, name TEXT NOT NULL, arn TEXT NOT NULL, qualifier TEXT NOT NULL,
  run TEXT NOT NULL, phase TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS alive ON sessions (until) WHERE phase != 'stopped';
"""
FIELDS = "session_id, name, arn, qualifier, run, phase, since, until"


class Noted(StrEnum):
    ASKED = "asked"  # the call was about to be made; whether it arrived is not known
    TAKEN = "taken"
    STOPPED = "stopped"


class Entry(Struct, frozen=True, kw_only=True):
    """`name` is the service's own id of the session; `until` when its lifetime is over."""

    session_id: str
    name: str
    arn: str
    qualifier: str
    run: str
    phase: Noted = Noted.ASKED
    since: float
    until: float

    @property
    def alive(self) -> bool:
        return self.phase is not Noted.STOPPED and time.time() < self.until


class SessionLedger:
    """Opens its file at the first call; `close` when done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._notes = 0

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def note(self, entry: Entry, most: int) -> Entry | None:
        """Before a session is asked for. Its entry, which may be an older one; None when `most` are alive."""

        def work(db: sqlite3.Connection) -> Entry | None:
            if known := _get(db, entry.session_id):
                return known
            if _alive(db) >= most:
                return None
            if self._notes % CLEANED_EVERY == 0:
                db.execute("DELETE FROM sessions WHERE until < ?", (time.time() - KEPT_S,))
            self._notes += 1
            values = [getattr(entry, name) for name in entry.__struct_fields__]
            db.execute(f"INSERT INTO sessions ({FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            return entry

        return self._write(work)

    def mark(self, session_id: str, phase: Noted) -> None:
        """What is not known is left so. A session that was stopped stays so."""
        change = "UPDATE sessions SET phase = ? WHERE session_id = ? AND phase != 'stopped'"
        self._write(lambda db: db.execute(change, (phase, session_id)))

    def forget(self, session_id: str) -> None:
        """It never began."""
        self._write(lambda db: db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,)))

    def get(self, session_id: str) -> Entry | None:
        return self._write(lambda db: _get(db, session_id))

    def alive(self, run: str) -> list[Entry]:
        def work(db: sqlite3.Connection) -> list[Entry]:
            query = f"SELECT {FIELDS} FROM sessions WHERE run = ? AND phase != 'stopped' AND until > ?"
            return [_entry(row) for row in db.execute(f"{query} ORDER BY since", (run, time.time()))]

        return self._write(work)

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            db = self._db or self._open()
            db.execute("BEGIN IMMEDIATE")
            try:
                result = work(db)
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            said = f"the ledger of AgentCore sessions cannot be kept in {self._path}: {error}"
            raise UsageError(f"{said}; name a file on a local disk that can be written") from error
        return result

    def _open(self) -> sqlite3.Connection:
        try:
            private_directory(self._path.parent, (self._path.name,))
            private_database(self._path)
        except OSError as error:
            raise UsageError(f"there is no folder for {self._path}: {error}") from error
        db = sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            # What a killed process wrote is there; only a machine that loses its power forgets.
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(SCHEMA)
        except sqlite3.DatabaseError:
            db.close()
            raise
        self._db = db
        return db


def _get(db: sqlite3.Connection, session_id: str) -> Entry | None:
    row = db.execute(f"SELECT {FIELDS} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    return _entry(row) if row else None


def _alive(db: sqlite3.Connection) -> int:
    query = "SELECT count(*) FROM sessions WHERE phase != 'stopped' AND until > ?"
    return db.execute(query, (time.time(),)).fetchone()[0]


def _entry(row: Any) -> Entry:
    return convert(dict(zip(Entry.__struct_fields__, row, strict=True)), Entry)
