"""SharedLimiter: one rate limit for several processes, in SQLite.

1. Each process has its own two queues; their heads reserve the next call in the file and sleep until then.
2. A launch slot is a lease that its process renews. Slots of a killed process, or of one whose event loop
   was blocked, become free after `lease_s`.
3. Transactions run on the event loop and never wait for a lock: they are retried after a short sleep.
4. Times are those of the wall clock, which the processes share.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from afield.errors import UsageError
from afield.ratelimit.controller import TICK_S, RateController, RateLimits, Rates
from afield.sqlite import Database, DatabaseBusy, retry_while_busy

LEASE_S = 5.0
RENEWALS = 5
"""Renewals of a held launch slot per lease."""
LOOK_S = 0.1
"""Seconds between two tries for a launch slot."""
BUSY_S = 0.002
"""Seconds between two tries of a transaction while another process holds the lock."""
LATE_S = 0.005
"""Delay of a call, in seconds, above which it is written to the file."""
T = TypeVar("T")
CallKind = tuple[str, float | None]
"""Kind of call (launch or stop) and its configured rate."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS controllers (kind TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS launch_slots (id INTEGER PRIMARY KEY, until REAL NOT NULL);
"""


class SharedLimiter:
    """Limiter for the processes of one machine that share the file at `path`. Call `close` when done.

    A launch slot that is not renewed for `lease_s` seconds becomes free.
    """

    def __init__(
        self,
        limits: RateLimits,
        path: Path,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._lease_s = lease_s
        self._max_launching = limits.max_launching
        rates = Rates(limits)
        self._launching = ("launch", rates.launch)
        self._stopping = ("stop", rates.stop) if rates.apart else self._launching
        self._clock = clock
        self._db = Database(
            path,
            SCHEMA,
            name="the limiter's file",
            remedy="name a file on a local disk that can be written",
            busy_timeout_s=0,
            synchronous="OFF",
            error=UsageError,
            private_parent=False,
        )
        self._held: set[int] = set()
        # Changes that wait for another process's transaction to end.
        self._returned: list[int] = []
        self._refusals: list[tuple[CallKind, float, float | None]] = []
        self._renewal: asyncio.Task[None] | None = None
        self._launches, self._calls = asyncio.Lock(), asyncio.Lock()

    def check(self) -> None:
        """Raise UsageError if the file cannot be written."""
        with suppress(DatabaseBusy):
            self._write(lambda db: None)

    def close(self) -> None:
        """Close the file. Held launch slots become free when their leases end. Repeating is harmless."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        self._db.close()

    @asynccontextmanager
    async def launch_slot(self) -> AsyncIterator[None]:
        async with self._launches:
            slot = await self._slot()
            try:
                await self._wait_for_turn(self._launching)
            except BaseException:
                self._leave(slot)
                raise
        try:
            yield
        finally:
            self._leave(slot)

    @asynccontextmanager
    async def call_slot(self) -> AsyncIterator[None]:
        async with self._calls:
            await self._wait_for_turn(self._stopping)
        yield

    def slow_down(self, retry_after_s: float | None, *, stop: bool = False) -> None:
        self._refusals.append((self._stopping if stop else self._launching, self._clock(), retry_after_s))
        self._write_soon()

    # --- waiting ---------------------------------------------------------------------------------

    async def _wait_for_turn(self, kind: CallKind) -> None:
        due = await self._write_when_free(lambda db: self._reserve(db, kind))
        while (rest := due - self._clock()) > TICK_S:
            await asyncio.sleep(rest)
            if (await self._write_when_free(lambda db: self._controller(db, kind))).paused_until > due:
                due = await self._write_when_free(lambda db: self._reserve(db, kind))
        if self._clock() - due > LATE_S:
            await self._write_when_free(lambda db, due=due: self._late(db, kind, due))

    async def _slot(self) -> int | None:
        if self._max_launching is None:
            return None
        while (slot := await self._write_when_free(self._enter)) is None:
            await asyncio.sleep(LOOK_S * random.uniform(0.5, 1.5))
        self._held.add(slot)
        self._update_renewal()
        return slot

    def _leave(self, slot: int | None) -> None:
        if slot is not None:
            self._held.discard(slot)
            self._returned.append(slot)
            self._write_soon()

    def _write_soon(self) -> None:
        """Write pending changes now, or in the background if another process holds the lock."""
        with suppress(DatabaseBusy):
            self._write(lambda db: None)
        self._update_renewal()

    def _update_renewal(self) -> None:
        idle = not (self._held or self._returned or self._refusals)
        if self._renewal is not None and (idle or self._renewal.done()):
            self._renewal.cancel()
            self._renewal = None
        if self._renewal is None and not idle:
            self._renewal = asyncio.get_running_loop().create_task(self._renew_until_idle())

    async def _renew_until_idle(self) -> None:
        while self._held or self._returned or self._refusals:
            await asyncio.sleep(BUSY_S if self._returned or self._refusals else self._lease_s / RENEWALS)
            await self._write_when_free(self._renew)

    # --- within a transaction ----------------------------------------------------------------------

    def _reserve(self, db: sqlite3.Connection, kind: CallKind) -> float:
        controller = self._controller(db, kind)
        due = controller.reserve(self._clock(), kind[1])
        self._save(db, kind, controller)
        return due

    def _late(self, db: sqlite3.Connection, kind: CallKind, due: float) -> None:
        controller = self._controller(db, kind)
        controller.late(due, self._clock(), kind[1])
        self._save(db, kind, controller)

    def _enter(self, db: sqlite3.Connection) -> int | None:
        now = self._clock()
        # Leases too far in the future come from a clock that was set back.
        db.execute("DELETE FROM launch_slots WHERE until < ? OR until > ?", (now, now + 2 * self._lease_s))
        (taken,) = db.execute("SELECT count(*) FROM launch_slots").fetchone()
        if self._max_launching is not None and taken >= self._max_launching:
            return None
        # Random ids, so that a lost slot is never confused with a new one.
        slot = random.getrandbits(62)
        db.execute("INSERT INTO launch_slots VALUES (?, ?)", (slot, now + self._lease_s))
        return slot

    def _renew(self, db: sqlite3.Connection) -> None:
        until = self._clock() + self._lease_s
        db.executemany("INSERT OR REPLACE INTO launch_slots VALUES (?, ?)", [(p, until) for p in self._held])

    def _controller(self, db: sqlite3.Connection, kind: CallKind) -> RateController:
        row = db.execute("SELECT state FROM controllers WHERE kind = ?", (kind[0],)).fetchone()
        return msgspec.msgpack.decode(row[0], type=RateController) if row else RateController()

    def _save(self, db: sqlite3.Connection, kind: CallKind, controller: RateController) -> None:
        db.execute(
            "INSERT OR REPLACE INTO controllers VALUES (?, ?)", (kind[0], msgspec.msgpack.encode(controller))
        )

    # --- the file ----------------------------------------------------------------------------------

    async def _write_when_free(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await retry_while_busy(lambda: self._write(work), interval_s=BUSY_S)

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` and all pending changes in one transaction; raises DatabaseBusy."""
        with self._db.transaction() as db:
            for kind, at, retry_after_s in self._refusals:
                controller = self._controller(db, kind)
                controller.cut(at, kind[1], retry_after_s)
                self._save(db, kind, controller)
            db.executemany("DELETE FROM launch_slots WHERE id = ?", [(slot,) for slot in self._returned])
            result = work(db)
        self._refusals.clear()
        self._returned.clear()
        return result
