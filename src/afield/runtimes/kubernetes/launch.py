"""How an attempt gets into a pod: a Job is made, its pod is waited for, its agent is given the payload.

What will not start is known by its cause, not by the clock: an image that cannot be pulled, a pod no node
takes, a pod nobody may create. A Job that an earlier process made is taken as it is.
"""

from __future__ import annotations

import asyncio
from typing import Any

from afield import wire
from afield.errors import InfrastructureFailure, RateLimited, TaskFailure, WireError
from afield.runtimes.attempt_table import Attempts
from afield.runtimes.kubernetes.job_status import unschedulable, unstartable
from afield.runtimes.kubernetes.namespace import Space
from afield.runtimes.kubernetes.objects import Pod
from afield.runtimes.kubernetes.sessions import Session, Sessions
from afield.types import Attempt, Reason

# A Job without a pod for so long is asked about.
PODLESS_S = 3.0
POSTS = 4
# How long after its connection broke a dead pod is noticed.
NOTICE_S = 5.0
BETWEEN_S = 1.0


class Launch:
    """One of them; `run` raises what became of it where it came to nothing."""

    def __init__(self, space: Space, attempts: Attempts, sessions: Sessions, session: Session) -> None:
        self._space = space
        self._attempts = attempts
        self._sessions = sessions
        self._session = session

    async def run(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session = self._session
        try:
            body = wire.encode(payload)
        except WireError as error:
            raise TaskFailure(f"the payload of {session.id} {error}", Reason.LAUNCH) from error
        fresh = await self._space.create(session.id)
        if not fresh:
            await self._sessions.look(session)
        pod = await self._ready()
        # Some agents do not know a payload that they have had: one that works has it.
        if pod and (fresh or await self._sessions.works(session) is not True):
            await self._post(pod, attempt, body)
        session.taken = True
        await self._check_wanted()

    async def _ready(self) -> Pod | None:
        """Its pod, once that serves; None where a Job that was there before has ended well."""
        session, now = self._session, asyncio.get_running_loop().time
        asked = housed = now()
        unschedulable_s = self._space.options.unschedulable_s
        while await self._check_wanted():
            pod = session.pod
            if pod is not None and pod.ready:
                return pod
            # By our own clock: the cluster's may be another.
            housed = housed if pod and unschedulable(pod) else now()
            if pod is not None:
                self._check_hope(pod, now() - housed)
            elif now() - asked >= PODLESS_S:
                asked = now()
                await self._explain_podless()
            await session.changed(min(BETWEEN_S, unschedulable_s + 0.05))
        return None

    def _check_hope(self, pod: Pod, homeless_s: float) -> None:
        why = unstartable(pod)
        if homeless_s >= (most_s := self._space.options.unschedulable_s) and (told := unschedulable(pod)):
            why = f"no node takes it for {most_s:g} s: {told}; ask for less, or raise unschedulable_s"
        if why:
            raise InfrastructureFailure(f"{self._session.id} cannot start: {why}", Reason.LAUNCH)

    async def _explain_podless(self) -> None:
        session = self._session
        if not session.uid:
            return
        why = await (await self._space.pods()).not_created(session.uid)
        if "exceeded quota" in why:
            raise RateLimited(f"{session.id} gets no pod: {why}")
        if why:
            raise InfrastructureFailure(f"{session.id} gets no pod: {why}", Reason.LAUNCH)

    async def _post(self, pod: Pod, attempt: Attempt, body: bytes) -> None:
        pods, now = await self._space.pods(), asyncio.get_running_loop().time
        why = ""
        for turn in range(POSTS):
            missed = await pods.post(pod.metadata.name, attempt, body)
            if missed is None:
                return
            why = missed.why
            last = turn == POSTS - 1 or not missed.again
            # It may have died of it: then its end says more than a broken connection.
            end = now() + (NOTICE_S if last else BETWEEN_S)
            while now() < end and await self._check_wanted():
                await self._session.changed(end - now())
            if last:
                break
        raise InfrastructureFailure(f"{self._session.id} did not take its payload: {why}", Reason.LAUNCH)

    async def _check_wanted(self) -> bool:
        """False where it has ended well; raises how it ended otherwise."""
        session_id = self._session.id
        if self._attempts.running(session_id) and not self._session.ending:
            return True
        ended = await self._attempts.exit(session_id)
        if ended.failure is not None:
            raise InfrastructureFailure(ended.failure.message, ended.failure.reason)
        return False
