"""Gauges in the Prometheus text that engines serve."""

from __future__ import annotations

import re


def gauge(text: bytes, name: str) -> int | None:
    """The sum of a gauge over all its labels; None where it is not told."""
    found = re.findall(
        rb"^" + re.escape(name.encode()) + rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)$", text, re.MULTILINE
    )
    return round(sum(map(float, found))) if found else None
