"""Values to objects; the only package that names a backend.

Backends are imported when they are chosen, so that a missing library is reported with the extra that
brings it, and a choice that does not exist with the choices that do.
"""

from __future__ import annotations

from afield.factory.checks import check_choices, check_place, check_reach, check_trust
from afield.factory.engines import engine, pool, published_dtype
from afield.factory.registry import ENGINES, RUNTIMES, START_TIMEOUT_S, TAKES_TARGET, TOLD, choose, load
from afield.factory.runs import limiter, plan, trainer, transport, window
from afield.factory.runtimes import runtime, verifiers

__all__ = [
    "ENGINES",
    "RUNTIMES",
    "START_TIMEOUT_S",
    "TAKES_TARGET",
    "TOLD",
    "check_choices",
    "check_place",
    "check_reach",
    "check_trust",
    "choose",
    "engine",
    "limiter",
    "load",
    "plan",
    "pool",
    "published_dtype",
    "runtime",
    "trainer",
    "transport",
    "verifiers",
    "window",
]
