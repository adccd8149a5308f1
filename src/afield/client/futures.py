"""RolloutFuture: result of a submitted rollout, for threads and event loops.

1. `result` returns a rollout with a reward or a policy failure and raises other failures; `finished` returns
   any rollout, with its failure as data.
2. Results are read from disk when they are requested, so that futures stay small.
3. A wait that times out or is cancelled ends the rollout and its session.
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
    """The caller's or the rollout's own deadline passed. Its session was ended."""


class RolloutFuture:
    """Future of one rollout, returned by `RolloutClient.submit`.

    `end` ends the rollout with a reason; `read` loads its result by rollout id.
    """

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
        self._summary: futures.Future[RolloutSummary] = futures.Future()
        self._claim = threading.Lock()
        self._local_result: RolloutResult | None = None
        self._began = time.monotonic()
        self._ended: float | None = None

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "running"
        return f"<RolloutFuture {self.rollout.id} {state}>"

    @property
    def elapsed(self) -> float:
        """Seconds since submission; after the end, the duration of the rollout."""
        return (self._ended or time.monotonic()) - self._began

    def done(self) -> bool:
        return self._summary.done()

    def cancelled(self) -> bool:
        return self._summary.cancelled()

    def cancel(self) -> bool:
        """End the rollout and its session; a later outcome is refused. Returns False if it had finished."""
        if not self._claim_completion():
            return self._summary.cancelled()
        self._summary.cancel()
        self._summary.set_running_or_notify_cancel()
        self._end(self, "it was cancelled by its caller")
        return True

    def result(self, timeout: float | None = None) -> RolloutResult:
        """Wait for the result. After `timeout` seconds, end the rollout and raise RolloutTimeout.

        Raises a RolloutFailure for failures other than policy failures, and CancelledError after `cancel`.
        """
        summary = self._wait_summary(timeout)
        failure = summary.outcome.failure
        if failure is not None and failure.kind is not FailureKind.POLICY:
            raise raisable(failure)
        return self._load(summary)

    def finished(self, timeout: float | None = None) -> RolloutResult:
        """Wait for the result and return it, with any failure in its outcome."""
        return self._load(self._wait_summary(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the result and return the exception that `result` raises, or None."""
        self._wait(timeout)
        if (error := self._summary.exception()) is not None:
            return error
        failure = self._summary.result().outcome.failure
        return raisable(failure) if failure and failure.kind is not FailureKind.POLICY else None

    def __await__(self) -> Generator[Any, None, RolloutResult]:
        return self._await_result().__await__()

    async def _await_result(self) -> RolloutResult:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the waiting loop is closed
                loop.call_soon_threadsafe(lambda: woken.done() or woken.set_result(None))

        self._summary.add_done_callback(wake)
        try:
            await woken
        except asyncio.CancelledError:
            self.cancel()
            raise
        return await asyncio.to_thread(self.result, 0)

    def add_done_callback(self, call: Callable[[RolloutFuture], object]) -> None:
        """Call `call` when the rollout is done, in the client's thread, or now if it is done already.

        The callback must not block.
        """
        self._summary.add_done_callback(lambda _: call(self))

    # --- called by the client --------------------------------------------------------------------

    def set_summary(self, summary: RolloutSummary) -> bool:
        """Complete the future; returns False if it was completed before."""
        if claimed := self._claim_completion():
            self._summary.set_result(summary)
        return claimed

    def fail(self, error: BaseException) -> bool:
        if claimed := self._claim_completion():
            self._summary.set_exception(error)
        return claimed

    def expire(self, message: str, attempts: int = 1) -> bool:
        """End the rollout with a timeout failure; returns False if it was done before."""
        failure = Failure(FailureKind.INFRASTRUCTURE, Reason.TIMEOUT, message)
        outcome = wire.failed(self.rollout.id, attempts, failure)
        if claimed := self._claim_completion():
            self._local_result = RolloutResult(rollout=self.rollout, outcome=outcome, attempts=attempts)
            self._summary.set_result(RolloutSummary(outcome, attempts))
            self._end(self, message)
        return claimed

    def _claim_completion(self) -> bool:
        """Claim the right to complete the future; returns True to the first caller only."""
        if not self._claim.acquire(blocking=False):
            return False
        self._ended = time.monotonic()
        return True

    def _wait_summary(self, timeout: float | None) -> RolloutSummary:
        self._wait(timeout)
        return self._summary.result()

    def _wait(self, timeout: float | None) -> None:
        if not futures.wait([self._summary], timeout).done:
            self.expire(f"{self.rollout.id} had no outcome in the {timeout:g} s that its caller waited")

    def _load(self, summary: RolloutSummary) -> RolloutResult:
        return self._local_result or self._read(summary.outcome.rollout_id)


def raisable(failure: Failure) -> RolloutFailure:
    """Return the exception of a failure's kind, with the remote traceback as a note."""
    late = failure.kind is FailureKind.INFRASTRUCTURE and failure.reason is Reason.TIMEOUT
    error = (RolloutTimeout if late else ERRORS[failure.kind])(failure.message, failure.reason)
    if failure.traceback:
        error.add_note(failure.traceback)
    return error
