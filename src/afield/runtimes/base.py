"""Base of runtimes: launches, and a table of running and ended attempts.

An exit is recorded once; later exits of the same attempt are ignored. The table remembers the last
`REMEMBERED` ended attempts, so repeated calls are harmless and memory is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from afield.errors import AfieldError, InfrastructureFailure, RolloutFailure, TaskFailure, UsageError
from afield.interfaces.runtime import Exit, Phase, SessionStatus
from afield.types import Attempt, Reason

REMEMBERED = 10_000


def image_of_row(payload: Mapping[str, Any], key: str, default: str) -> str:
    """Image that a task row names in the column `key`, else `default`; raises TaskFailure without one."""
    image = (payload.get(key) if key else None) or default
    if isinstance(image, str) and image:
        return image
    if image:
        raise TaskFailure(f"{key} = {image!r} of the task row must name an image", Reason.LAUNCH)
    raise TaskFailure(f"the task row names no image in {key!r}, and image is not set", Reason.LAUNCH)


class AttemptTable:
    """Attempts by session id. Not thread-safe: use it from one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[Exit]] = {}
        self._ended: dict[str, Exit] = {}
        self._since: dict[str, float] = {}
        self.launches: dict[str, asyncio.Task[AfieldError | None]] = {}
        """Launches in progress by session id."""

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
        self, session_id: str, group: asyncio.TaskGroup, launch: Callable[[], Awaitable[None]]
    ) -> None:
        """Run `launch` in a task of `group`, or join the launch in progress.

        Does not launch an attempt that has ended. Records the error that `launch` raises, and raises it.
        """
        if self.begin(session_id):
            self.launches[session_id] = group.create_task(self._run_launch(session_id, launch))
            self.launches[session_id].add_done_callback(lambda _: self.launches.pop(session_id, None))
        if task := self.launches.get(session_id):
            # Shield: cancelling one caller must not cancel the launch, which other callers may have joined.
            failure = await asyncio.shield(task)
            if failure is not None:
                raise failure

    async def _run_launch(self, session_id: str, launch: Callable[[], Awaitable[None]]) -> AfieldError | None:
        """Return the error of a launch: an error that a task raises would end its whole group."""
        try:
            await launch()
        except AfieldError as error:
            self.record_failed_launch(session_id, error)
            return error
        return None

    def record_failed_launch(self, session_id: str, error: AfieldError) -> None:
        """Record a RolloutFailure as the exit; after another error the attempt can be launched again."""
        if isinstance(error, RolloutFailure):
            self.record_exit(session_id, Exit(error.failure))
        else:
            self.discard(session_id, failed_exit(str(error), Reason.LAUNCH))

    def check_not_stopped(self, session_id: str) -> None:
        """Raise InfrastructureFailure if the attempt was stopped during its launch."""
        if not self.is_running(session_id):
            raise InfrastructureFailure(f"{session_id} was stopped before it started", Reason.CANCELLED)

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

    def record_stop(self, session_id: str) -> None:
        self.record_exit(session_id, failed_exit(f"{session_id} was stopped", Reason.CANCELLED))

    def cancel_all(self, detail: str = "") -> None:
        """Record that every running attempt ended because the runtime was closed."""
        for session_id in self:
            message = f"{session_id}: the runtime was closed{detail}"
            self.record_exit(session_id, failed_exit(message, Reason.CANCELLED))

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


class BaseRuntime:
    """Part of a runtime that launches attempts and waits for them.

    A subclass enters `_group` and sets `_open` when it is entered, and launches an attempt in `_launch`.
    """

    _group: asyncio.TaskGroup
    _open = False

    def __init__(self) -> None:
        self._attempts = AttemptTable()

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("call launch inside 'async with runtime'")
        await self._attempts.launch_once(
            attempt.session_id, self._group, lambda: self._launch(attempt, payload)
        )

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.wait(attempt.session_id)

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Start an attempt; raises the error if that fails."""
        raise NotImplementedError


def make_log_dir(log_dir: Path) -> None:
    """Create the directory of the attempts' logs; raises UsageError if that fails."""
    try:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"no logs can be kept in {log_dir}: {error}; choose another") from error


def failed_exit(message: str, reason: Reason, log: str = "") -> Exit:
    """Exit with an infrastructure failure."""
    return Exit(InfrastructureFailure(message, reason).failure, log)
