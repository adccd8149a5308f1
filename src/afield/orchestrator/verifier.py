"""Grading in a place of its own: what an agent handed in goes to a verifier that the agent never meets.

The agent's place is gone before the verifier starts, and the verifier's key is the only one that may
give the session a reward. What it says goes to the store as any outcome does. A verifier that breaks is
followed by another: the agent does not run again for it. When the last one breaks, that is a failure of
its own kind, never a reward.
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

log = logging.getLogger("afield.orchestrator.groups")
APART = 1_000  # between the numbers of an attempt's verifiers; no rollout has so many attempts
LOOK_S = 0.25


class VerifierRunner:
    """`agents` launches and ends the judged, `verifiers` those who judge; each in a runtime of its own."""

    def __init__(self, agents: Launcher, verifiers: Launcher) -> None:
        self._agents = agents
        self._verifiers = verifiers

    async def submission(self, running: RunningAttempt) -> Submission | None:
        """What the agent has handed in, once there is a sign that it is done."""
        if running.exit is None and running.progress.completed_at is None:
            return None
        gateway = self._agents.gateway
        return await self._agents.gateway_calls.call(
            "submission", lambda: gateway.submission(running.session_id)
        )

    async def grade(self, running: RunningAttempt, submission: Submission) -> Failure | None:
        """Until a verifier has graded; why none could, or None: then its verdict is on its way.

        One that raises, dies, hangs or says nothing is followed by another, as often as the plan has it: what
        was sampled and handed in is as good as before.
        """
        left = running.exit
        if left is None or left.failure or left.lingers:
            await self._agents.stop(running.waiting.attempt)
        most = self._agents.config.max_verdicts
        first = min(most, 1 + len((await self._state(running)).failed_verdicts))
        failure = None
        for n in range(first, most + 1):
            failure = await self._once(running, submission, n)
            if failure is None:
                return None
            log.warning("%s, verifier %d of at most %d: %s", running.session_id, n, most, failure.message)
            if n < most and running.judge:
                await self.stop(running.judge)
        return failure

    async def _once(self, running: RunningAttempt, submission: Submission, n: int) -> Failure | None:
        rollout, attempt = running.waiting.rollout, running.waiting.attempt
        grading = RunningAttempt(rollout, attempt, loop_time(), place=_name(attempt, n))
        grading.draw = running.draw
        running.judge = grading.place
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
            told = f"no verdict in {verifier_timeout_s:g} s after the agent had handed in"
            if grading.refusal and not grading.launched:
                told += f"; its place took no more: {grading.refusal}"
            return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, told)

    async def _ended(self, running: RunningAttempt, grading: RunningAttempt, before: int) -> Failure | None:
        """Until the verifier has ended, or has spoken; what broke its place, if something did.

        A place that cannot say is asked again: the verifier may be at work all the same.
        """
        unknown = ""
        while True:
            try:
                return (await self._verifiers.runtime.wait(grading.place)).failure
            except Exception as error:
                if not unknown:
                    unknown = describe_error(error)
                    log.warning("%s: the end of its verifier is not told: %s", running.session_id, unknown)
            state = await self._state(running)
            if state.graded or len(state.failed_verdicts) > before:
                return None
            await asyncio.sleep(LOOK_S)

    async def _verdict(self, running: RunningAttempt, before: int) -> Failure | None:
        """What became of a verifier that has ended; None when it has graded."""
        upload_timeout_s = self._agents.config.deadlines.upload_timeout_s
        end = loop_time() + upload_timeout_s
        while True:
            state = await self._state(running)
            if state.graded:
                return None
            if len(state.failed_verdicts) > before:
                return _verifiers(state.failed_verdicts[-1])
            if loop_time() > end:
                told = (
                    f"the verifier ended without a verdict; none came within {upload_timeout_s:g} s"
                    " (upload_timeout_s)"
                )
                return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, told)
            await asyncio.sleep(min(LOOK_S, upload_timeout_s / 4))

    async def _state(self, running: RunningAttempt) -> SessionState:
        gateway = self._agents.gateway
        return await self._agents.gateway_calls.call("state", lambda: gateway.state(running.session_id))

    async def stop(self, verifier: Attempt) -> None:
        await self._verifiers.stop(verifier)


def _name(attempt: Attempt, n: int) -> Attempt:
    """What a place is told to launch twice it launches once: every verifier has a name of its own."""
    return Attempt(attempt.rollout_id, attempt.n + APART * (n - 1))


def _verifiers(failure: Failure) -> Failure:
    return Failure(
        FailureKind.VERIFIER, failure.reason, f"the verifier: {failure.message}", failure.traceback
    )
