"""Pace and Rhythm: what is allowed, and when the next call may be made. Pure: time comes in as a number.

Turns follow the generic cell rate algorithm: no window of t seconds has more than rate * t calls and a burst.
"""

from __future__ import annotations

import math

from msgspec import Struct

BURST_S = 0.05
CUT_EVERY_S = 1.0
RECOVER_S = 30.0
# A cut rate is soon back at this part of where it was refused ...
SOON_S = 2.0
KNEE = 0.9
# ... and, where no rate is given, grows past it by this factor.
PROBE = 1.5
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


class Rhythm(Struct):
    """When the next call may be made: all of a limiter's state but the places, and free of I/O.

    A cut rate grows in two straight lines: soon from `low` to `knee`, a little below where it was refused,
    then slowly to `aim`, and beyond where none is given. `low` None is a rate that was never cut. `free` is
    when calls that were spaced without a burst would be made next. A time further ahead than any can be is of
    a clock that was set back since.
    """

    low: float | None = None
    knee: float = 0.0
    aim: float = 0.0
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
        past = abs(now - self.since)
        if past < SOON_S:
            grown = self.low + (self.knee - self.low) * past / SOON_S
        else:
            grown = self.knee + (self.aim - self.knee) * (past - SOON_S) / (RECOVER_S - SOON_S)
        return min(given or math.inf, grown)

    def reserve(self, now: float, given: float | None) -> float:
        """Take the next turn; answers when it is."""
        self._learn(now)
        self._count(now)
        if self.paused_until > now + LONGEST_PAUSE_S:
            self.paused_until = now
        rate = self.rate(now, given)
        if rate is None:
            return max(now, self.paused_until)
        gap = 1 / rate
        if self.free > now + LONGEST_PAUSE_S + 1000 * gap:
            self.free = now
        early = gap * (max(1.0, rate * BURST_S) - 1)
        due = max(now, self.free - early, self.paused_until)
        self.free = max(due, self.free) + gap
        return due

    def late(self, now: float, given: float | None) -> None:
        """A turn was taken later than it was due: the next one keeps its distance."""
        self._learn(now)
        if rate := self.rate(now, given):
            self.free = max(self.free, now + 1 / rate)

    def cut(self, now: float, given: float | None, retry_after_s: float | None) -> None:
        if retry_after_s is not None and retry_after_s > 0:
            self.paused_until = max(self.paused_until, now + min(retry_after_s, LONGEST_PAUSE_S))
        rate = self.rate(now, given)
        if rate is None:
            self._refuse(now)
        elif self.low is None or abs(now - self.since) >= CUT_EVERY_S:
            self._grow(now, max(rate / 2, (given or 1.0) / 64), KNEE * rate, given or PROBE * rate)

    def _refuse(self, now: float) -> None:
        """Nothing is sent for a second: by then it is known how much of what was sent was refused."""
        if self.taught_at is None:
            self.taught_at = now
            self.paused_until = max(self.paused_until, now + CUT_EVERY_S)
            self._count(now, 0)
        self.refused += 1

    def _learn(self, now: float) -> None:
        if self.taught_at is None or 0 <= now - self.taught_at < CUT_EVERY_S:
            return
        sent = self.made + self.before * max(0.0, 1 - (self.taught_at - self.second))
        learned = max(1.0, sent - self.refused)
        self._grow(now, learned, learned, PROBE * learned)
        self.taught_at = None

    def _grow(self, now: float, low: float, knee: float, aim: float) -> None:
        self.low, self.knee, self.aim, self.since = low, max(low, knee), aim, now

    def _count(self, now: float, calls: int = 1) -> None:
        if self.taught_at is not None and calls:
            return
        if not 0 <= now - self.second < 1:
            self.before = self.made if now - self.second < 2 else 0
            self.second, self.made = math.floor(now), 0
        self.made += calls
