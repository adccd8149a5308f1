"""Rate controller: GCRA scheduling with back-off and rate learning.

1. Calls follow the generic cell rate algorithm: a window of t seconds has at most rate * t calls plus a
   burst, and no second has more calls than the configured rate.
2. A small part of the rate is left unused, because evenly spaced calls arrive unevenly: at exactly 25 per
   second, some second would have 26.

No function reads a clock or does I/O; times are arguments, in seconds.
"""

from __future__ import annotations

import math
from bisect import insort

from msgspec import Struct, field

BURST_S = 0.08
"""Seconds' worth of calls that may be made at once."""
LATE_S = 0.2
"""Largest delay of a call, in seconds, that later calls catch up on."""
USED = 0.97
"""Share of the configured rate that is used at first."""
USED_AT_LEAST = 0.955
"""Smallest share of the configured rate after isolated refusals."""
SHAVED = 0.005
"""Share of the configured rate that an isolated refusal takes away."""
CHANCES = 2
"""Number of refusals within `CHANCE_S` that count as isolated."""
CHANCE_S = 2.0
CUT_EVERY_S = 1.0
"""Shortest time between two cuts of the rate, in seconds."""
RECOVER_S = 30.0
"""Seconds until a cut rate has recovered."""
SOON_S = 2.0
"""Seconds until a cut rate is back at `KNEE` of the rate that was refused."""
KNEE = 0.9
PROBE = 1.5
"""Factor by which a learned rate grows beyond the rate that was refused."""
LONGEST_PAUSE_S = 60.0
"""Longest pause that a refusal can request, in seconds."""
SLOW = 1.5
"""Factor for launches that take longer than `cold_start_s`, in the bound on concurrent launches."""
TICK_S = 1e-6
"""Shortest time that is worth a sleep, in seconds."""


class RateLimits(Struct, frozen=True, kw_only=True):
    """Limits of launches and stops."""

    rate_per_s: float | None = None
    """Launches, and stops without their own rate, per second; None learns a rate from refusals."""
    stop_per_s: float | None = None
    """Stops per second; None shares `rate_per_s`."""
    cold_start_s: float = 0.0
    """Seconds that a launch usually takes; 0 if unknown."""
    starting: int | None = None
    """Largest number of concurrent launches; None derives it from `rate_per_s` and 1.5 times `cold_start_s`,
    or sets no bound if one of them is missing.
    """

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "stop_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} {rate} must be above 0, or None to learn or share a rate")
        if not (math.isfinite(self.cold_start_s) and self.cold_start_s >= 0):
            raise ValueError(
                f"cold_start_s {self.cold_start_s} must be 0 (not known) or a positive number of seconds"
            )
        if self.starting is not None and self.starting < 1:
            raise ValueError(f"starting {self.starting} must be at least 1, or None for no bound of its own")

    @property
    def max_launching(self) -> int | None:
        """Largest number of concurrent launches; None is no bound."""
        if self.starting is not None or self.rate_per_s is None or self.cold_start_s == 0:
            return self.starting
        return max(1, math.ceil(SLOW * self.rate_per_s * self.cold_start_s - 1e-9))


class Rates:
    """Rates of launches and stops; `apart` means that stops have their own."""

    def __init__(self, limits: RateLimits) -> None:
        self.launch = limits.rate_per_s
        self.apart = limits.stop_per_s is not None
        self.stop = limits.stop_per_s if self.apart else limits.rate_per_s


class RateController(Struct):
    """Schedule of calls at one rate: all state of a limiter except its launch slots.

    After a cut the rate grows linearly, fast from `low` to `knee` and then slowly to `aim`; without a
    configured rate it grows beyond `aim`. Times too far in the future come from a clock that was set back,
    and are ignored.
    """

    low: float | None = None
    """Rate per second right after the last cut; None if it was never cut."""
    knee: float = 0.0
    """Rate per second after `SOON_S`, a little below the rate that was refused."""
    aim: float = 0.0
    """Rate per second after `RECOVER_S`."""
    since: float = -math.inf
    """Time of the last cut."""
    free: float = -math.inf
    """Time of the next call if calls were spaced without bursts."""
    paused_until: float = -math.inf
    """End of a pause that a refusal requested."""
    sent: list[float] = field(default_factory=list)
    """Times of the calls of the last second."""
    used: float = USED
    """Share of the configured rate that is used."""
    chances: int = 0
    """Number of recent isolated refusals."""
    chance_at: float = -math.inf
    """Time of the last of them."""
    second: float = -math.inf
    """Start of the second that `calls` counts, for learning a rate."""
    calls: int = 0
    """Number of calls in that second."""
    before: int = 0
    """Number of calls in the second before."""
    taught_at: float | None = None
    """Time of the first refusal without a rate; None if no rate is being learned."""
    refused: int = 0
    """Number of refusals since then."""

    def rate(self, now: float, limit: float | None) -> float | None:
        """Current rate per second; None if it is unlimited. `limit` is the configured rate."""
        most = math.inf if limit is None else limit * self.used
        if self.low is None:
            return None if limit is None else most
        past = abs(now - self.since)
        if past < SOON_S:
            grown = self.low + (self.knee - self.low) * past / SOON_S
        else:
            grown = self.knee + (self.aim - self.knee) * (past - SOON_S) / (RECOVER_S - SOON_S)
        return min(most, grown)

    def reserve(self, now: float, limit: float | None) -> float:
        """Reserve the next call and return its time."""
        self._learn(now)
        self._count(now)
        if self.paused_until > now + LONGEST_PAUSE_S:
            self.paused_until = now
        rate = self.rate(now, limit)
        if rate is None:
            return max(now, self.paused_until)
        gap = 1 / rate
        if self.free > now + LONGEST_PAUSE_S + 1000 * gap:
            self.free = now
        due = max(now, self.free - _early(rate), self.paused_until, self._window(now, limit))
        self.free = max(due, self.free) + gap
        self._keep(due, limit)
        return due

    def late(self, due: float, now: float, limit: float | None) -> None:
        """Record that the call due at `due` is made now; later calls catch up by at most `LATE_S`."""
        self._learn(now)
        if due in self.sent:
            self.sent.remove(due)
            insort(self.sent, now)
        if rate := self.rate(now, limit):
            self.free = max(self.free, now + 1 / rate - LATE_S)

    def _window(self, now: float, limit: float | None) -> float:
        """Earliest time at which one more call keeps the configured rate in the second before it."""
        if limit is None:
            return -math.inf
        calls = max(1, math.floor(limit))
        if len(self.sent) < calls or self.sent[-calls] > now + LONGEST_PAUSE_S:
            return -math.inf
        return self.sent[-calls] + calls / limit

    def _keep(self, due: float, limit: float | None) -> None:
        if limit is not None:
            insort(self.sent, due)
            del self.sent[: -max(1, math.floor(limit))]

    def cut(self, now: float, limit: float | None, retry_after_s: float | None) -> None:
        """Record a refusal: pause if requested, and lower or learn the rate."""
        if retry_after_s is not None and retry_after_s > 0:
            self.paused_until = max(self.paused_until, now + min(retry_after_s, LONGEST_PAUSE_S))
        rate = self.rate(now, limit)
        if rate is None:
            self._refuse(now)
        elif limit is not None and rate == limit * self.used and self._by_chance(now):
            self.used = max(USED_AT_LEAST, self.used - SHAVED)
            self.free += 1 / rate
        elif self.low is None or abs(now - self.since) >= CUT_EVERY_S:
            self._grow(now, max(rate / 2, (limit or 1.0) / 64), KNEE * rate, limit or PROBE * rate)

    def _by_chance(self, now: float) -> bool:
        """Whether a refusal is isolated, as happens when calls arrive unevenly."""
        if abs(now - self.chance_at) >= CHANCE_S:
            self.chances = 0
        self.chance_at = now
        self.chances += 1
        return self.chances <= CHANCES

    def _refuse(self, now: float) -> None:
        """Pause for a second to count the refusals of calls already made, from which `_learn` sets a rate."""
        if self.taught_at is None:
            self.taught_at = now
            self.paused_until = max(self.paused_until, now + CUT_EVERY_S)
            self._count(now, 0)
        self.refused += 1

    def _learn(self, now: float) -> None:
        if self.taught_at is None or 0 <= now - self.taught_at < CUT_EVERY_S - TICK_S:
            return
        sent = self.calls + self.before * max(0.0, 1 - (self.taught_at - self.second))
        learned = max(1.0, sent - self.refused)
        self._grow(now, learned, learned, PROBE * learned)
        self.taught_at = None

    def _grow(self, now: float, low: float, knee: float, aim: float) -> None:
        self.low, self.knee, self.aim, self.since = low, max(low, knee), aim, now

    def _count(self, now: float, calls: int = 1) -> None:
        if self.taught_at is not None and calls:
            return
        if not 0 <= now - self.second < 1:
            self.before = self.calls if now - self.second < 2 else 0
            self.second, self.calls = math.floor(now), 0
        self.calls += calls


def _early(rate: float) -> float:
    """Seconds by which a call may be earlier than even spacing allows."""
    return (max(1.0, rate * BURST_S) - 1) / rate
