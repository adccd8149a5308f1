"""Pace and Rhythm: what is allowed, and when the next call may be made. Pure: time comes in as a number.

Turns follow the generic cell rate algorithm: no window of t seconds has more than rate * t calls and a burst
due, and no second has more than the rate that was given. Of that rate a small part is left unused: calls that
leave evenly arrive unevenly, and at exactly 25 a second some second would see 26 of them.
"""

from __future__ import annotations

import math
from bisect import insort

from msgspec import Struct, field

BURST_S = 0.08
# Turns that are taken late, as on a busy machine, are made up for if they are no later than this.
LATE_S = 0.2
# The part of a given rate that is used: at first, and at least after refusals that looked like chance.
USED = 0.97
USED_AT_LEAST = 0.955
SHAVED = 0.005
# So many refusals within this time are chance: windows that the network filled unevenly.
CHANCES = 2
CHANCE_S = 2.0
CUT_EVERY_S = 1.0
RECOVER_S = 30.0
# A cut rate is soon back at this part of where it was refused ...
SOON_S = 2.0
KNEE = 0.9
# ... and, where no rate is given, grows past it by this factor.
PROBE = 1.5
LONGEST_PAUSE_S = 60.0
# A start that takes longer than was said must not cost rate.
SLOW = 1.5
# Below what a timer can tell apart: such a rest is not slept.
TICK_S = 1e-6


class RateLimits(Struct, frozen=True, kw_only=True):
    """`rate_per_s`: launches and stops together; None learns one from being refused. With `stop_per_s`, stops
    have a rate of their own.

    `starting` launches may be under way at once. Not given, it is what the rate brings about while a start
    takes half again as long as `cold_start_s`; with neither rate nor start time there is no such bound.
    """

    rate_per_s: float | None = None
    stop_per_s: float | None = None
    cold_start_s: float = 0.0
    starting: int | None = None

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "stop_per_s"):
            rate = getattr(self, name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} {rate} must be above 0, or None: learned, or shared")
        if not (math.isfinite(self.cold_start_s) and self.cold_start_s >= 0):
            raise ValueError(
                f"cold_start_s {self.cold_start_s} must be 0 (not known) or a positive number of seconds"
            )
        if self.starting is not None and self.starting < 1:
            raise ValueError(f"starting {self.starting} must be at least 1, or None for no bound of its own")

    @property
    def max_launching(self) -> int | None:
        """How many launches may be under way; None is no bound."""
        if self.starting is not None or self.rate_per_s is None or self.cold_start_s == 0:
            return self.starting
        return max(1, math.ceil(SLOW * self.rate_per_s * self.cold_start_s - 1e-9))


class Rates:
    """The rates of a pace by what is called. `apart`: stops do not count as launches."""

    def __init__(self, pace: RateLimits) -> None:
        self.launch = pace.rate_per_s
        self.apart = pace.stop_per_s is not None
        self.stop = pace.stop_per_s if self.apart else pace.rate_per_s


class RateController(Struct):
    """When the next call may be made: all of a limiter's state but the places, and free of I/O.

    A cut rate grows in two straight lines: soon from `low` to `knee`, a little below where it was refused,
    then slowly to `aim`, and beyond where none is given. `low` None is a rate that was never cut. `free` is
    when calls that were spaced without a burst would be made next; `sent` when those of the last second were.
    A time further ahead than any can be is of a clock that was set back since.
    """

    low: float | None = None
    knee: float = 0.0
    aim: float = 0.0
    since: float = -math.inf
    free: float = -math.inf
    paused_until: float = -math.inf
    sent: list[float] = field(default_factory=list)
    # The part of a given rate that is used, and refusals since the last quiet time.
    used: float = USED
    chances: int = 0
    chance_at: float = -math.inf
    # Learning: calls of this second and the one before, and refusals since the first one.
    second: float = -math.inf
    made: int = 0
    before: int = 0
    taught_at: float | None = None
    refused: int = 0

    def rate(self, now: float, given: float | None) -> float | None:
        most = math.inf if given is None else given * self.used
        if self.low is None:
            return None if given is None else most
        past = abs(now - self.since)
        if past < SOON_S:
            grown = self.low + (self.knee - self.low) * past / SOON_S
        else:
            grown = self.knee + (self.aim - self.knee) * (past - SOON_S) / (RECOVER_S - SOON_S)
        return min(most, grown)

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
        due = max(now, self.free - _early(rate), self.paused_until, self._window(now, given))
        self.free = max(due, self.free) + gap
        self._keep(due, given)
        return due

    def late(self, due: float, now: float, given: float | None) -> None:
        """The turn that was due then is taken now: the next ones make up for a little of that."""
        self._learn(now)
        if due in self.sent:
            self.sent.remove(due)
            insort(self.sent, now)
        if rate := self.rate(now, given):
            self.free = max(self.free, now + 1 / rate - LATE_S)

    def _window(self, now: float, given: float | None) -> float:
        """When one more call would no longer be one too many in the second before it."""
        if given is None:
            return -math.inf
        calls = max(1, math.floor(given))
        if len(self.sent) < calls or self.sent[-calls] > now + LONGEST_PAUSE_S:
            return -math.inf
        return self.sent[-calls] + calls / given

    def _keep(self, due: float, given: float | None) -> None:
        if given is not None:
            insort(self.sent, due)
            del self.sent[: -max(1, math.floor(given))]

    def cut(self, now: float, given: float | None, retry_after_s: float | None) -> None:
        if retry_after_s is not None and retry_after_s > 0:
            self.paused_until = max(self.paused_until, now + min(retry_after_s, LONGEST_PAUSE_S))
        rate = self.rate(now, given)
        if rate is None:
            self._refuse(now)
        elif given is not None and rate == given * self.used and self._by_chance(now):
            self.used = max(USED_AT_LEAST, self.used - SHAVED)
            self.free += 1 / rate
        elif self.low is None or abs(now - self.since) >= CUT_EVERY_S:
            self._grow(now, max(rate / 2, (given or 1.0) / 64), KNEE * rate, given or PROBE * rate)

    def _by_chance(self, now: float) -> bool:
        """Whether few calls were refused lately: as happens where calls arrive unevenly."""
        if abs(now - self.chance_at) >= CHANCE_S:
            self.chances = 0
        self.chance_at = now
        self.chances += 1
        return self.chances <= CHANCES

    def _refuse(self, now: float) -> None:
        """Nothing is sent for a second: by then it is known how much of what was sent was refused."""
        if self.taught_at is None:
            self.taught_at = now
            self.paused_until = max(self.paused_until, now + CUT_EVERY_S)
            self._count(now, 0)
        self.refused += 1

    def _learn(self, now: float) -> None:
        if self.taught_at is None or 0 <= now - self.taught_at < CUT_EVERY_S - TICK_S:
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


def _early(rate: float) -> float:
    """How much sooner than evenly spaced a call may be made."""
    return (max(1.0, rate * BURST_S) - 1) / rate
