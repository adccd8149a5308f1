"""What a limiter is, and one for the launches and stops of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from afield.limiter.rhythm import TICK_S, Pace, Rhythm


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


class Unlimited(LocalLimiter):
    """Holds nothing back until the other side refuses a call, and then learns what it takes."""

    def __init__(self) -> None:
        super().__init__(Pace())


def _now() -> float:
    return asyncio.get_running_loop().time()
