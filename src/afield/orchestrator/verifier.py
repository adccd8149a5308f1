"""Verifier runner: grades an agent's submission in a separate runtime.

1. The agent is stopped before its verifier starts. Only the verifier's key may give the session a reward.
2. The verdict reaches the store as an outcome.
3. A failed verifier is retried without running the agent again. When the last one fails, the attempt ends
   with a verifier failure.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from afield import wire
from afield.interfaces import SessionState
from afield.orchestrator.availability import describe_error, loop_time
from afield.orchestrator.launcher import Launcher
from afield.orchestrator.watcher import RunningAttempt
from afield.types import Attempt, Failure, FailureKind, Reason
from afield.wire import Submission

log = logging.getLogger(__name__)
APART = 1_000  # offset between attempt numbers of verifiers; above the number of attempts of any rollout
LOOK_S = 0.25


class VerifierRunner:
    """Grades submissions. `agents` and `verifiers` launch in their own runtimes."""

    def __init__(self, agents: Launcher, verifiers: Launcher) -> None:
        self._agents = agents
        self._verifiers = verifiers

    async def submission(self, running: RunningAttempt) -> Submission | None:
        """Return the agent's submission; None until its session is completed or its process has ended."""
        if running.exit is None and running.progress.completed_at is None:
            return None
        gateway = self._agents.gateway
        return await self._agents.gateway_calls.call(
            "submission", lambda: gateway.submission(running.session_id)
        )

    async def grade(self, running: RunningAttempt, submission: Submission) -> Failure | None:
        """Run verifiers until one gives a verdict; returns None, or the failure of the last one.

        A verifier that raises, dies, hangs or gives no verdict is retried, up to `max_verdicts` in total.
        """
        left = running.exit
        if left is None or left.failure or left.lingers:
            await self._agents.stop(running.pending.attempt)
        most = self._agents.config.max_verdicts
        first = min(most, 1 + len((await self._state(running)).failed_verdicts))
        failure = None
        for n in range(first, most + 1):
            failure = await self._once(running, submission, n)
            if failure is None:
                return None
            log.warning(
                "attempt %s: verifier %d of %d failed: %s", running.session_id, n, most, failure.message
            )
            if n < most and running.verifier_attempt:
                await self.stop(running.verifier_attempt)
        return failure

    async def _once(self, running: RunningAttempt, submission: Submission, n: int) -> Failure | None:
        rollout, attempt = running.pending.rollout, running.pending.attempt
        grading = RunningAttempt(rollout, attempt, loop_time(), place=_name(attempt, n))
        grading.draw = running.draw
        running.verifier_attempt = grading.runtime_attempt
        before = len((await self._state(running)).failed_verdicts)

        async def payload(grading: RunningAttempt) -> dict[str, Any]:
            invocation = await self._verifiers.invocation(grading, role="verifier")
            return wire.build_payload(rollout.task, invocation, submission)

        verifier_timeout_s = self._agents.config.deadlines.verifier_timeout_s
        try:
            async with asyncio.timeout(verifier_timeout_s):
                if failure := await self._verifiers.launch(grading, payload):
                    return _verifiers(failure)
                if failure := await self._ended(running, grading, before):
                    return _verifiers(failure)
                return await self._verdict(running, before)
        except TimeoutError:
            message = f"no verdict in {verifier_timeout_s:g} s after the agent submitted its work"
            if grading.throttle_message and not grading.launched:
                message += f"; the runtime refused to launch the verifier: {grading.throttle_message}"
            return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, message)

    async def _ended(self, running: RunningAttempt, grading: RunningAttempt, before: int) -> Failure | None:
        """Wait until the verifier has ended or given a verdict; returns the failure of its process.

        A runtime that cannot report the end is asked again: the verifier may still run.
        """
        unknown = ""
        while True:
            try:
                return (await self._verifiers.runtime.wait(grading.runtime_attempt)).failure
            except Exception as error:
                if not unknown:
                    unknown = describe_error(error)
                    log.warning(
                        "%s: the runtime cannot report the end of its verifier: %s",
                        running.session_id,
                        unknown,
                    )
            state = await self._state(running)
            if state.graded or len(state.failed_verdicts) > before:
                return None
            await asyncio.sleep(LOOK_S)

    async def _verdict(self, running: RunningAttempt, before: int) -> Failure | None:
        """Return the failure of a verifier that has ended; None if it gave a verdict."""
        upload_timeout_s = self._agents.config.deadlines.upload_timeout_s
        end = loop_time() + upload_timeout_s
        while True:
            state = await self._state(running)
            if state.graded:
                return None
            if len(state.failed_verdicts) > before:
                return _verifiers(state.failed_verdicts[-1])
            if loop_time() > end:
                message = (
                    f"the verifier ended without a verdict; none came within {upload_timeout_s:g} s"
                    " (upload_timeout_s)"
                )
                return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, message)
            await asyncio.sleep(min(LOOK_S, upload_timeout_s / 4))

    async def _state(self, running: RunningAttempt) -> SessionState:
        gateway = self._agents.gateway
        return await self._agents.gateway_calls.call("state", lambda: gateway.state(running.session_id))

    async def stop(self, verifier: Attempt) -> None:
        await self._verifiers.stop(verifier)


def _name(attempt: Attempt, n: int) -> Attempt:
    """Attempt name of the n-th verifier; runtimes launch each name once."""
    return Attempt(attempt.rollout_id, attempt.n + APART * (n - 1))


def _verifiers(failure: Failure) -> Failure:
    return Failure(
        FailureKind.VERIFIER, failure.reason, f"the verifier: {failure.message}", failure.traceback
    )
