"""Limiter: how fast launches and stops may be called, and how many launches may be under way.

Calls are spaced evenly at 97 % of the rate, with a burst of 8 % of a second's worth (at least one call).
Launches and stops share the rate, or stops have their own; each kind waits in its own line, first come first
served, and the heads of the two lines take turns: a stop ends what costs money and must not wait behind a
thousand launches, nor hold them up. Single refusals are chance, and cost a turn and half a percent of the
rate; more of them halve it, at most once a second; it is back after about 30 s. If the other side asks for a
pause, it gets one. Without a given rate the first refusal teaches one. `SharedLimiter` is one budget for all
processes of a machine that share a SQLite file.
"""

from afield.ratelimit.controller import RateLimits
from afield.ratelimit.local import Limiter, LocalLimiter, Unlimited
from afield.ratelimit.shared import SharedLimiter

__all__ = ["Limiter", "LocalLimiter", "RateLimits", "SharedLimiter", "Unlimited"]
