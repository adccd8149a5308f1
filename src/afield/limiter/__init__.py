"""Limiter: how fast launches and stops may be called, and how many launches may be under way.

Calls are spaced evenly, with a burst of 5 % of a second's worth (at least one call). Launches and stops
share the rate; each kind waits in its own line, first come first served, and the heads of the two lines take
turns: a stop ends what costs money and must not wait behind a thousand launches, nor hold them up. A refusal
halves the rate, at most once a second, and pauses if the other side asked for it; the rate is back after
about 30 s. Without a given rate the first refusal teaches one. `LocalLimiter` takes its time from the running
event loop; `SharedLimiter` is one budget for all processes of a machine that share a SQLite file.
"""

from afield.limiter.local import Limiter, LocalLimiter, Unlimited
from afield.limiter.rhythm import Pace
from afield.limiter.shared import SharedLimiter

__all__ = ["Limiter", "LocalLimiter", "Pace", "SharedLimiter", "Unlimited"]
