"""Simulated inference engine: a token rate shared evenly by all calls.

Every call gets `min(each, total / calls)` tokens per second. All rates are equal, so a heap of the cumulative
tokens at which each call ends gives the next event in O(log n). New weights take effect at once, also within
a call.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

from afield.types import VersionSpan

NEARLY = 1e-6  # tokens


class Engine:
    """Used inside one event loop, by whose clock it runs."""

    def __init__(self, total: float = 20_000.0, each: float = 200.0) -> None:
        self.total, self.each = total, each
        self.version = 0
        self.sampled = 0  # tokens that calls were given
        self.first: float | None = None
        self.last = 0.0
        self.served: list[float] = []  # tokens by second, for pictures
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._level = 0.0  # tokens a call that was here from the beginning would have
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]  # from which level on which version samples
        self._calls: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def busy(self) -> float:
        """The share of its tokens that the engine gave, from the first token to the last."""
        if self.first is None or self.last <= self.first:
            return 0.0
        return self.sampled / (self.total * (self.last - self.first))

    def busy_until(self, end: float) -> float:
        """The same up to a moment, to the second."""
        if self.first is None or int(end) <= int(self.first):
            return 0.0
        seconds = self.served[int(self.first) : int(end)]
        return sum(seconds) / (self.total * len(seconds))

    @property
    def rate(self) -> float:
        """Tokens per second that each call gets now."""
        return min(self.each, self.total / max(len(self._calls), 1))

    async def sample(self, tokens: int) -> tuple[VersionSpan, ...]:
        """Takes as long as these tokens take; which versions sampled them."""
        self._advance()
        if self.first is None:
            self.first = self._at
        begun = self._level
        done: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._calls, (begun + tokens, next(self._order), done))
        self._aim()
        try:
            await done
        finally:
            self._advance()
            if not done.done() or done.cancelled():
                self._calls = [call for call in self._calls if call[2] is not done]
                heapq.heapify(self._calls)
                tokens = min(tokens, int(self._level - begun + NEARLY))
                self._aim()
            self.sampled += tokens
        return self._versions(begun, tokens)

    def publish(self, version: int) -> None:
        self._advance()
        self.version = version
        self._swaps.append((self._level, version))
        oldest = min((end for end, _, _ in self._calls), default=self._level) - 100_000
        while len(self._swaps) > 64 and self._swaps[1][0] < oldest:
            del self._swaps[0]

    def _versions(self, begun: float, tokens: int) -> tuple[VersionSpan, ...]:
        """A token belongs to the version that was there when it was complete."""
        spans: list[VersionSpan] = []
        ends = [level for level, _ in self._swaps[1:]] + [float("inf")]
        for (_, version), end in zip(self._swaps, ends, strict=True):
            start = spans[-1].end if spans else 0
            stop = tokens if end == float("inf") else min(tokens, int(end - begun + NEARLY))
            if stop > start:
                spans.append(VersionSpan(start, stop, version, version))
        return tuple(spans)

    def _advance(self) -> None:
        """Up to now, with the calls as they were."""
        now = self._loop.time()
        if now > self._at and self._calls:
            gained = self.rate * (now - self._at)
            self._count(gained * len(self._calls), self._at, now)
            self._level += gained
            self.last = now
        self._at = now

    def _count(self, tokens: float, start: float, end: float) -> None:
        second = int(start)
        while second < end:
            if len(self.served) <= second:
                self.served.extend([0.0] * (second + 1 - len(self.served)))
            share = (min(end, second + 1) - max(start, second)) / (end - start)
            self.served[second] += tokens * share
            second += 1

    def _aim(self) -> None:
        """Set the one timer for the call that ends first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._calls:
            wait = max(0.0, self._calls[0][0] - self._level) / self.rate
            self._timer = self._loop.call_at(self._at + wait, self._end)

    def _end(self) -> None:
        self._timer = None
        self._advance()
        while self._calls and self._calls[0][0] <= self._level + NEARLY:
            _, _, done = heapq.heappop(self._calls)
            if not done.done():
                done.set_result(None)
        self._aim()
