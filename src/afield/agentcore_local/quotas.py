"""Quotas, rate limits and call counters of the local AgentCore server."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from msgspec import Struct

from afield.agentcore_local.errors import ServiceError

KEPT_S = 3600


class Quotas(Struct, frozen=True, kw_only=True):
    """Limits of the service."""

    sessions: int = 1000
    """Maximum number of concurrent sessions."""
    start_rate: float = 25.0
    """Session starts per second."""
    stop_rate: float = 25.0
    """Stop calls per second."""
    invoke_rate: float = 200.0
    """Calls per second for each agent runtime."""
    burst_s: float = 1.0
    """Size of each token bucket, in seconds of its rate."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive and finite")


class TokenBucket:
    """Token bucket that refills at `rate` per second, up to `burst_s` seconds of it."""

    def __init__(self, rate: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._rate, self._size, self._clock = rate, max(1.0, rate * burst_s), clock
        self._tokens, self._seen = self._size, clock()

    def take(self, what: str) -> None:
        """Take one token; raises the ThrottlingException if there is none."""
        now = self._clock()
        self._tokens = min(self._size, self._tokens + (now - self._seen) * self._rate)
        self._seen = now
        if self._tokens < 1:
            raise ServiceError(
                "ThrottlingException", f"Rate exceeded: {what} at most {self._rate:g} a second"
            )
        self._tokens -= 1


class CallCounts:
    """Counters for tests and benchmarks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, clock()
        self.answers: dict[str, Counter[str]] = {}
        self.ends: Counter[str] = Counter()
        self.starts = 0
        self._first = self._last = 0.0
        self._by_second: deque[list[int]] = deque(maxlen=KEPT_S)

    def answered(self, operation: str, status: int) -> None:
        self.answers.setdefault(operation, Counter())[str(status)] += 1

    def started(self) -> None:
        now = self._clock()
        if not self.starts:
            self._first = now
        self.starts += 1
        self._last = now
        second = int(now - self._since)
        if self._by_second and self._by_second[-1][0] == second:
            self._by_second[-1][1] += 1
        else:
            self._by_second.append([second, 1])

    def view(self) -> dict[str, object]:
        """Counters as JSON; `start_rate` is measured from the first start to the last."""
        spent = self._last - self._first
        return {
            "calls": {operation: counter.total() for operation, counter in self.answers.items()},
            "answers": self.answers,
            "throttled": sum(counter["429"] for counter in self.answers.values()),
            "starts": self.starts,
            "start_rate": round((self.starts - 1) / spent, 3) if spent > 0 else 0.0,
            "starts_by_second": list(self._by_second),
            "ends": self.ends,
        }
