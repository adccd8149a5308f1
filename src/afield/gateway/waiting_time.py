"""Who stands in line: how long nobody worked on what a session had asked, as far as the gateway knows.

A call stands in line while it has no worker, while sampling is paused, and while its engine has given
nothing: a streamed one until its first token, any other while its engine says that it had no room for it.
Calls side by side wait together: no second counts twice. What an engine does not tell of its own queue is
not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class _Place:
    __slots__ = ("since", "total", "until", "waiting")

    def __init__(self) -> None:
        self.waiting: set[Hashable] = set()
        self.since = 0.0
        self.total = 0.0
        self.until = 0.0  # what was before this has been counted

    def count(self, start: float, end: float) -> None:
        self.total += max(0.0, end - max(start, self.until))
        self.until = max(self.until, end)


class QueueTime:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._places: dict[str, _Place] = {}

    def enter(self, session_id: str, call: Hashable) -> None:
        """Repeating is harmless, as is leaving twice."""
        place = self._places.setdefault(session_id, _Place())
        if not place.waiting:
            place.since = self._clock()
        place.waiting.add(call)

    def leave(self, session_id: str, call: Hashable) -> None:
        place = self._places.get(session_id)
        if place is None or call not in place.waiting:
            return
        place.waiting.discard(call)
        if not place.waiting:
            place.count(place.since, self._clock())

    def stood(self, session_id: str, start: float, end: float) -> None:
        """A wait that is known only when it is over."""
        if end > start:
            self._places.setdefault(session_id, _Place()).count(start, end)

    def waited_s(self, session_id: str) -> float:
        place = self._places.get(session_id)
        if place is None:
            return 0.0
        now = max(0.0, self._clock() - max(place.since, place.until)) if place.waiting else 0.0
        return place.total + now

    def forget(self, session_id: str) -> None:
        self._places.pop(session_id, None)
