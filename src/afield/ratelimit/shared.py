"""SharedLimiter: one rate limit for several processes, in SQLite.

1. Each process has its own two queues; their heads reserve the next call in the file and sleep until then.
2. A launch slot is a lease that its process renews. Slots of a killed process, or of one whose event loop
   was blocked, become free after `LEASE_S`.
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
"""Seconds after which a launch slot that is not renewed becomes free."""
RENEW_S = 1.0
"""Seconds between two renewals of held launch slots."""
LOOK_S = 0.1
"""Seconds between two tries for a launch slot."""
BUSY_S = 0.002
"""Seconds between two tries of a transaction while another process holds the lock."""
LATE_S = 0.005
"""Delay of a call, in seconds, above which it is written to the file."""
T = TypeVar("T")
Beat = tuple[str, float | None]
"""Kind of call (launch or stop) and its configured rate."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS rhythms (kind TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS places (id INTEGER PRIMARY KEY, until REAL NOT NULL);
"""


class SharedLimiter:
    """Limiter for the processes of one machine that share the file at `path`. Call `close` when done."""

    def __init__(self, pace: RateLimits, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.pace = pace
        self._places = pace.max_launching
        beats = Rates(pace)
        self._launching = ("launch", beats.launch)
        self._stopping = ("stop", beats.stop) if beats.apart else self._launching
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
        self._refusals: list[tuple[Beat, float, float | None]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._launches, self._calls = asyncio.Lock(), asyncio.Lock()

    def check(self) -> None:
        """Raise UsageError if the file cannot be written."""
        with suppress(DatabaseBusy):
            self._write(lambda db: None)

    def close(self) -> None:
        """Close the file. Held launch slots become free when their leases end. Repeating is harmless."""
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        self._db.close()

    @asynccontextmanager
    async def launch_slot(self) -> AsyncIterator[None]:
        async with self._launches:
            place = await self._place()
            try:
                await self._turn(self._launching)
            except BaseException:
                self._leave(place)
                raise
        try:
            yield
        finally:
            self._leave(place)

    @asynccontextmanager
    async def call_slot(self) -> AsyncIterator[None]:
        async with self._calls:
            await self._turn(self._stopping)
        yield

    def slow_down(self, retry_after_s: float | None, *, stop: bool = False) -> None:
        self._refusals.append((self._stopping if stop else self._launching, self._clock(), retry_after_s))
        self._write_soon()

    # --- waiting ---------------------------------------------------------------------------------

    async def _turn(self, beat: Beat) -> None:
        due = await self._written(lambda db: self._reserve(db, beat))
        while (rest := due - self._clock()) > TICK_S:
            await asyncio.sleep(rest)
            if (await self._written(lambda db: self._rhythm(db, beat))).paused_until > due:
                due = await self._written(lambda db: self._reserve(db, beat))
        if self._clock() - due > LATE_S:
            await self._written(lambda db, due=due: self._late(db, beat, due))

    async def _place(self) -> int | None:
        if self._places is None:
            return None
        while (place := await self._written(self._enter)) is None:
            await asyncio.sleep(LOOK_S * random.uniform(0.5, 1.5))
        self._held.add(place)
        self._keep_on()
        return place

    def _leave(self, place: int | None) -> None:
        if place is not None:
            self._held.discard(place)
            self._returned.append(place)
            self._write_soon()

    def _write_soon(self) -> None:
        """Write pending changes now, or in the background if another process holds the lock."""
        with suppress(DatabaseBusy):
            self._write(lambda db: None)
        self._keep_on()

    def _keep_on(self) -> None:
        idle = not (self._held or self._returned or self._refusals)
        if self._keeper is not None and (idle or self._keeper.done()):
            self._keeper.cancel()
            self._keeper = None
        if self._keeper is None and not idle:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        while self._held or self._returned or self._refusals:
            await asyncio.sleep(BUSY_S if self._returned or self._refusals else RENEW_S)
            await self._written(self._renew)

    # --- within a transaction ----------------------------------------------------------------------

    def _reserve(self, db: sqlite3.Connection, beat: Beat) -> float:
        rhythm = self._rhythm(db, beat)
        due = rhythm.reserve(self._clock(), beat[1])
        self._save(db, beat, rhythm)
        return due

    def _late(self, db: sqlite3.Connection, beat: Beat, due: float) -> None:
        rhythm = self._rhythm(db, beat)
        rhythm.late(due, self._clock(), beat[1])
        self._save(db, beat, rhythm)

    def _enter(self, db: sqlite3.Connection) -> int | None:
        now = self._clock()
        # Leases too far in the future come from a clock that was set back.
        db.execute("DELETE FROM places WHERE until < ? OR until > ?", (now, now + 2 * LEASE_S))
        (taken,) = db.execute("SELECT count(*) FROM places").fetchone()
        if self._places is not None and taken >= self._places:
            return None
        # Random ids, so that a lost slot is never confused with a new one.
        place = random.getrandbits(62)
        db.execute("INSERT INTO places VALUES (?, ?)", (place, now + LEASE_S))
        return place

    def _renew(self, db: sqlite3.Connection) -> None:
        until = self._clock() + LEASE_S
        db.executemany("INSERT OR REPLACE INTO places VALUES (?, ?)", [(p, until) for p in self._held])

    def _rhythm(self, db: sqlite3.Connection, beat: Beat) -> RateController:
        row = db.execute("SELECT state FROM rhythms WHERE kind = ?", (beat[0],)).fetchone()
        return msgspec.msgpack.decode(row[0], type=RateController) if row else RateController()

    def _save(self, db: sqlite3.Connection, beat: Beat, rhythm: RateController) -> None:
        db.execute("INSERT OR REPLACE INTO rhythms VALUES (?, ?)", (beat[0], msgspec.msgpack.encode(rhythm)))

    # --- the file ----------------------------------------------------------------------------------

    async def _written(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await retry_while_busy(lambda: self._write(work), interval_s=BUSY_S)

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` and all pending changes in one transaction; raises DatabaseBusy."""
        with self._db.transaction() as db:
            for beat, at, retry_after_s in self._refusals:
                rhythm = self._rhythm(db, beat)
                rhythm.cut(at, beat[1], retry_after_s)
                self._save(db, beat, rhythm)
            db.executemany("DELETE FROM places WHERE id = ?", [(place,) for place in self._returned])
            result = work(db)
        self._refusals.clear()
        self._returned.clear()
        return result
