"""Queue time: how long calls of a session wait for an engine.

A call is queued while it has no worker, while sampling is paused, and while its engine has not started
it: a streamed call until its first token, any other while the engine reports it as waiting. Parallel
calls of a session count once. Queues that an engine does not report are unknown here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable

from afield.errors import AfieldError
from afield.gateway.workers import EngineWorker
from afield.interfaces import Queueing


class _SessionWait:
    """Queue time of one session."""

    __slots__ = ("since", "total", "until", "waiting")

    def __init__(self) -> None:
        self.waiting: set[Hashable] = set()
        self.since = 0.0
        self.total = 0.0
        self.until = 0.0  # time up to which waits are counted

    def count(self, start: float, end: float) -> None:
        self.total += max(0.0, end - max(start, self.until))
        self.until = max(self.until, end)


class QueueTime:
    """Queue time per session, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _SessionWait] = {}

    def enter(self, session_id: str, call: Hashable) -> None:
        """Marks a call as queued. Idempotent, as is `leave`."""
        wait = self._sessions.setdefault(session_id, _SessionWait())
        if not wait.waiting:
            wait.since = self._clock()
        wait.waiting.add(call)

    def leave(self, session_id: str, call: Hashable) -> None:
        wait = self._sessions.get(session_id)
        if wait is None or call not in wait.waiting:
            return
        wait.waiting.discard(call)
        if not wait.waiting:
            wait.count(wait.since, self._clock())

    def add(self, session_id: str, start: float, end: float) -> None:
        """Adds a wait that is known after its end."""
        if end > start:
            self._sessions.setdefault(session_id, _SessionWait()).count(start, end)

    def waited_s(self, session_id: str) -> float:
        wait = self._sessions.get(session_id)
        if wait is None:
            return 0.0
        now = max(0.0, self._clock() - max(wait.since, wait.until)) if wait.waiting else 0.0
        return wait.total + now

    def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)


log = logging.getLogger(__name__)
LOOK_S = 2.0
"""Interval between queries of engine queues, in seconds."""
ANSWER_S = 5.0
"""Timeout for an engine's answer, in seconds."""


class QueueWatch:
    """Asks engines for the number of waiting calls, for calls that are not streamed.

    Engines serve queues in order, so the newest calls without output are the waiting ones. An engine is
    asked while such calls are older than `LOOK_S`. `run` repeats `look` until cancelled.
    """

    def __init__(self, queue_time: QueueTime, workers: Callable[[], Iterable[EngineWorker]]) -> None:
        self._line = queue_time
        self._workers = workers

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self, after_s: float = LOOK_S) -> None:
        now = time.monotonic()
        for worker in list(self._workers()):
            waiting_calls = [f for f in worker.running_calls if f.awaits_first_token and not f.streams]
            if worker.frozen or not any(now - call.started_at >= after_s for call in waiting_calls):
                continue
            waiting = await self._waiting(worker)
            if waiting is None:
                continue
            waiting_calls = sorted(
                (f for f in waiting_calls if f.awaits_first_token), key=lambda call: -call.started_at
            )
            for call in waiting_calls[:waiting]:
                self._line.enter(call.session_id, call)
            for call in waiting_calls[waiting:]:
                self._line.leave(call.session_id, call)

    async def _waiting(self, worker: EngineWorker) -> int | None:
        if not isinstance(worker.engine, Queueing):
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                return await worker.engine.waiting()
        except (AfieldError, OSError, ValueError) as error:
            log.debug("worker %s: queue length unknown error=%s", worker.id, error)
            return None
