"""Limiter: how fast launches and stops may be called, and how many launches may be under way.

Calls are spaced evenly, with a burst of 5 % of a second's worth (at least one call). Launches and stops
share the rate; each kind waits in its own line, first come first served, and the heads of the two lines take
turns: a stop ends what costs money and must not wait behind a thousand launches, nor hold them up. A refusal
halves the rate, at most once a second, and pauses if the other side asked for it; the rate is back after
about 30 s. Without a given rate the first refusal teaches one. `LocalLimiter` takes its time from the running
event loop; `SharedLimiter` is one budget for all processes of a machine that share a SQLite file.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from msgspec import Struct

BURST_S = 0.05
CUT_EVERY_S = 1.0
RECOVER_S = 30.0
LONGEST_PAUSE_S = 60.0
# Below what a timer can tell apart: such a rest is not slept.
TICK_S = 1e-6


class Pace(Struct, frozen=True, kw_only=True):
    """`rate_per_s`: launches and stops together; None learns one from being refused.

    `starting` launches may be under way at once. Not given, it is what the rate brings about in a cold start
    of `start_s`: `ceil(rate_per_s * start_s)`; with neither rate nor start time there is no such bound.
    """

    rate_per_s: float | None = None
    start_s: float = 0.0
    starting: int | None = None

    def __post_init__(self) -> None:
        if self.rate_per_s is not None and not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise ValueError(f"rate_per_s {self.rate_per_s} must be above 0, or None to learn it")
        if not (math.isfinite(self.start_s) and self.start_s >= 0):
            raise ValueError(f"start_s {self.start_s} must be 0 (not known) or a positive number of seconds")
        if self.starting is not None and self.starting < 1:
            raise ValueError(f"starting {self.starting} must be at least 1, or None for no bound of its own")

    @property
    def places(self) -> int | None:
        """How many launches may be under way; None is no bound."""
        if self.starting is not None or self.rate_per_s is None or self.start_s == 0:
            return self.starting
        return max(1, math.ceil(self.rate_per_s * self.start_s - 1e-9))


class Limiter(Protocol):
    def launching(self) -> AbstractAsyncContextManager[None]:
        """Waits for a turn and for a place; the place is held until the block ends."""
        ...

    def calling(self) -> AbstractAsyncContextManager[None]:
        """Waits for a turn: a call that takes no place, such as a stop."""
        ...

    def throttled(self, retry_after_s: float | None) -> None:
        """The other side refused a call: slow down, and pause for as long as it asked."""
        ...


class Rhythm(Struct):
    """When the next call may be made: all of a limiter's state but the places, and free of I/O.

    The rate is `low + slope * (now - since)`, at most the given one; `low` None is no rate yet. `free` is
    when calls that were spaced without a burst would be made next.
    """

    low: float | None = None
    slope: float = 0.0
    since: float = -math.inf
    free: float = -math.inf
    paused_until: float = -math.inf
    # Learning: calls of this second and the one before, and refusals since the first one.
    second: float = -math.inf
    made: int = 0
    before: int = 0
    taught_at: float | None = None
    refused: int = 0

    def rate(self, now: float, given: float | None) -> float | None:
        if self.low is None:
            return given
        return min(given or math.inf, self.low + self.slope * max(0.0, now - self.since))

    def reserve(self, now: float, given: float | None) -> float:
        """Take the next turn; answers when it is."""
        self._learn(now)
        self._count(now)
        rate = self.rate(now, given)
        if rate is None:
            return max(now, self.paused_until)
        gap = 1 / rate
        if self.free > now + LONGEST_PAUSE_S + 1000 * gap:
            self.free = now  # The clock was set back.
        early = gap * (max(1.0, rate * BURST_S) - 1)
        due = max(now, self.free - early, self.paused_until)
        self.free = max(due, self.free) + gap
        return due

    def late(self, now: float, given: float | None) -> None:
        """A turn was taken later than it was due: the next one keeps its distance."""
        if rate := self.rate(now, given):
            self.free = max(self.free, now + 1 / rate)

    def cut(self, now: float, given: float | None, retry_after_s: float | None) -> None:
        if retry_after_s is not None and retry_after_s > 0:
            self.paused_until = max(self.paused_until, now + min(retry_after_s, LONGEST_PAUSE_S))
        rate = self.rate(now, given)
        if rate is None:
            self._refuse(now)
        elif self.low is None or now - self.since >= CUT_EVERY_S or now < self.since:
            aim = given or rate
            self.low = max(rate / 2, aim / 64)
            self.slope = (aim - self.low) / RECOVER_S
            self.since = now

    def _refuse(self, now: float) -> None:
        """Nothing is sent for a second: by then it is known how much of what was sent was refused."""
        if self.taught_at is None:
            self.taught_at = now
            self.paused_until = max(self.paused_until, now + CUT_EVERY_S)
            self._count(now, 0)
        self.refused += 1

    def _learn(self, now: float) -> None:
        if self.taught_at is None or now < self.taught_at + CUT_EVERY_S:
            return
        sent = self.made + self.before * max(0.0, 1 - (self.taught_at - self.second))
        self.low = max(1.0, sent - self.refused)
        self.slope, self.since = self.low / 2 / RECOVER_S, now
        self.taught_at = None

    def _count(self, now: float, calls: int = 1) -> None:
        if self.taught_at is not None and calls:
            return
        if not 0 <= now - self.second < 1:
            self.before = self.made if now - self.second < 2 else 0
            self.second, self.made = math.floor(now), 0
        self.made += calls


class Unlimited:
    """For places that take whatever comes."""

    @asynccontextmanager
    async def launching(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        yield

    def throttled(self, retry_after_s: float | None) -> None:
        pass


class LocalLimiter:
    """One budget for one event loop. A cancelled wait costs nothing, or at worst its own turn."""

    def __init__(self, pace: Pace) -> None:
        self._given = pace.rate_per_s
        self._places = pace.places
        self._rhythm = Rhythm()
        self._under_way = 0
        self._room = asyncio.Event()
        # Held by the head of a line while it waits; asyncio's locks are first come first served.
        self._launches, self._calls = asyncio.Lock(), asyncio.Lock()

    @property
    def rate_per_s(self) -> float | None:
        """What is allowed at this moment; None before one is given or learned."""
        return self._rhythm.rate(_now(), self._given)

    @asynccontextmanager
    async def launching(self) -> AsyncIterator[None]:
        async with self._launches:
            while self._places is not None and self._under_way >= self._places:
                self._room.clear()
                await self._room.wait()
            self._under_way += 1
            try:
                await self._turn()
            except asyncio.CancelledError:
                self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        async with self._calls:
            await self._turn()
        yield

    def throttled(self, retry_after_s: float | None) -> None:
        self._rhythm.cut(_now(), self._given, retry_after_s)

    def _leave(self) -> None:
        self._under_way -= 1
        self._room.set()

    async def _turn(self) -> None:
        due = self._rhythm.reserve(_now(), self._given)
        while (rest := due - _now()) > TICK_S:
            await asyncio.sleep(rest)
            if self._rhythm.paused_until > due:
                due = self._rhythm.reserve(_now(), self._given)
        self._rhythm.late(_now(), self._given)


def _now() -> float:
    return asyncio.get_running_loop().time()
