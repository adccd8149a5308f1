"""The attempts a runtime has taken on, and how each one ended.

An exit is settled once; later ones change nothing. The ended are remembered up to a bound, so that
repeating a verb stays harmless without growing for ever.
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


class Attempts:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[Exit]] = {}
        self._ended: dict[str, Exit] = {}
        self._since: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._running))

    def begin(self, session_id: str) -> bool:
        """False when it is known already, running or ended."""
        if session_id in self._running or session_id in self._ended:
            return False
        self._running[session_id] = asyncio.get_running_loop().create_future()
        self._since[session_id] = time.time()
        return True

    async def once(
        self,
        session_id: str,
        launches: dict[str, asyncio.Task[E | None]],
        start: Callable[[], asyncio.Task[E | None]],
    ) -> None:
        """Launch it, or join the launch that is under way; one that is over is not repeated. Raises the
        failure that `start` ends with.
        """
        if self.begin(session_id):
            launches[session_id] = start()
            launches[session_id].add_done_callback(lambda _: launches.pop(session_id, None))
        if task := launches.get(session_id):
            # Shielded: a caller that gives up can still stop what it launched.
            failure = await asyncio.shield(task)
            if failure is not None:
                raise failure

    def running(self, session_id: str) -> bool:
        return session_id in self._running

    def finished(self, session_id: str) -> bool:
        """Whether it is known to have ended by itself, with nothing broken."""
        ended = self._ended.get(session_id)
        return ended is not None and ended.failure is None

    def settle(self, session_id: str, exit: Exit) -> None:
        future = self._running.pop(session_id, None)
        if future is None:
            return
        self._since.pop(session_id, None)
        self._ended[session_id] = exit
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if not future.done():
            future.set_result(exit)

    def forget(self, session_id: str, exit: Exit) -> None:
        """It never began, and may be begun again; whoever waits for it is told `exit`."""
        if self.running(session_id):
            self.settle(session_id, exit)
            del self._ended[session_id]

    def live(self, session_id: str, where: str = "", *, starting: bool = False) -> SessionStatus:
        """What is known of it here; `where` and `starting` are told of one that runs."""
        if not self.running(session_id):
            phase = Phase.ENDED if session_id in self._ended else Phase.UNKNOWN
            return SessionStatus(session_id=session_id, phase=phase)
        phase = Phase.STARTING if starting else Phase.RUNNING
        return SessionStatus(
            session_id=session_id, phase=phase, where=where, since=self._since.get(session_id)
        )

    async def exit(self, session_id: str) -> Exit:
        if future := self._running.get(session_id):
            # Shielded: one waiter that gives up must not end the attempt for the others.
            return await asyncio.shield(future)
        return self._ended.get(session_id) or broken(f"{session_id} is not running here", Reason.DIED)


def broken(message: str, reason: Reason, log: str = "") -> Exit:
    return Exit(InfrastructureFailure(message, reason).failure, log)
