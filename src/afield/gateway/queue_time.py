"""Who stands in line: how long nobody worked on what a session had asked, as far as the gateway knows.

A call stands in line while it has no worker, while sampling is paused, and while its engine has given
nothing: a streamed one until its first token, any other while its engine says that it had no room for it.
Calls side by side wait together: no second counts twice. What an engine does not tell of its own queue is
not known here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable

from afield.errors import AfieldError
from afield.gateway.workers import Worker
from afield.interfaces import Queueing


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


log = logging.getLogger("afield.gateway")
LOOK_S = 2.0
ANSWER_S = 5.0


class QueueWatch:
    """`run` goes on until it is cancelled; `look` is one look at all workers."""

    def __init__(self, line: QueueTime, workers: Callable[[], Iterable[Worker]]) -> None:
        self._line = line
        self._workers = workers

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self, after_s: float = LOOK_S) -> None:
        now = time.monotonic()
        for worker in list(self._workers()):
            silent = [f for f in worker.flights if f.silent and not f.streams]
            if worker.frozen or not any(now - flight.boarded >= after_s for flight in silent):
                continue
            waiting = await self._waiting(worker)
            if waiting is None:
                continue
            silent = sorted((f for f in silent if f.silent), key=lambda flight: -flight.boarded)
            for flight in silent[:waiting]:
                self._line.enter(flight.session_id, flight)
            for flight in silent[waiting:]:
                self._line.leave(flight.session_id, flight)

    async def _waiting(self, worker: Worker) -> int | None:
        if not isinstance(worker.engine, Queueing):
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                return await worker.engine.waiting()
        except (AfieldError, OSError, ValueError) as error:
            log.debug("worker %s does not say how many calls wait: %s", worker.id, error)
            return None
