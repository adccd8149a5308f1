"""Attempt table of a runtime: running and ended attempts.

An exit is recorded once; later exits of the same attempt are ignored. The table remembers the last
`REMEMBERED` ended attempts, so repeated calls are harmless and memory is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from afield.errors import AfieldError, InfrastructureFailure
from afield.interfaces.runtime import Exit, Phase, SessionStatus
from afield.types import Reason

REMEMBERED = 10_000
E = TypeVar("E", bound=AfieldError)


class AttemptTable:
    """Attempts by session id. Not thread-safe: use it from one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[Exit]] = {}
        self._ended: dict[str, Exit] = {}
        self._since: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._running))

    def begin(self, session_id: str) -> bool:
        """Add a running attempt; returns False if it is already running or has ended."""
        if session_id in self._running or session_id in self._ended:
            return False
        self._running[session_id] = asyncio.get_running_loop().create_future()
        self._since[session_id] = time.time()
        return True

    async def launch_once(
        self,
        session_id: str,
        launches: dict[str, asyncio.Task[E | None]],
        start: Callable[[], asyncio.Task[E | None]],
    ) -> None:
        """Launch an attempt, or join its launch in progress. Does not launch an attempt that has ended.

        Raises the failure that the task of `start` returns.
        """
        if self.begin(session_id):
            launches[session_id] = start()
            launches[session_id].add_done_callback(lambda _: launches.pop(session_id, None))
        if task := launches.get(session_id):
            # Shield: cancelling one caller must not cancel the launch, which other callers may have joined.
            failure = await asyncio.shield(task)
            if failure is not None:
                raise failure

    def is_running(self, session_id: str) -> bool:
        return session_id in self._running

    def has_finished(self, session_id: str) -> bool:
        """Whether the attempt ended without a failure."""
        ended = self._ended.get(session_id)
        return ended is not None and ended.failure is None

    def record_exit(self, session_id: str, exit: Exit) -> None:
        """Record the exit of a running attempt and wake its waiters."""
        future = self._running.pop(session_id, None)
        if future is None:
            return
        self._since.pop(session_id, None)
        self._ended[session_id] = exit
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if not future.done():
            future.set_result(exit)

    def discard(self, session_id: str, exit: Exit) -> None:
        """Remove an attempt that never started, so that it can be launched again. Waiters get `exit`."""
        if self.is_running(session_id):
            self.record_exit(session_id, exit)
            del self._ended[session_id]

    def status(
        self,
        session_id: str,
        where: str = "",
        *,
        pid: int | None = None,
        log: str = "",
        starting: bool = False,
    ) -> SessionStatus:
        """Status of an attempt as this process knows it; the other arguments apply only while it runs."""
        if not self.is_running(session_id):
            phase = Phase.ENDED if session_id in self._ended else Phase.UNKNOWN
            return SessionStatus(session_id=session_id, phase=phase)
        phase = Phase.STARTING if starting else Phase.RUNNING
        return SessionStatus(
            session_id=session_id,
            phase=phase,
            where=where or (f"pid {pid}" if pid else ""),
            pid=pid,
            log=log,
            since=self._since.get(session_id),
        )

    async def wait(self, session_id: str) -> Exit:
        """Wait for the exit. An unknown attempt returns a failed exit with reason DIED."""
        if future := self._running.get(session_id):
            # Shield: cancelling one waiter must not cancel the future for the others.
            return await asyncio.shield(future)
        return self._ended.get(session_id) or failed_exit(f"{session_id} is not running here", Reason.DIED)


def failed_exit(message: str, reason: Reason, log: str = "") -> Exit:
    """Exit with an infrastructure failure."""
    return Exit(InfrastructureFailure(message, reason).failure, log)
