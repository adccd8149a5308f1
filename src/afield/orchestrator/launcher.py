"""Launcher: opens sessions, builds payloads, launches and stops agents.

Launches and stops wait for the rate limiter. A rate-limited launch is repeated at a lower rate and does not
use up a retry of the rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import blake2b
from typing import Any, TypeVar

from afield import wire
from afield.errors import Outage, RateLimited, WireError
from afield.interfaces import Gateway, Runtime, SessionSpec, TaskPreparer, Transport
from afield.orchestrator.availability import (
    Availability,
    describe_error,
    failure_from_error,
    infrastructure_failure,
    loop_time,
)
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.watcher import RunningAttempt
from afield.ratelimit import Limiter
from afield.settings.sessions import policies_of
from afield.types import Attempt, Failure, FailureKind, Reason
from afield.utils.telemetry import attempt_ids
from afield.wire import Invocation

log = logging.getLogger(__name__)

GATEWAY_SLACK_S = 3_600.0
"""Seconds by which a session outlives its attempt's deadline in the gateway."""
OPEN_GRACE_S = 30.0
"""Seconds that a sent `open` has to finish after its attempt was cancelled."""
T = TypeVar("T")
Payload = Callable[[RunningAttempt], Awaitable[dict[str, Any]]]
"""Builds the payload of an attempt."""


class _Refusals:
    """Rate-limit refusals of one launch."""

    def __init__(self) -> None:
        self.since = math.inf
        """Time of the first refusal; infinity before."""
        self.message = ""
        """Message of the last refusal."""

    def add(self, error: RateLimited) -> None:
        self.since = min(self.since, loop_time())
        self.message = describe_error(error)


class Launcher:
    """Launches and stops attempts in one runtime."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        limiter: Limiter,
        gateway_calls: Availability,
    ) -> None:
        self.config = config
        self.gateway = gateway
        self.runtime = runtime
        self.gateway_calls = gateway_calls
        self._transport = transport
        self._limiter = limiter
        self._launched_at = -math.inf
        """Time of the last launch that succeeded."""
        self._refused: set[_Refusals] = set()
        """Refusals of all launches that the runtime refuses now."""

    async def launch(self, running: RunningAttempt, payload: Payload | None = None) -> Failure | None:
        """Launch an attempt; returns None once the agent has its payload, else the failure."""
        queue_timeout_s = self.config.deadlines.queue_timeout_s
        end = None if queue_timeout_s is None else loop_time() + queue_timeout_s
        refusals = _Refusals()
        try:
            while running.abandon_failure is None:
                left = None if end is None else end - loop_time()
                async with running.bounded(left) as queueing, self._limiter.launch_slot():
                    queueing.reschedule(None)
                    try:
                        failure = await self._start(running, payload or self._payload)
                    except RateLimited as error:
                        self._limiter.slow_down(error.retry_after_s)
                        refusals.add(error)
                        self._refused.add(refusals)
                        running.throttle_message = refusals.message
                    else:
                        if failure is None:
                            self._launched_at = loop_time()
                        return failure
                if end is not None and loop_time() >= end:
                    raise TimeoutError
                if failure := self._refused_alone(refusals):
                    return failure
            return running.abandon_failure
        except TimeoutError:
            message = (
                f"it was not launched within {queue_timeout_s} s;"
                " raise queue_timeout_s, or the rate of launches"
            )
            return running.abandon_failure or infrastructure_failure(message, Reason.LAUNCH)
        finally:
            self._refused.discard(refusals)

    def _refused_alone(self, refusals: _Refusals) -> Failure | None:
        """Return the failure of an attempt that the runtime refuses while it accepts others."""
        refused_s = loop_time() - refusals.since
        if refused_s <= self.config.unavailable_timeout_s:
            return None
        if self._launched_at <= refusals.since and len(self._refused) > 1:
            return None  # the runtime refuses all attempts
        return infrastructure_failure(
            f"the runtime refused to launch it for {refused_s:.0f} s: {refusals.message}", Reason.LAUNCH
        )

    async def _start(self, running: RunningAttempt, build_payload: Payload) -> Failure | None:
        """Open the session and launch. Raises RateLimited and Outage; other errors become the failure."""
        try:
            payload = await build_payload(running)
        except Outage:
            raise
        except WireError as error:
            return Failure(FailureKind.TASK, Reason.LAUNCH, str(error))
        except Exception as error:
            return running.abandon_failure or failure_from_error(
                error, "no session was opened for it", Reason.LAUNCH
            )
        if running.abandon_failure:
            return running.abandon_failure
        launch_timeout_s = self.config.deadlines.launch_timeout_s
        running.launch_requested = True
        limit: asyncio.Timeout | None = None
        try:
            async with running.bounded(launch_timeout_s) as limit:
                await self.runtime.launch(running.runtime_attempt, payload)
        except (RateLimited, Outage):
            raise
        except Exception as error:
            if running.abandon_failure or limit is None or not limit.expired():
                return running.abandon_failure or failure_from_error(
                    error, "it was not launched", Reason.LAUNCH
                )
            message = (
                f"the agent had not accepted its payload after {launch_timeout_s:g} s;"
                " raise launch_timeout_s if it needs longer"
            )
            return infrastructure_failure(message, Reason.TIMEOUT)
        running.progress.launched_at = loop_time()
        return None

    async def _payload(self, running: RunningAttempt) -> dict[str, Any]:
        """Payload of an agent."""
        role = "judged" if self.config.separate_verifier else "agent"
        task = running.pending.rollout.task
        if isinstance(self.runtime, TaskPreparer):
            await self.runtime.prepare(task)
        return wire.build_payload(task, await self.invocation(running, role))

    async def invocation(self, running: RunningAttempt, role: str) -> Invocation:
        """Open the session and build the `_rollout` object of an agent or verifier.

        Repeating returns the same object.
        """
        rollout = running.pending.rollout
        # The gateway may serve a sent request after the abort that follows a cancellation, and would leave
        # the session open. So a request in flight is awaited.
        grace_s = min(OPEN_GRACE_S, self.config.call_timeout_s)
        credentials = await self.gateway_calls.call(
            "open", lambda: shield_and_wait(self.gateway.open(self._spec(running)), grace_s)
        )
        delivery = self._transport.address(rollout.exp_id)
        if self.config.deliver == "gateway":
            delivery = {"outcome_url": f"{credentials.base_url}/outcome"}
        return wire.invocation_for(
            rollout,
            running.runtime_attempt,
            base_url=credentials.base_url,
            api_key=(credentials.verifier_key or "") if role == "verifier" else credentials.api_key,
            model_id=self.config.model_id,
            sampling=rollout.sampling or self.config.sampling,
            seed=int.from_bytes(blake2b(running.draw.encode(), digest_size=4).digest()),
            args=dict(self.config.agent_args),
            traceparent=self._traceparent(running.pending.attempt),
            role=role,
            reward_from=self.config.reward_from,
            **delivery,
        )

    def _spec(self, running: RunningAttempt) -> SessionSpec:
        rollout, attempt, draw = running.pending.rollout, running.pending.attempt, running.draw
        return SessionSpec(
            id=attempt.session_id,
            rollout_id=rollout.id,
            attempt=attempt.n,
            group_id=rollout.group_id,
            exp_id=rollout.exp_id,
            input_id=rollout.task.id,
            draw=draw if draw != attempt.session_id else None,
            split=rollout.split,
            reward_from="verifier" if self.config.separate_verifier else self.config.reward_from,
            verdicts=self.config.max_verdicts,
            sampling=rollout.sampling or self.config.sampling,
            budget=self.config.budget,
            **policies_of(self.config),
            ttl_s=self.config.deadlines.attempt_timeout_s + GATEWAY_SLACK_S,
            metadata={"traceparent": parent} if (parent := self._traceparent(attempt)) else {},
        )

    def _traceparent(self, attempt: Attempt) -> str:
        """Trace context of an attempt; empty without traces."""
        seed = self.config.trace_seed
        return attempt_ids(seed, attempt.rollout_id, attempt.session_id).traceparent if seed else ""

    async def stop(self, attempt: Attempt) -> None:
        """Stop an agent; a stop that fails is logged."""
        try:
            await self._stop(attempt)
        except TimeoutError:
            teardown_timeout_s = self.config.deadlines.teardown_timeout_s
            log.warning(
                "attempt %s: not stopped within teardown_timeout_s=%g", attempt.session_id, teardown_timeout_s
            )
        except Exception as error:
            log.warning("attempt %s: not stopped: %s", attempt.session_id, describe_error(error))

    async def _stop(self, attempt: Attempt) -> None:
        """Stop with retries while rate-limited; `teardown_timeout_s` excludes the wait for the limiter."""
        end = loop_time() + self.config.unavailable_timeout_s
        while True:
            async with self._limiter.call_slot(), asyncio.timeout(self.config.deadlines.teardown_timeout_s):
                try:
                    return await self.runtime.stop(attempt)
                except RateLimited as error:
                    self._limiter.slow_down(error.retry_after_s, stop=True)
                    if loop_time() > end:
                        raise


async def shield_and_wait(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Await work; when the caller is cancelled, wait up to `limit_s` for it before cancelling it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=limit_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
