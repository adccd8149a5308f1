"""What a run must remember to go on after a crash: attempts, finished rollouts, what was trained.

One SQLite file. An attempt is noted before it is launched, a finished rollout before its group is
handed out, and a trained one after the checkpoint that contains it; `rewind` brings the notes back to
a checkpoint. Noting the same thing again changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from afield.errors import UsageError
from afield.types import FailureKind, Outcome

SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (rollout_id TEXT, n INTEGER, failed TEXT, PRIMARY KEY (rollout_id, n));
CREATE TABLE IF NOT EXISTS finished (rollout_id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS trained (rollout_id TEXT PRIMARY KEY, step INTEGER NOT NULL);
"""


class Note(Struct, frozen=True):
    """How a rollout ended, and after how many attempts."""

    outcome: Outcome
    attempts: int


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"cannot write the run's journal {self._path}: {error}") from error
        return self

    def __exit__(self, *exc: object) -> None:
        self._db.close()

    def begin(self, rollout_id: str, n: int) -> None:
        self._db.execute("INSERT OR IGNORE INTO attempts VALUES (?,?,NULL)", (rollout_id, n))

    def fail(self, rollout_id: str, n: int, kind: FailureKind) -> None:
        """An attempt failed and another one may follow: what it spent of the retries is kept."""
        sql = "UPDATE attempts SET failed=? WHERE rollout_id=? AND n=?"
        self._db.execute(sql, (str(kind), rollout_id, n))

    def failures(self, rollout_id: str) -> dict[int, FailureKind]:
        """Attempt to kind."""
        sql = "SELECT n, failed FROM attempts WHERE rollout_id=? AND failed IS NOT NULL"
        return {n: FailureKind(kind) for n, kind in self._db.execute(sql, (rollout_id,))}

    def last_attempt(self, rollout_id: str) -> int:
        """0 when none was begun."""
        row = self._db.execute("SELECT max(n) FROM attempts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return row[0] or 0

    def finish(self, rollout_id: str, note: Note) -> None:
        body = msgspec.msgpack.encode(note)
        self._db.execute("INSERT OR IGNORE INTO finished VALUES (?,?)", (rollout_id, body))

    def finished(self, rollout_id: str) -> Note | None:
        row = self._db.execute("SELECT body FROM finished WHERE rollout_id=?", (rollout_id,)).fetchone()
        return msgspec.msgpack.decode(row[0], type=Note) if row else None

    def train(self, step: int, rollout_ids: Iterable[str]) -> None:
        """Note what a step trained. A rollout that another step trained already is an error."""
        rows = [(rollout_id, step) for rollout_id in rollout_ids]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for rollout_id, _ in rows:
                known = self._db.execute(
                    "SELECT step FROM trained WHERE rollout_id=?", (rollout_id,)
                ).fetchone()
                if known and known[0] != step:
                    raise ValueError(f"rollout {rollout_id} was trained in step {known[0]}, not {step}")
            self._db.executemany("INSERT OR IGNORE INTO trained VALUES (?,?)", rows)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def rewind(self, step: int) -> None:
        """Forget training after this step: the weights that had it are gone."""
        self._db.execute("DELETE FROM trained WHERE step > ?", (step,))

    def trained(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT rollout_id, step FROM trained"))
