"""SQLite helper: WAL connections, transactions and translated errors.

1. `connect` opens a private file (mode 0600) in WAL mode; `connect_read_only` opens one to read.
2. `Database` is one connection for all threads of a process, opened at first use. Each statement commits on
   its own; `transaction` groups several.
3. SQLite's errors become `DatabaseBusy`, `DamagedFile`, or the error that the store chose.
4. `retry_while_busy` repeats a transaction on an event loop without blocking it.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

from afield.errors import AfieldError, DamagedFile, Unavailable, UsageError
from afield.utils.private_files import private_database, private_directory

T = TypeVar("T")
Synchronous = Literal["OFF", "NORMAL", "FULL"]
"""Durability of commits in WAL mode: FULL survives a power cut; NORMAL and OFF may lose the last commits in
one, and OFF may also damage the file.
"""
Journal = Literal["WAL", "TRUNCATE"]
"""Journal of a file: WAL, which needs memory that its processes share, or TRUNCATE for files that several
machines use one after the other.
"""


class DatabaseBusy(Unavailable):
    """Another process holds the file's write lock."""


def connect(
    path: Path,
    schema: str = "",
    *,
    busy_timeout_s: float = 30.0,
    synchronous: Synchronous = "NORMAL",
    journal: Journal | None = "WAL",
) -> sqlite3.Connection:
    """Open `path` in autocommit mode and create the tables of `schema`; raises sqlite3.Error.

    With `journal` None, the file keeps its own.
    """
    with suppress(OSError):  # SQLite's own error says why the file cannot be written
        private_database(path)
    connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        if journal is not None:
            connection.execute(f"PRAGMA journal_mode={journal}")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.executescript(schema)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open an existing file without writing to it or changing its mode; raises sqlite3.Error."""
    uri = f"file:{quote(str(path))}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection holds a lock, including extended codes for snapshots and recovery."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Write all statements of the block or none; raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:  # SQLite ends some failed transactions itself
            connection.execute("ROLLBACK")


class Database:
    """SQLite file, used from any thread and opened at first use."""

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        name: str,
        remedy: str,
        busy_timeout_s: float = 30.0,
        synchronous: Synchronous = "NORMAL",
        error: type[AfieldError] = Unavailable,
        private_parent: bool = True,
    ) -> None:
        """`name` and `remedy` appear in error messages: "cannot use NAME PATH: ...; REMEDY".

        `error` is raised when a statement fails for a reason other than a busy or damaged file. Opening the
        file raises UsageError. `private_parent` creates the directory with mode 0700, and refuses one that
        other users can write to.
        """
        self.path = path
        self._schema = schema
        self._name = name
        self._remedy = remedy
        self._busy_timeout_s = busy_timeout_s
        self._synchronous: Synchronous = synchronous
        self._error = error
        self._private_parent = private_parent
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self) -> sqlite3.Connection:
        """Open the file and create its tables. Repeating returns the same connection."""
        with self._lock:
            if self._connection is None:
                with self._translated(UsageError):
                    if self._private_parent:
                        private_directory(self.path.parent, (self.path.name,))
                    self._connection = connect(
                        self.path,
                        self._schema,
                        busy_timeout_s=self._busy_timeout_s,
                        synchronous=self._synchronous,
                    )
            return self._connection

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def execute(self, sql: str, *values: Any) -> int:
        """Run one statement; returns the number of rows that changed."""
        with self._lock, self._translated():
            return self.open().execute(sql, values).rowcount

    def fetch_one(self, sql: str, *values: Any) -> Any:
        """Return the first row, or None."""
        with self._lock, self._translated():
            return self.open().execute(sql, values).fetchone()

    def fetch_all(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, self._translated():
            return self.open().execute(sql, values).fetchall()

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._lock, self._translated():
            self.open().executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Write all statements of the block or none; other threads wait."""
        with self._lock, self._translated(), transaction(self.open()) as connection:
            yield connection

    @contextmanager
    def _translated(self, kind: type[AfieldError] | None = None) -> Generator[None]:
        message = f"cannot use {self._name} {self.path}"
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            if isinstance(error, sqlite3.Error) and is_busy(error):
                raise DatabaseBusy(f"{message}: {error}; {self._remedy}") from error
            raise (kind or self._error)(f"{message}: {error}; {self._remedy}") from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # a wrong statement or value: a defect of afield
                raise
            raise DamagedFile(f"{message}: it is damaged: {error}; restore a copy or remove it") from error


async def retry_while_busy(
    work: Callable[[], T], *, interval_s: float = 0.002, timeout_s: float | None = None
) -> T:
    """Repeat `work` while it raises DatabaseBusy; raises the error after `timeout_s` seconds if given."""
    clock = asyncio.get_running_loop().time
    end = None if timeout_s is None else clock() + timeout_s
    while True:
        try:
            return work()
        except DatabaseBusy:
            if end is not None and clock() >= end:
                raise
        await asyncio.sleep(interval_s * random.uniform(0.5, 1.5))
