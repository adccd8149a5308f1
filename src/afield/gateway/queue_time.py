"""Time that calls spend in the queues of engines, for calls that are not streamed.

A streamed call is in line until its first token. One that is not streamed gives nothing until its end, so
the engine is asked how many calls wait: queues are served in order, so those are the newest that gave
nothing yet. An engine is asked only while such calls are older than `LOOK_S`, every so often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from afield.errors import AfieldError
from afield.gateway.waiting_time import QueueTime
from afield.gateway.workers import Worker
from afield.interfaces import Queueing

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
