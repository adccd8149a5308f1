"""Outcomes in a directory of this machine, with hints in SQLite beside them.

Agents write it with `afield.sdk.deliver`; this reads it, and fences attempts by the same commit that
agents race for. A directory that cannot be written is refused when the transport is entered.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from afield.errors import Unavailable, UsageError
from afield.private_files import private_directory
from afield.sdk import file_store
from afield.transports.notifiers.base import LEASE_S, Leased
from afield.transports.transport import StoreTransport

POLL_S = 0.02
BATCH = 1000
BUSY_S = 0.05  # the event loop stands still for no longer
BUSY_FOR_S = 5.0  # other processes may write for this long before hints are said to be out of reach
T = TypeVar("T")
Row = tuple[int, str, int]
TAKE = """UPDATE notices SET leased_until = ?, times = times + 1 WHERE id IN
    (SELECT id FROM notices WHERE exp_id = ? AND leased_until <= ? ORDER BY id LIMIT ?)
    RETURNING id, body, times"""


class FilesStore(file_store.FileStore):
    threads = 8
    page = 0
    foreign = False

    def __init__(self, root: Path) -> None:
        super().__init__(root.resolve())

    @property
    def address(self) -> dict[str, Any]:
        return {"outcome_url": self.root.as_uri()}

    def open(self) -> None:
        try:
            private_directory(self.root, (file_store.HINTS,))
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            raise UsageError(
                f"outcomes cannot be kept in {self.root}: {error}; choose a writable directory"
            ) from error

    def close(self) -> None:
        pass


class _Busy(Unavailable):
    """Another process writes just now."""


class SqliteNotifier:
    """`hints.sqlite` in `root`. Calls are short and made on the event loop; a busy file is asked again."""

    def __init__(
        self, root: Path, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = root.resolve()
        self._lease_s = lease_s
        self._clock = clock
        self._db: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        try:
            self._db = file_store.open_hints(self._root, BUSY_S)
        except sqlite3.Error as error:
            raise UsageError(
                f"hints cannot be kept in {self._root / file_store.HINTS}: {error};"
                " move that file away, nothing is lost with it"
            ) from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def address(self, exp_id: str) -> dict[str, Any]:
        return {}

    async def send(self, exp_id: str, body: bytes) -> None:
        await self._wait(lambda db: file_store.add_hint(db, exp_id, body))

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not (rows := self._free(exp_id)):
            left = end - loop.time()
            if left <= 0:
                break
            await asyncio.sleep(min(POLL_S, left))
        return [Leased(exp_id=exp_id, body=body.encode(), receipt=n, times=times) for n, body, times in rows]

    async def extend(self, leased: Leased, seconds: float) -> None:
        until = self._clock() + seconds
        await self._wait(
            lambda db: db.execute("UPDATE notices SET leased_until = ? WHERE id = ?", (until, leased.receipt))
        )

    async def ack(self, leased: Sequence[Leased]) -> None:
        gone = [(one.receipt,) for one in leased]
        await self._wait(lambda db: db.executemany("DELETE FROM notices WHERE id = ?", gone))

    async def clear(self, exp_id: str, bodies: Sequence[bytes]) -> None:
        gone = [(exp_id, body.decode()) for body in bodies]
        await self._wait(lambda db: db.executemany("DELETE FROM notices WHERE exp_id = ? AND body = ?", gone))

    async def bodies(self, exp_id: str) -> list[bytes]:
        sql = "SELECT body FROM notices WHERE exp_id = ?"
        rows = await self._wait(lambda db: db.execute(sql, (exp_id,)).fetchall())
        return [body.encode() for (body,) in rows]

    async def dead(self, letter: Leased, reason: str) -> None:
        row = letter.exp_id, letter.body.decode("utf-8", "replace"), reason, self._clock()

        def bury(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO dead (exp_id, body, reason, at) VALUES (?, ?, ?, ?)", row)
            db.execute("DELETE FROM notices WHERE id = ?", (letter.receipt,))

        await self._wait(bury)

    async def _wait(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same when others write just now, a little later."""
        loop = asyncio.get_running_loop()
        end = loop.time() + BUSY_FOR_S
        while True:
            try:
                return self._do(work)
            except _Busy:
                if loop.time() >= end:
                    raise
            await asyncio.sleep(POLL_S)

    def _free(self, exp_id: str) -> list[Row]:
        try:
            return self._do(lambda db: self._take(db, exp_id))
        except _Busy:
            return []

    def _take(self, db: sqlite3.Connection, exp_id: str) -> list[Row]:
        now = self._clock()
        free = "SELECT 1 FROM notices WHERE exp_id = ? AND leased_until <= ? LIMIT 1"
        # A reader blocks nobody and waits for nobody; only what is there is written for.
        if db.execute(free, (exp_id, now)).fetchone() is None:
            return []
        return db.execute(TAKE, (now + self._lease_s, exp_id, now, BATCH)).fetchall()

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._db is None:
            raise UsageError("a transport is used before 'async with' or after it")
        try:
            with self._db:
                return work(self._db)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # busy with a snapshot, or with recovery, too
            kind = _Busy if code == sqlite3.SQLITE_BUSY else Unavailable
            raise kind(f"{self._root / file_store.HINTS}: {error}") from error


class FilesTransport(StoreTransport):
    def __init__(self, root: Path) -> None:
        super().__init__(FilesStore(root), SqliteNotifier(root))
