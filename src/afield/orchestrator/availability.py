"""Retries with back-off for calls to the gateway and the outcome store.

1. Each try is limited to `call_timeout_s`. Unavailable, RateLimited, connection errors and timeouts are
   retried with exponential back-off until `unavailable_timeout_s`.
2. Then, if the component answers other callers, the error fails one rollout; if it answers no caller, it is
   an Outage, which ends the run. (`tenacity` and `stamina` keep no state across callers.)
3. A batch request that fails because of one session is split, and that session is left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from afield.errors import AfieldError, Outage, RateLimited, RolloutFailure, Unavailable
from afield.orchestrator.config import RolloutConfig
from afield.types import Failure, FailureKind, Reason
from afield.utils.backoff import Backoff

log = logging.getLogger(__name__)

BACKOFF_S = (0.2, 5.0)  # seconds between two tries: first, longest
T = TypeVar("T")
I = TypeVar("I")  # noqa: E741  item of a batch request
UNANSWERED = (Unavailable, RateLimited, OSError)  # TimeoutError is an OSError


class Availability:
    """Calls one component for many rollouts. `probe` is a cheap call that concerns no rollout."""

    def __init__(self, part: str, config: RolloutConfig, probe: Callable[[], Awaitable[object]]) -> None:
        self._part = part
        self._config = config
        self._probe = probe
        self._answered: dict[str, float] = {}  # by method: time of the last answer to any caller
        self._failing: Counter[str] = Counter()  # by method: number of callers that are retrying

    async def call(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Call with retries. Raises the component's own error, Unavailable for this caller, or Outage."""
        began = loop_time()
        end = began + self._config.unavailable_timeout_s
        backoff = Backoff(*BACKOFF_S)
        failing = False
        try:
            while True:
                try:
                    answer = await self._once(call, end - loop_time())
                    self._answered[method] = loop_time()
                    return answer
                except UNANSWERED as error:
                    last = error
                except AfieldError:
                    self._answered[method] = loop_time()
                    raise
                if not failing:
                    failing = True
                    self._failing[method] += 1
                    message = "%s, %s: %s; tried again for up to %g s"
                    log.warning(
                        message, self._part, method, describe_error(last), self._config.unavailable_timeout_s
                    )
                wait_s = (last.retry_after_s if isinstance(last, RateLimited) else None) or backoff.next_s
                if loop_time() + wait_s > end:
                    raise await self._verdict(method, began, last) from last
                await asyncio.sleep(wait_s)
                backoff.advance()
        finally:
            if failing:
                self._failing[method] -= 1

    async def call_in_batches(
        self, call: Callable[[Sequence[I]], Awaitable[T]], items: Sequence[I], limit_s: float
    ) -> tuple[list[T], list[I]]:
        """Call with many items, without retries; returns the answers and the items without an answer.

        A failed batch is split in halves. Raises the error if the component does not answer the probe, or if
        too many batches fail.
        """
        answers: list[T] = []
        unanswered: list[I] = []
        pending, failures = [list(items)] if items else [], 0
        while pending:
            batch = pending.pop()
            try:
                answers.append(await self._once(call, limit_s, batch))
                continue
            except Exception as error:
                failures += 1
                if failures == 1 and not await self.alive():
                    raise
                if failures > 4 + 4 * math.ceil(math.log2(1 + len(items))):
                    raise
                if len(batch) == 1:
                    log.warning(
                        "%s: no answer about one of %d: %s", self._part, len(items), describe_error(error)
                    )
                    unanswered += batch
            if len(batch) > 1:
                pending += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
        return answers, unanswered

    async def alive(self) -> bool:
        """Whether the component answers the probe."""
        try:
            await self._once(self._probe, self._config.unavailable_timeout_s)
        except UNANSWERED as error:
            log.warning("%s does not answer: %s", self._part, describe_error(error))
            return False
        except AfieldError:
            return True
        return True

    async def _once(self, call: Callable[..., Awaitable[T]], left_s: float, *args: object) -> T:
        limit_s = max(0.0, min(self._config.call_timeout_s, left_s))
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await call(*args)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise Unavailable(f"{self._part} gave no answer within {limit_s:g} s") from error

    async def _verdict(self, method: str, began: float, last: Exception) -> Unavailable:
        """Return Outage, or Unavailable if the component answers other callers."""
        message = (
            f"{self._part} did not answer {method} for {loop_time() - began:.0f} s: {describe_error(last)}"
        )
        own = Unavailable(f"{message}; it answers others")
        if self._answered.get(method, -math.inf) > began:
            return own
        if self._failing[method] == 1 and await self.alive():
            return own
        return Outage(f"{message}; start it again, then resume the run with --resume")


def describe_error(error: BaseException) -> str:
    """Format the class and message of an error."""
    return f"{type(error).__name__}: {error}".rstrip(": ")


def failure_from_error(error: Exception, doing: str, reason: Reason = Reason.RAISED) -> Failure:
    """Convert an error to a failure; a RolloutFailure keeps its own kind."""
    if isinstance(error, RolloutFailure):
        return error.failure
    text = "".join(traceback.format_exception(error))
    return Failure(FailureKind.INFRASTRUCTURE, reason, f"{doing}: {describe_error(error)}", text)


def infrastructure_failure(message: str, reason: Reason) -> Failure:
    return Failure(FailureKind.INFRASTRUCTURE, reason, message)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def retry_unavailable(ask: Callable[[], Awaitable[T]], unavailable_timeout_s: float) -> T:
    """Repeat a call that raises Unavailable, for up to `unavailable_timeout_s`."""
    end = loop_time() + unavailable_timeout_s
    backoff = Backoff(*BACKOFF_S)
    logged = False
    while True:
        try:
            return await ask()
        except Unavailable as error:
            if loop_time() > end:
                raise
            if not logged:
                log.warning("%s; tried again for up to %g s", error, unavailable_timeout_s)
                logged = True
        await backoff.sleep()
