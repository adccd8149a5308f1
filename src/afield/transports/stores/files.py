"""File outcome store: a directory, with hints in SQLite.

Agents write to it with `afield.sdk.deliver`; collectors read it and fence attempts with the same commits.
Opening it raises UsageError if the directory is not writable.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from afield.errors import DamagedFile, Unavailable, UsageError
from afield.sdk.stores import HINTS, HINTS_SCHEMA, FileStore
from afield.transports.notifiers.base import LEASE_S, Leased
from afield.transports.stores.base import TransportSpec
from afield.transports.transport import StoreTransport
from afield.utils.private_files import private_directory
from afield.utils.sqlite import Database, DatabaseBusy, retry_while_busy

FORMS: tuple[str, ...] = ("files", "files:///DIR")
OPTIONS: tuple[str, ...] = ()
POLL_S = 0.02
BATCH = 1000
BUSY_TIMEOUT_S = 0.05  # longest wait on the event loop
BUSY_TIMEOUT_TOTAL_S = 5.0  # with retries, before Unavailable is raised
T = TypeVar("T")
Row = tuple[int, str, int]
TAKE = """UPDATE notices SET leased_until = ?, times = times + 1 WHERE id IN
    (SELECT id FROM notices WHERE exp_id = ? AND leased_until <= ? ORDER BY id LIMIT ?)
    RETURNING id, body, times"""


class FilesStore(FileStore):
    """Outcome store in a local directory."""

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
            private_directory(self.root, (HINTS,))
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            raise UsageError(
                f"cannot write outcomes to {self.root}: {error}; choose a writable directory"
            ) from error

    def close(self) -> None:
        pass


class SqliteNotifier:
    """Hints in `hints.sqlite` below `root`.

    Calls are short and run on the event loop; those on a busy file are retried.
    """

    def __init__(
        self, root: Path, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._entered = False
        self._db = Database(
            root.resolve() / HINTS,
            HINTS_SCHEMA,
            name="hints",
            remedy="move that file away, no outcome is lost with it",
            busy_timeout_s=BUSY_TIMEOUT_S,
            private_parent=False,
        )

    async def __aenter__(self) -> Self:
        self._db.open()
        self._entered = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._entered = False
        self._db.close()

    def address(self, exp_id: str) -> dict[str, Any]:
        return {}

    async def send(self, exp_id: str, body: bytes) -> None:
        sql = "INSERT INTO notices (exp_id, body) VALUES (?, ?)"
        await self._retried(lambda db: db.execute(sql, exp_id, body.decode()))

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not (rows := self._take(exp_id)):
            left = end - loop.time()
            if left <= 0:
                break
            await asyncio.sleep(min(POLL_S, left))
        return [Leased(exp_id=exp_id, body=body.encode(), receipt=n, times=times) for n, body, times in rows]

    async def extend(self, leased: Leased, seconds: float) -> None:
        until = self._clock() + seconds
        sql = "UPDATE notices SET leased_until = ? WHERE id = ?"
        await self._retried(lambda db: db.execute(sql, until, leased.receipt))

    async def ack(self, leased: Sequence[Leased]) -> None:
        rows = [(message.receipt,) for message in leased]
        await self._retried(lambda db: _delete(db, "DELETE FROM notices WHERE id = ?", rows))

    async def clear(self, exp_id: str, bodies: Sequence[bytes]) -> None:
        rows = [(exp_id, body.decode()) for body in bodies]
        await self._retried(lambda db: _delete(db, "DELETE FROM notices WHERE exp_id = ? AND body = ?", rows))

    async def bodies(self, exp_id: str) -> list[bytes]:
        sql = "SELECT body FROM notices WHERE exp_id = ?"
        rows = await self._retried(lambda db: db.fetch_all(sql, exp_id))
        return [body.encode() for (body,) in rows]

    async def dead(self, letter: Leased, reason: str) -> None:
        row = letter.exp_id, letter.body.decode("utf-8", "replace"), reason, self._clock()

        def move(db: Database) -> None:
            with db.transaction() as connection:
                connection.execute("INSERT INTO dead (exp_id, body, reason, at) VALUES (?, ?, ?, ?)", row)
                connection.execute("DELETE FROM notices WHERE id = ?", (letter.receipt,))

        await self._retried(move)

    async def _retried(self, work: Callable[[Database], T]) -> T:
        return await retry_while_busy(
            lambda: self._use(work), interval_s=POLL_S, timeout_s=BUSY_TIMEOUT_TOTAL_S
        )

    def _take(self, exp_id: str) -> list[Row]:
        now = self._clock()
        free = "SELECT 1 FROM notices WHERE exp_id = ? AND leased_until <= ? LIMIT 1"

        def take(db: Database) -> list[Row]:
            # Reads first, without a lock, so that polling an empty queue does not write.
            if db.fetch_one(free, exp_id, now) is None:
                return []
            return db.fetch_all(TAKE, now + self._lease_s, exp_id, now, BATCH)

        try:
            return self._use(take)
        except DatabaseBusy:
            return []

    def _use(self, work: Callable[[Database], T]) -> T:
        if not self._entered:
            raise UsageError("the transport is not open; use it inside 'async with'")
        try:
            return work(self._db)
        except DamagedFile as error:  # the transport works without hints
            raise Unavailable(str(error)) from error


def _delete(db: Database, sql: str, rows: list[tuple[Any, ...]]) -> None:
    with db.transaction() as connection:
        connection.executemany(sql, rows)


class FilesTransport(StoreTransport):
    """Transport with outcomes in a directory and hints in SQLite."""

    def __init__(self, root: Path) -> None:
        super().__init__(FilesStore(root), SqliteNotifier(root))


def from_spec(spec: TransportSpec, root: Path) -> tuple[FilesStore, SqliteNotifier]:
    if spec.is_url and (spec.host or not spec.path.startswith("/")):
        raise UsageError(f"transport {spec.text!r} must be a directory: files:///absolute/path")
    folder = Path(spec.path) if spec.is_url else root
    return FilesStore(folder), SqliteNotifier(folder)
