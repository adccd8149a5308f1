"""Exponential back-off: pauses that grow up to a maximum."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Pauses of `first_s`, `factor` times that, and so on up to `longest_s` seconds.

    With `jitter`, each pause is a random part of that, at least half, so that callers do not return together.
    """

    def __init__(
        self, first_s: float, longest_s: float, *, factor: float = 2.0, jitter: bool = False
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._factor = factor
        self._jitter = jitter
        self.next_s = first_s
        """Length of the next pause in seconds, before jitter."""

    def reset(self) -> None:
        """Begin with `first_s` again."""
        self.next_s = self._first_s

    def advance(self) -> float:
        """Return the length of the next pause, and lengthen the one after it."""
        pause_s = self.next_s
        self.next_s = min(self._factor * pause_s, self._longest_s)
        return pause_s * random.uniform(0.5, 1.0) if self._jitter else pause_s

    async def sleep(self) -> None:
        await asyncio.sleep(self.advance())
