"""Limiter interface, and the limiter of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from afield.ratelimit.controller import TICK_S, RateController, RateLimits, Rates


class Limiter(Protocol):
    """Limits the rate of calls and the number of concurrent launches."""

    def launch_slot(self) -> AbstractAsyncContextManager[None]:
        """Wait for the rate and for a launch slot, which is held until the block ends."""
        ...

    def call_slot(self) -> AbstractAsyncContextManager[None]:
        """Wait for the rate, for a call that needs no launch slot, such as a stop."""
        ...

    def slow_down(self, retry_after_s: float | None, *, stop: bool = False) -> None:
        """Lower the rate after a refused launch or stop, and pause for `retry_after_s` seconds if given."""
        ...


class LocalLimiter:
    """Limiter of one event loop. A cancelled wait uses up at most its own call."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._max_launching = limits.max_launching
        self._rates = Rates(limits)
        self._launching = RateController()
        self._stopping = RateController() if self._rates.apart else self._launching
        self._launching_now = 0
        self._slot_freed = asyncio.Event()
        # Held by the head of a queue while it waits; asyncio locks are FIFO.
        self._launches, self._calls = asyncio.Lock(), asyncio.Lock()

    @property
    def rate_per_s(self) -> float | None:
        """Current launch rate; None before a rate is configured or learned."""
        return self._launching.rate(_now(), self._rates.launch)

    @asynccontextmanager
    async def launch_slot(self) -> AsyncIterator[None]:
        async with self._launches:
            while self._max_launching is not None and self._launching_now >= self._max_launching:
                self._slot_freed.clear()
                await self._slot_freed.wait()
            self._launching_now += 1
            try:
                await _wait_for_turn(self._launching, self._rates.launch)
            except asyncio.CancelledError:
                self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    @asynccontextmanager
    async def call_slot(self) -> AsyncIterator[None]:
        async with self._calls:
            await _wait_for_turn(self._stopping, self._rates.stop)
        yield

    def slow_down(self, retry_after_s: float | None, *, stop: bool = False) -> None:
        if stop:
            self._stopping.cut(_now(), self._rates.stop, retry_after_s)
        else:
            self._launching.cut(_now(), self._rates.launch, retry_after_s)

    def _leave(self) -> None:
        self._launching_now -= 1
        self._slot_freed.set()


class Unlimited(LocalLimiter):
    """Limiter without limits until a call is refused; then it learns a rate."""

    def __init__(self) -> None:
        super().__init__(RateLimits())


async def _wait_for_turn(controller: RateController, limit: float | None) -> None:
    due = controller.reserve(_now(), limit)
    while (rest := due - _now()) > TICK_S:
        await asyncio.sleep(rest)
        if controller.paused_until > due:
            due = controller.reserve(_now(), limit)
    controller.late(due, _now(), limit)


def _now() -> float:
    return asyncio.get_running_loop().time()
