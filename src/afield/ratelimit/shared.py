"""LeasedLimiter: one rate limit for several processes; SharedLimiter keeps it in SQLite.

1. Each process has its own two queues; their heads reserve the next call in the shared state and sleep until
   then.
2. A launch slot is a lease that its process renews. Slots of a killed process, or of one whose event loop
   was blocked, become free after `lease_s`.
3. SharedLimiter is for the processes of one machine, which share the wall clock. Its transactions run on the
   event loop and never wait for a lock: they are retried after a short sleep.
4. `RedisLimiter` is for processes of several machines.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from afield.errors import UsageError
from afield.ratelimit.controller import TICK_S, RateController, RateLimits, Rates
from afield.utils.sqlite import Database, DatabaseBusy, retry_while_busy

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
RefusedCall = tuple[CallKind, float, float | None]
"""Kind of the refused call, time of the refusal, and the requested pause in seconds."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS controllers (kind TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS launch_slots (id INTEGER PRIMARY KEY, until REAL NOT NULL);
"""


class LimiterState(Protocol):
    """State of a limiter within one transaction."""

    def controller(self, kind: str) -> RateController: ...

    def save(self, kind: str, controller: RateController) -> None: ...

    def take_slot(self, now: float, until: float, latest: float, limit: int) -> int | None:
        """Take one of `limit` launch slots until a time; None if all are taken.

        Slots whose lease ended before `now`, or ends after `latest`, are free.
        """
        ...

    def renew_slots(self, slots: Iterable[int], until: float) -> None: ...

    def free_slots(self, slots: Iterable[int]) -> None: ...


class LeasedLimiter(ABC):
    """Limiter whose state is shared by processes. Call `close` when done.

    A launch slot that is not renewed for `lease_s` seconds becomes free.
    """

    def __init__(
        self, limits: RateLimits, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self.limits = limits
        self._lease_s = lease_s
        self._max_launching = limits.max_launching
        rates = Rates(limits)
        self._launching = ("launch", rates.launch)
        self._stopping = ("stop", rates.stop) if rates.apart else self._launching
        self._clock = clock
        self._held: set[int] = set()
        # Changes that wait for the next transaction.
        self._returned: list[int] = []
        self._refusals: list[RefusedCall] = []
        self._renewal: asyncio.Task[None] | None = None
        self._launches, self._calls = asyncio.Lock(), asyncio.Lock()

    @abstractmethod
    def check(self) -> None:
        """Raise UsageError or Unavailable if the shared state cannot be written."""

    @abstractmethod
    async def _write_when_free(self, work: Callable[[LimiterState], T]) -> T:
        """Run `work` and all pending changes in one transaction."""

    def _write_soon(self) -> None:
        """Write pending changes in the background."""
        self._update_renewal()

    def close(self) -> None:
        """End the use of the shared state. Held launch slots become free when their leases end.

        Repeating is harmless.
        """
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

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
        due = await self._write_when_free(lambda state: self._reserve(state, kind))
        while (rest := due - self._clock()) > TICK_S:
            await asyncio.sleep(rest)
            if (await self._write_when_free(lambda state: state.controller(kind[0]))).paused_until > due:
                due = await self._write_when_free(lambda state: self._reserve(state, kind))
        if self._clock() - due > LATE_S:
            await self._write_when_free(lambda state, due=due: self._late(state, kind, due))

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

    def _write_pending(
        self, state: LimiterState, refusals: Sequence[RefusedCall], returned: Sequence[int]
    ) -> None:
        for kind, at, retry_after_s in refusals:
            controller = state.controller(kind[0])
            controller.cut(at, kind[1], retry_after_s)
            state.save(kind[0], controller)
        state.free_slots(returned)

    def _reserve(self, state: LimiterState, kind: CallKind) -> float:
        controller = state.controller(kind[0])
        due = controller.reserve(self._clock(), kind[1])
        state.save(kind[0], controller)
        return due

    def _late(self, state: LimiterState, kind: CallKind, due: float) -> None:
        controller = state.controller(kind[0])
        controller.late(due, self._clock(), kind[1])
        state.save(kind[0], controller)

    def _enter(self, state: LimiterState) -> int | None:
        assert self._max_launching is not None
        now = self._clock()
        # Leases too far in the future come from a clock that was set back.
        return state.take_slot(now, now + self._lease_s, now + 2 * self._lease_s, self._max_launching)

    def _renew(self, state: LimiterState) -> None:
        state.renew_slots(list(self._held), self._clock() + self._lease_s)


def new_slot() -> int:
    """Random id, so that a lost slot is never confused with a new one."""
    return random.getrandbits(62)


# --- SQLite ----------------------------------------------------------------------------------------


class _SqliteState:
    """State in the tables of `SCHEMA`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def controller(self, kind: str) -> RateController:
        row = self._db.execute("SELECT state FROM controllers WHERE kind = ?", (kind,)).fetchone()
        return msgspec.msgpack.decode(row[0], type=RateController) if row else RateController()

    def save(self, kind: str, controller: RateController) -> None:
        row = (kind, msgspec.msgpack.encode(controller))
        self._db.execute("INSERT OR REPLACE INTO controllers VALUES (?, ?)", row)

    def take_slot(self, now: float, until: float, latest: float, limit: int) -> int | None:
        self._db.execute("DELETE FROM launch_slots WHERE until < ? OR until > ?", (now, latest))
        (taken,) = self._db.execute("SELECT count(*) FROM launch_slots").fetchone()
        if taken >= limit:
            return None
        slot = new_slot()
        self._db.execute("INSERT INTO launch_slots VALUES (?, ?)", (slot, until))
        return slot

    def renew_slots(self, slots: Iterable[int], until: float) -> None:
        rows = [(slot, until) for slot in slots]
        self._db.executemany("INSERT OR REPLACE INTO launch_slots VALUES (?, ?)", rows)

    def free_slots(self, slots: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM launch_slots WHERE id = ?", [(slot,) for slot in slots])


class SharedLimiter(LeasedLimiter):
    """Limiter for the processes of one machine that share the file at `path`."""

    def __init__(
        self,
        limits: RateLimits,
        path: Path,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(limits, lease_s=lease_s, clock=clock)
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

    def check(self) -> None:
        with suppress(DatabaseBusy):
            self._write(lambda _: None)

    def close(self) -> None:
        super().close()
        self._db.close()

    def _write_soon(self) -> None:
        """Write pending changes now, or in the background if another process holds the lock."""
        with suppress(DatabaseBusy):
            self._write(lambda _: None)
        super()._write_soon()

    async def _write_when_free(self, work: Callable[[LimiterState], T]) -> T:
        return await retry_while_busy(lambda: self._write(work), interval_s=BUSY_S)

    def _write(self, work: Callable[[LimiterState], T]) -> T:
        with self._db.transaction() as db:
            state = _SqliteState(db)
            self._write_pending(state, self._refusals, self._returned)
            result = work(state)
        self._refusals.clear()
        self._returned.clear()
        return result
