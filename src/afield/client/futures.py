"""A rollout that was submitted: any thread may wait for it, any event loop may await it.

What came of a rollout is read from disk when it is asked for, so that ten thousand futures cost little.
`result` gives a rollout that carries a reward or failed by the policy's own doing, and raises any other
failure with its type; `finished` gives either as data. Waiting that runs out of time, or is cancelled,
ends the rollout and its session wherever it runs: nobody else would.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from typing import Any

from afield import wire
from afield.errors import (
    InfrastructureFailure,
    PolicyFailure,
    RolloutFailure,
    TaskFailure,
    VerifierFailure,
)
from afield.orchestrator.state import RolloutSummary
from afield.types import Failure, FailureKind, Reason, Rollout, RolloutResult

ERRORS: dict[FailureKind, type[RolloutFailure]] = {
    error.kind: error for error in (PolicyFailure, TaskFailure, VerifierFailure, InfrastructureFailure)
}


class RolloutTimeout(InfrastructureFailure, TimeoutError):
    """A deadline ran out, the caller's or the rollout's own. Its session was ended."""


class RolloutFuture:
    """Made by `RolloutClient.submit`. `end` gives a rollout up; `read` finds what came of it."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        end: Callable[[RolloutFuture, str], None],
        read: Callable[[str], RolloutResult],
    ) -> None:
        self.rollout = rollout
        self._end = end
        self._read = read
        self._note: futures.Future[RolloutSummary] = futures.Future()
        self._claim = threading.Lock()
        self._unread: RolloutResult | None = None
        self._began = time.monotonic()
        self._ended: float | None = None

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "running"
        return f"<RolloutFuture {self.rollout.id} {state}>"

    @property
    def elapsed(self) -> float:
        """Seconds since it was submitted, or that it took."""
        return (self._ended or time.monotonic()) - self._began

    def done(self) -> bool:
        return self._note.done()

    def cancelled(self) -> bool:
        return self._note.cancelled()

    def cancel(self) -> bool:
        """End the rollout and its session. False when it was done before; whatever still comes is refused."""
        if not self._claimed():
            return self._note.cancelled()
        self._note.cancel()
        self._note.set_running_or_notify_cancel()
        self._end(self, "it was cancelled by its caller")
        return True

    def result(self, timeout: float | None = None) -> RolloutResult:
        """What came of it. After `timeout` seconds it is given up, and TimeoutError is raised.

        Raises the RolloutFailure when it failed by no doing of the policy, and CancelledError when it was
        cancelled.
        """
        note = self._within(timeout)
        failure = note.outcome.failure
        if failure is not None and failure.kind is not FailureKind.POLICY:
            raise raisable(failure)
        return self._found(note)

    def finished(self, timeout: float | None = None) -> RolloutResult:
        """What came of it, where a failure of any kind is part of the outcome."""
        return self._found(self._within(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, or None."""
        self._wait(timeout)
        if (error := self._note.exception()) is not None:
            return error
        failure = self._note.result().outcome.failure
        return raisable(failure) if failure and failure.kind is not FailureKind.POLICY else None

    def __await__(self) -> Generator[Any, None, RolloutResult]:
        return self._awaited().__await__()

    async def _awaited(self) -> RolloutResult:
        loop = asyncio.get_running_loop()
        told = loop.create_future()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
                loop.call_soon_threadsafe(lambda: told.done() or told.set_result(None))

        self._note.add_done_callback(tell)
        try:
            await told
        except asyncio.CancelledError:
            self.cancel()
            raise
        return await asyncio.to_thread(self.result, 0)

    def add_done_callback(self, call: Callable[[RolloutFuture], object]) -> None:
        """Called once it is done, in the client's thread (or here, if it is done): it must not wait."""
        self._note.add_done_callback(lambda _: call(self))

    # --- the client's side -----------------------------------------------------------------------

    def settle(self, note: RolloutSummary) -> bool:
        """The first word counts."""
        if claimed := self._claimed():
            self._note.set_result(note)
        return claimed

    def fail(self, error: BaseException) -> bool:
        if claimed := self._claimed():
            self._note.set_exception(error)
        return claimed

    def expire(self, told: str, attempts: int = 1) -> bool:
        """Give it up for want of time. False when it was done before."""
        failure = Failure(FailureKind.INFRASTRUCTURE, Reason.TIMEOUT, told)
        outcome = wire.failed(self.rollout.id, attempts, failure)
        if claimed := self._claimed():
            self._unread = RolloutResult(rollout=self.rollout, outcome=outcome, attempts=attempts)
            self._note.set_result(RolloutSummary(outcome, attempts))
            self._end(self, told)
        return claimed

    def _claimed(self) -> bool:
        """True for the one caller that decides how this ends."""
        if not self._claim.acquire(blocking=False):
            return False
        self._ended = time.monotonic()
        return True

    def _within(self, timeout: float | None) -> RolloutSummary:
        self._wait(timeout)
        return self._note.result()

    def _wait(self, timeout: float | None) -> None:
        if not futures.wait([self._note], timeout).done:
            self.expire(f"{self.rollout.id} had no outcome in the {timeout:g} s that its caller waited")

    def _found(self, note: RolloutSummary) -> RolloutResult:
        return self._unread or self._read(note.outcome.rollout_id)


def raisable(failure: Failure) -> RolloutFailure:
    """A failure as the exception of its kind, with what the agent's side said of it."""
    late = failure.kind is FailureKind.INFRASTRUCTURE and failure.reason is Reason.TIMEOUT
    made = (RolloutTimeout if late else ERRORS[failure.kind])(failure.message, failure.reason)
    if failure.traceback:
        made.add_note(failure.traceback)
    return made
