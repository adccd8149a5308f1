"""Rate limiter for launches and stops, with a bound on concurrent launches.

1. Calls are spaced evenly at 97 % of the rate, with a burst of 8 % of a second's calls (at least one call).
2. Launches and stops share the rate, or stops have their own. Each kind has its own FIFO queue, and the
   heads of both queues alternate, so that stops do not wait behind many launches.
3. Isolated refusals skip one call and lower the rate by half a percent. More refusals halve it, at most once
   per second; it recovers within about 30 s. A requested pause (`retry_after_s`) is kept.
4. Without a configured rate, the first refusals determine one.
5. `SharedLimiter` is one limit for all processes of a machine that share a SQLite file, `RedisLimiter` for
   processes of several machines.
"""

from afield.ratelimit.controller import RateLimits
from afield.ratelimit.local import Limiter, LocalLimiter, Unlimited
from afield.ratelimit.redis import RedisLimiter
from afield.ratelimit.shared import LeasedLimiter, SharedLimiter

__all__ = [
    "LeasedLimiter",
    "Limiter",
    "LocalLimiter",
    "RateLimits",
    "RedisLimiter",
    "SharedLimiter",
    "Unlimited",
]
