"""Grading in a place of its own: what an agent handed in goes to a verifier that the agent never meets.

The agent's place is gone before the verifier starts, and the verifier's key is the only one that may
give the session a reward. What it says goes to the store as any outcome does; a verifier that breaks is a
failure of its own kind, never a reward.
"""

from __future__ import annotations

from typing import Any

from afield import wire
from afield.launch import Launcher, now, patiently
from afield.notice import Running
from afield.types import Attempt, Failure, FailureKind
from afield.wire import Submission


class Judge:
    """`agents` launches and ends the judged, `verifiers` those who judge; each in a runtime of its own."""

    def __init__(self, agents: Launcher, verifiers: Launcher) -> None:
        self._agents = agents
        self._verifiers = verifiers

    async def submission(self, running: Running) -> Submission | None:
        """What the agent has handed in, once there is a sign that it is done."""
        if running.exit is None and running.progress.completed is None:
            return None
        plan, gateway = self._agents.plan, self._agents.gateway
        return await patiently(lambda: gateway.submission(running.session_id), plan.patience_s)

    async def grade(self, running: Running, submission: Submission) -> Failure | None:
        """Until the verifier has ended; why it could not grade, or None: then its verdict is on its way."""
        rollout, attempt = running.waiting.rollout, running.waiting.attempt
        left = running.exit
        if left is None or left.failure or left.lingers:
            await self._agents.stop(attempt)
        running.judged = True
        grading = Running(rollout, attempt, now())
        grading.draw = running.draw

        async def payload(grading: Running) -> dict[str, Any]:
            invocation = await self._verifiers.invocation(grading, role="verifier")
            return wire.build_payload(rollout.task, invocation, submission)

        if failure := await self._verifiers.launch(grading, payload):
            return _verifiers(failure)
        ended = await self._verifiers.runtime.wait(attempt)
        return _verifiers(ended.failure) if ended.failure else None

    async def stop(self, attempt: Attempt) -> None:
        await self._verifiers.stop(attempt)


def _verifiers(failure: Failure) -> Failure:
    return Failure(
        FailureKind.VERIFIER, failure.reason, f"the verifier: {failure.message}", failure.traceback
    )
