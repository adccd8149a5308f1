"""Gateway store: sessions, turns, images and keys in one SQLite file.

The event loop hands over the rows of a turn together, and one thread writes everything that waits in one
transaction, then resolves the callers' futures. When `put_` returns, the row survives a kill -9;
`durable=True` adds an fsync per group for power failures. A row with the same key is replaced: an intent
becomes its turn.

An exclusive store belongs to the process that opened it last. An earlier one that still runs, for example
after it was suspended or cut off from the network, can write nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import sqlite3
import threading
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from msgspec import Struct

from afield.errors import Unavailable, UsageError
from afield.gateway.model_request import Scores
from afield.interfaces import Image, SessionSpec
from afield.types import Failure, RefusedCalls, Turn
from afield.utils import sqlite
from afield.utils.private_files import private_directory

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, phase TEXT NOT NULL, created REAL NOT NULL,
  body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turns (session_id TEXT NOT NULL, n INTEGER NOT NULL, status TEXT NOT NULL,
  seq INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (session_id, n));
CREATE TABLE IF NOT EXISTS images (session_id TEXT NOT NULL, digest TEXT NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (session_id, digest));
CREATE TABLE IF NOT EXISTS texts (session_id TEXT NOT NULL, digest TEXT NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (session_id, digest)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ended ON sessions (created) WHERE phase IN ('finalized', 'aborted');
CREATE INDEX IF NOT EXISTS opened ON sessions (id) WHERE phase = 'open';
CREATE TABLE IF NOT EXISTS header_keys (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS undelivered (session_id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
DELETED_AT_ONCE = 64
"""Sessions that one transaction deletes."""
FORMAT = "5"
log = logging.getLogger(__name__)


class SessionTotals(Struct, frozen=True, kw_only=True):
    """Totals of a closed session."""

    calls: int
    """Calls that were started."""
    turns: int
    """Recorded turns."""
    branches: int
    """Leaves of the turn tree."""
    prompt: int
    """Prompt tokens."""
    sampled: int
    """Sampled tokens."""
    dangling: int
    """Calls without an end."""
    versions: tuple[int, int] | None
    """Lowest and highest policy version; None without sampled tokens."""
    last_activity: float
    """Time of the last call, seconds since the epoch."""
    excluded: dict[str, int] = {}
    """Excluded tokens by reason."""
    unsupported: str = ""
    """Reason why the model cannot serve the session's agent; see `SessionState`."""
    refused: tuple[RefusedCalls, ...] = ()
    """Refused model calls, by class of error."""


class Delivery(StrEnum):
    """Delivery state of a session's outcome."""

    NONE = ""
    """No complete outcome yet."""
    DUE = "due"
    """Complete, not delivered."""
    ACCEPTED = "accepted"
    """Delivered; the outcome counts."""
    REFUSED = "refused"
    """Delivered; the attempt was decided otherwise."""


class FailedVerdict(Struct, frozen=True):
    """A failed verdict before the one that counts."""

    digest: str
    """Digest of the verdict, to recognise repetitions."""
    failure: Failure
    """The verifier's failure."""


class SessionRow(Struct, frozen=True, kw_only=True):
    """A stored session without its turns."""

    id: str
    """Session id."""
    spec: SessionSpec
    """Spec with which it was opened."""
    phase: str
    """See `SessionPhase`."""
    created: float
    """Creation time, seconds since the epoch."""
    nonce: str
    """Random; keys of a deleted session with the same id are invalid."""
    opened_by: str = ""
    """Header key that opened it; empty for `POST /sessions`."""
    rewards: tuple[dict[str, Any], ...] = ()
    """Rewards with optional name and turn."""
    metrics: dict[str, float] = {}
    """Agent's metrics."""
    reason: str = ""
    """Reason of an abort."""
    outcome: bytes | None = None
    """Agent's outcome as JSON; None before."""
    verdict: bytes | None = None
    """Verifier's verdict as JSON; None before."""
    failed_verdicts: tuple[FailedVerdict, ...] = ()
    """Failed verdicts before the one that counts."""
    outcome_at: float = 0.0
    """Time of the last outcome or verdict, seconds since the epoch."""
    delivery: Delivery = Delivery.NONE
    """Delivery state of the outcome."""
    excluded: dict[str, str] = {}
    """Excluded turns and their reasons."""
    deleted_responses: tuple[str, ...] = ()
    """Turns whose responses the client deleted."""
    totals: SessionTotals | None = None
    """Totals of a closed session; None while they may change."""


class PublishedPolicy(Struct, frozen=True):
    """Published weights and their path."""

    model: str
    """Model name."""
    version: int
    """Policy version."""
    path: str
    """Path of the weights."""


class TurnRow(Struct, frozen=True):
    """A turn or the intent of a call."""

    n: int
    """Number of the call, from 1."""
    seq: int
    """Commit order."""
    turn: Turn
    """The turn; an intent has the status `dangling`."""
    idempotency_key: str = ""
    """Idempotency key of the request."""
    thread: str = ""
    """Client's name of the conversation thread."""
    scores: Scores | None = None
    """Additional log-probabilities that the client requested; None for none."""
    stored_options: bytes = b""
    """Options to encode the response again (Responses)."""


T = TypeVar("T")
Statement = tuple[str, Sequence[Any]]
Writing = tuple[list[Statement], asyncio.Future[None]]
PUT_TURN = "INSERT OR REPLACE INTO turns VALUES (?,?,?,?,?)"
AT_ONCE = 64
"""Turns of one statement. The thread gives up the interpreter for each statement, not for each row."""
CACHE_KIB = 16 * 1024
"""Page cache of the writing connection. Index entries go to random pages, which are read from it."""


class GatewayStore:
    """SQLite store of a gateway."""

    def __init__(
        self, path: Path, *, durable: bool = False, exclusive: bool = False, shared: bool = False
    ) -> None:
        """`exclusive` ends the writes of every process that opened the store before.

        `shared` is for a file system of several machines.
        """
        self._path = path
        self._durable = durable
        self._journal: sqlite.Journal = "TRUNCATE" if shared else "WAL"
        self._owner = secrets.token_bytes(16) if exclusive else None
        self._waiting: list[Writing] = []  # of this turn of the event loop
        self._queue: queue.SimpleQueue[list[Writing] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._prepare)
        self._reader = self._connect()
        self._thread = threading.Thread(target=self._write_groups, name="afield-store", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True
        self._hand_over()
        self._queue.put(None)
        if self._thread:
            await asyncio.to_thread(self._thread.join)
        self._reader.close()

    @property
    def id(self) -> str:
        """Random id of the store; names the file of the signing secret."""
        return self._reader.execute("SELECT value FROM meta WHERE key='id'").fetchone()[0].decode()

    @property
    def empty(self) -> bool:
        """Whether there is no session."""
        return self._reader.execute("SELECT 1 FROM sessions LIMIT 1").fetchone() is None

    async def put_session(self, row: SessionRow) -> None:
        body = msgspec.msgpack.encode(row)
        sql = "INSERT OR REPLACE INTO sessions VALUES (?,?,?,?)"
        statements: list[Statement] = [(sql, (row.id, row.phase, row.created, body))]
        if row.delivery is Delivery.DUE:
            statements.append(("INSERT OR IGNORE INTO undelivered VALUES (?)", (row.id,)))
        elif row.delivery:
            statements.append(("DELETE FROM undelivered WHERE session_id=?", (row.id,)))
        await self._write(statements)

    def undelivered(self) -> list[str]:
        """Returns the sessions with a due outcome."""
        try:
            return [row[0] for row in self._reader.execute("SELECT session_id FROM undelivered")]
        except sqlite3.Error as error:
            raise Unavailable(f"cannot read {self._path}: {error}") from error

    async def put_policy(self, policy: PublishedPolicy) -> None:
        body = msgspec.msgpack.encode(policy)
        await self._write([("INSERT OR REPLACE INTO meta VALUES ('policy',?)", (body,))])

    @property
    def policy(self) -> PublishedPolicy | None:
        """The weights that were published last."""
        rows = self._read("SELECT value FROM meta WHERE key=?", ("policy",), PublishedPolicy)
        return rows[0] if rows else None

    def put_turn(self, session_id: str, row: TurnRow) -> Awaitable[None]:
        body = msgspec.msgpack.encode(row)
        return self._write([(PUT_TURN, (session_id, row.n, str(row.turn.status), row.seq, body))])

    async def put_images(self, session_id: str, images: Iterable[Image]) -> None:
        sql = "INSERT OR IGNORE INTO images VALUES (?,?,?)"
        await self._write([(sql, (session_id, i.digest, msgspec.msgpack.encode(i))) for i in images])

    def image(self, session_id: str, digest: str) -> Image:
        sql = "SELECT body FROM images WHERE session_id=? AND digest=?"
        return self._read(sql, (session_id, digest), Image)[0]

    async def put_text(self, session_id: str, digest: str, body: bytes) -> None:
        """Stores text that several turns share."""
        await self._write([("INSERT OR IGNORE INTO texts VALUES (?,?,?)", (session_id, digest, body))])

    def text(self, session_id: str, digest: str) -> bytes:
        sql = "SELECT body FROM texts WHERE session_id=? AND digest=?"
        try:
            row = self._reader.execute(sql, (session_id, digest)).fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"cannot read {self._path}: {error}") from error
        if row is None:
            raise Unavailable(f"{self._path} has lost the text {digest} of session {session_id}")
        return row[0]

    async def delete_session(self, session_id: str) -> None:
        await self.delete_sessions([session_id])

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Deletes sessions in small transactions, so that calls are written in between."""
        tables = [
            f"DELETE FROM {table} WHERE session_id=?" for table in ("turns", "images", "texts", "undelivered")
        ]
        tables.append("DELETE FROM sessions WHERE id=?")
        for first in range(0, len(session_ids), DELETED_AT_ONCE):
            batch = session_ids[first : first + DELETED_AT_ONCE]
            await self._write([(sql, (session_id,)) for sql in tables for session_id in batch])

    def ended_before(self, created: float, limit: int) -> list[str]:
        """Returns closed sessions without a due outcome, oldest first."""
        sql = (
            "SELECT id FROM sessions WHERE phase IN ('finalized', 'aborted') AND created < ?"
            " AND id NOT IN (SELECT session_id FROM undelivered) ORDER BY created LIMIT ?"
        )
        try:
            return [row[0] for row in self._reader.execute(sql, (created, limit))]
        except sqlite3.Error as error:
            raise Unavailable(f"cannot read {self._path}: {error}") from error

    def session(self, session_id: str) -> SessionRow | None:
        rows = self._read("SELECT body FROM sessions WHERE id=?", (session_id,), SessionRow)
        return rows[0] if rows else None

    def turns(self, session_id: str) -> list[TurnRow]:
        """Returns turns in commit order; unfinished calls come last."""
        sql = "SELECT body FROM turns WHERE session_id=? ORDER BY seq, n"
        return self._read(sql, (session_id,), TurnRow)

    def session_ids(self, phase: str | None, limit: int, after: str, key_id: str = "") -> list[str]:
        """Returns session ids after an id in order; `key_id` selects those of a header key."""
        first, end = _named_by(key_id) if key_id else ("", "\x7f")
        sql = (
            "SELECT id FROM sessions WHERE id > ? AND id < ? AND (? IS NULL OR phase = ?) ORDER BY id LIMIT ?"
        )
        return [row[0] for row in self._reader.execute(sql, (max(after, first), end, phase, phase, limit))]

    # --- header keys ---

    async def put_header_key(self, key_id: str, row: Struct) -> None:
        body = msgspec.msgpack.encode(row)
        await self._write([("INSERT OR REPLACE INTO header_keys VALUES (?,?)", (key_id, body))])

    async def delete_header_key(self, key_id: str) -> None:
        await self._write([("DELETE FROM header_keys WHERE id=?", (key_id,))])

    def header_key(self, key_id: str, into: type[T]) -> T | None:
        rows = self._read("SELECT body FROM header_keys WHERE id=?", (key_id,), into)
        return rows[0] if rows else None

    def header_keys(self, into: type[T]) -> list[T]:
        return self._read("SELECT body FROM header_keys ORDER BY id", (), into)

    def open_ids(self, key_id: str) -> list[str]:
        """Returns the open sessions of a header key."""
        sql = "SELECT id FROM sessions WHERE phase = 'open' AND id > ? AND id < ?"
        return [row[0] for row in self._reader.execute(sql, _named_by(key_id))]

    def count_open(self, key_id: str) -> int:
        sql = "SELECT COUNT(*) FROM sessions WHERE phase = 'open' AND id > ? AND id < ?"
        return self._reader.execute(sql, _named_by(key_id)).fetchone()[0]

    def _read(self, sql: str, values: Sequence[str], into: type[T]) -> list[T]:
        try:
            rows = self._reader.execute(sql, values).fetchall()
            return [msgspec.msgpack.decode(row[0], type=into) for row in rows]
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise Unavailable(f"cannot read {'/'.join(values)} in {self._path}: {error}") from error

    # --- writer thread ---

    def _write(self, statements: list[Statement]) -> asyncio.Future[None]:
        """Queues statements; the future resolves when they are written. Cancelling it does not cancel the
        write.
        """
        if self._closed:
            raise Unavailable(f"{self._path} is closed: the gateway is stopping")
        finished = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._hand_over)
        self._waiting.append((statements, finished))
        return finished

    def _hand_over(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._queue.put(waiting)

    def _write_groups(self) -> None:
        connection = self._connect()
        connection.execute(f"PRAGMA cache_size={-CACHE_KIB}")
        connection.execute("PRAGMA temp_store=MEMORY")  # what a statement needs to be undone
        while (group := self._queue.get()) is not None:
            while not self._queue.empty() and len(group) < 256:
                more = self._queue.get()
                if more is None:
                    self._queue.put(None)
                    break
                group += more
            error = self._commit(connection, [row for statements, _ in group for row in statements])
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_complete_futures, [finished for _, finished in group], error)
        connection.close()

    def _commit(self, connection: sqlite3.Connection, statements: list[Statement]) -> Unavailable | None:
        try:
            with sqlite.transaction(connection):
                self._check_owner(connection)
                for sql, run in groupby(statements, key=itemgetter(0)):
                    rows = [values for _, values in run]
                    if sql == PUT_TURN:
                        _insert(connection, sql, rows)
                    else:
                        connection.executemany(sql, rows)
        except sqlite3.Error as error:
            return Unavailable(f"cannot write {self._path}: {error}")
        except Unavailable as error:
            return error
        return None

    def _check_owner(self, connection: sqlite3.Connection) -> None:
        if self._owner is None:
            return
        row = connection.execute("SELECT value FROM meta WHERE key='owner'").fetchone()
        if row is None or row[0] != self._owner:
            raise Unavailable(f"another gateway process has taken over {self._path}; this one must end")

    def _prepare(self) -> None:
        try:
            private_directory(self._path.parent, (self._path.name,))
            connection = self._connect(SCHEMA)
            for key, value in (("id", secrets.token_hex(16).encode()), ("format", FORMAT.encode())):
                connection.execute("INSERT OR IGNORE INTO meta VALUES (?,?)", (key, value))
            if self._owner is not None:
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('owner',?)", (self._owner,))
            connection.commit()
            stored_format = (
                connection.execute("SELECT value FROM meta WHERE key='format'").fetchone()[0].decode()
            )
            connection.close()
        except (sqlite3.Error, OSError) as error:
            raise UsageError(f"cannot use {self._path} as the gateway's store: {error}") from error
        if stored_format != FORMAT:
            raise UsageError(
                f"{self._path} has format {stored_format}, this afield writes {FORMAT}: use a new directory"
            )

    def _connect(self, schema: str = "") -> sqlite3.Connection:
        synchronous = "FULL" if self._durable else "NORMAL"
        return sqlite.connect(self._path, schema, synchronous=synchronous, journal=self._journal)


def _insert(connection: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
    """Inserts rows, `AT_ONCE` with each statement."""
    _, _, places = sql.rpartition(" ")
    for first in range(0, len(rows), AT_ONCE):
        some = rows[first : first + AT_ONCE]
        connection.execute(sql + f",{places}" * (len(some) - 1), list(chain.from_iterable(some)))


def _named_by(key_id: str) -> tuple[str, str]:
    """Returns the id range of a header key's sessions: `KEY_ID.VALUE`."""
    return f"{key_id}.", f"{key_id}/"  # "/" comes after "."


def remove_ended(path: Path) -> int:
    """Deletes all closed sessions of a store that is not open, and shrinks the file."""
    try:
        connection = sqlite.connect(path, busy_timeout_s=5, synchronous="FULL", journal=None)
        try:
            over = "SELECT id FROM sessions WHERE phase IN ('finalized', 'aborted')"
            over += " AND id NOT IN (SELECT session_id FROM undelivered)"
            with sqlite.transaction(connection):
                for table in ("turns", "images", "texts"):
                    connection.execute(f"DELETE FROM {table} WHERE session_id IN ({over})")
                removed = connection.execute(f"DELETE FROM sessions WHERE id IN ({over})").rowcount
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise Unavailable(f"cannot clean up {path}: {error}; is its gateway still running?") from error
    return removed


async def shield_and_wait(work: Awaitable[T]) -> T:
    """Awaits work that must complete: a cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


def _complete_futures(waiting: list[asyncio.Future[None]], error: Exception | None) -> None:
    for finished in waiting:
        if finished.done():  # the waiting caller was cancelled
            continue
        if error:
            finished.set_exception(error)
        else:
            finished.set_result(None)
