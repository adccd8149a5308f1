"""Kubernetes runtime: one Job per attempt.

1. The payload goes to the agent through the API server once its pod is ready. No key is part of a Job, and
only the API server needs to be reachable.
2. One watch on Jobs and one on pods detect how sessions end. `/ping` detects agents that finish while their
pod stays.
3. A launch fails as soon as its cause is known: an image that cannot be pulled, a pod that no node accepts or
that may not be created.
4. Jobs outlive a killed controller: the next one adopts them, `afield cleanup` deletes them, or their
deadline ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

from afield.errors import (
    AfieldError,
    InfrastructureFailure,
    RateLimited,
    RolloutFailure,
    Unavailable,
    UsageError,
)
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.runtimes.base import AttemptTable, BaseRuntime, failed_exit, image_of_row, make_log_dir
from afield.runtimes.invocations import encode_payload
from afield.runtimes.kubernetes.api import TOKEN_S, KubernetesRefused
from afield.runtimes.kubernetes.objects import (
    SESSION,
    Job,
    Pod,
    SessionEnd,
    end_of,
    unschedulable,
    unstartable,
)
from afield.runtimes.kubernetes.preflight import check
from afield.runtimes.kubernetes.sessions import KubernetesSession, RunNamespace, SessionTracker
from afield.settings.runtimes import KubernetesOptions
from afield.types import Attempt, Failure, Reason

# Time without a pod after which a Job's events are read, in seconds.
PODLESS_S = 3.0
POSTS = 4
# Time to notice that a pod died after its connection broke, in seconds.
NOTICE_S = 5.0
BETWEEN_S = 1.0


class JobLaunch:
    """Launch of one session: creates the Job, waits for its pod, and posts the payload.

    Reuses a Job that an earlier process created.
    """

    def __init__(
        self,
        namespace: RunNamespace,
        attempts: AttemptTable,
        sessions: SessionTracker,
        session: KubernetesSession,
    ) -> None:
        self._namespace = namespace
        self._attempts = attempts
        self._sessions = sessions
        self._session = session

    async def run(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Launch the session; raises the failure if that fails."""
        session = self._session
        body = encode_payload(session.id, payload)
        options = self._namespace.options
        image = image_of_row(payload, options.image_key, options.image)
        fresh = await self._namespace.create(session.id, image)
        if not fresh:
            await self._sessions.refresh(session)
        pod = await self._ready()
        # Some agents run a repeated payload twice, so skip an agent that already works on it.
        if pod and (fresh or await self._sessions.is_working(session) is not True):
            await self._post(pod, attempt, body)
        session.accepted = True
        await self._check_not_stopped()

    async def _ready(self) -> Pod | None:
        """Wait until the pod is ready; None if an existing Job has already succeeded."""
        session, now = self._session, asyncio.get_running_loop().time
        checked_at = scheduled_at = now()
        unschedulable_s = self._namespace.options.unschedulable_s
        while await self._check_not_stopped():
            pod = session.pod
            if pod is not None and pod.ready:
                return pod
            # Measured by the local clock, since the cluster's clock may differ.
            scheduled_at = scheduled_at if pod and unschedulable(pod) else now()
            if pod is not None:
                self._check_startable(pod, now() - scheduled_at)
            elif now() - checked_at >= PODLESS_S:
                checked_at = now()
                await self._check_pod_created()
            await session.changed(min(BETWEEN_S, unschedulable_s + 0.05))
        return None

    def _check_startable(self, pod: Pod, unscheduled_s: float) -> None:
        why = unstartable(pod)
        if unscheduled_s >= (most_s := self._namespace.options.unschedulable_s) and (
            summary := unschedulable(pod)
        ):
            why = (
                f"no node accepts the pod for {most_s:g} s: {summary}; request less, or raise unschedulable_s"
            )
        if why:
            raise InfrastructureFailure(f"{self._session.id} cannot start: {why}", Reason.LAUNCH)

    async def _check_pod_created(self) -> None:
        session = self._session
        if not session.uid:
            return
        why = await (await self._namespace.pods()).not_created(session.uid)
        if "exceeded quota" in why:
            raise RateLimited(f"Kubernetes creates no pod for {session.id}: {why}")
        if why:
            raise InfrastructureFailure(f"Kubernetes creates no pod for {session.id}: {why}", Reason.LAUNCH)

    async def _post(self, pod: Pod, attempt: Attempt, body: bytes) -> None:
        pods, now = await self._namespace.pods(), asyncio.get_running_loop().time
        why = ""
        for turn in range(POSTS):
            missed = await pods.post(pod.metadata.name, attempt, body)
            if missed is None:
                return
            why = missed.why
            last = turn == POSTS - 1 or not missed.again
            # If the pod died, its end is more specific than a broken connection: wait for it.
            end = now() + (NOTICE_S if last else BETWEEN_S)
            while now() < end and await self._check_not_stopped():
                await self._session.changed(end - now())
            if last:
                break
        raise InfrastructureFailure(f"{self._session.id} did not take its payload: {why}", Reason.LAUNCH)

    async def _check_not_stopped(self) -> bool:
        """Return True while the session runs and False if it succeeded; raises its failure otherwise."""
        session_id = self._session.id
        if self._attempts.is_running(session_id) and not self._session.ending:
            return True
        ended = await self._attempts.wait(session_id)
        if ended.failure is not None:
            raise InfrastructureFailure(ended.failure.message, ended.failure.reason)
        return False


log = logging.getLogger(__name__)

POLL_S = 2.0
PINGS_PER_S = 25.0  # limit for all sessions together, which share one API server
PINGS_AT_ONCE = 10
# Time for a more specific cause of an end to be observed, in seconds.
CAUSE_DELAY_S = 2.0
DELETES_AT_ONCE = 16
CLOSE_S = 60.0
# Interval between searches for a session while the API server does not answer, in seconds.
SEARCH_S = 2.0
TAIL = 4_000
LOG_ENDS = "; its log ends: "


class KubernetesRuntime(BaseRuntime):
    """Runs agents as Jobs.

    `name` is the run: Jobs of other runs are neither listed nor stopped.
    """

    def __init__(
        self,
        options: KubernetesOptions,
        *,
        name: str,
        log_dir: Path,
        start_timeout_s: float = 300.0,
        poll_s: float = POLL_S,
        token_s: float = TOKEN_S,
    ) -> None:
        super().__init__()
        self._options = options
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._poll_s = poll_s
        self._namespace = RunNamespace(options, name, token_s)
        self._sessions = SessionTracker(self._namespace, self._review)
        self._endings: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            isolation="container",
            limits=frozenset({"cpu", "memory", "disk", "time"}),
            lists=True,
            reaches=True,
            outlives=True,
            lingers=True,
        )

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            self._attempts.cancel_all()
            for session in self._sessions.sessions.values():
                session.changed_event.set()
            if self._attempts.launches:
                # Do not cancel launches at once: a Job that is being created would be left behind.
                await asyncio.wait(self._attempts.launches.values(), timeout=CLOSE_S / 2)
            await self._delete_all()
        finally:
            for task in (*self._attempts.launches.values(), *self._endings, *self._watching):
                task.cancel()
            await self._group.__aexit__(None, None, None)
            await self._namespace.close()

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        make_log_dir(self._log_dir)
        await check(await self._namespace.cluster(), self._options, self._namespace.run)

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None if the pod exists but does not answer, or if the cluster is unavailable.

        The session is followed in both cases.
        """
        session_id = attempt.session_id
        if self._attempts.is_running(session_id):
            return True
        await self._namespace.cluster()
        if not self._attempts.begin(session_id):
            return False
        session = await self._track(session_id)
        try:
            is_working = await self._refresh_working(session)
        except (Unavailable, RateLimited, KubernetesRefused) as error:
            log.warning("%s cannot be looked for: %s; tried again", session_id, error)
            self._background(self._search(session))
            return None
        if is_working is False:
            self._sessions.remove(session_id)
            message = f"no agent works on {session_id}"
            self._attempts.discard(session_id, failed_exit(message, Reason.DIED))
        return is_working

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.record_stop(session_id)
        session = self._sessions.sessions.get(session_id)
        if session is not None:
            session.changed_event.set()
            await self._save_log(session)
        await self._namespace.delete(session_id, session.uid if session else "")
        # A launch in progress may still create a Job; it then sees the stop and deletes the Job.
        if session_id not in self._attempts.launches:
            self._sessions.remove(session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        session_id = attempt.session_id
        job = await self._namespace.find(session_id)
        if job is None:
            return SessionStatus(session_id=session_id, phase=Phase.UNKNOWN)
        return self._job_status(job, session_id)

    async def list(self) -> list[SessionStatus]:
        jobs = await self._namespace.all()
        seen = [self._job_status(job, job.metadata.annotations.get(SESSION, "")) for job in jobs]
        return [live for live in seen if live.session_id and live.phase is not Phase.ENDED]

    async def logs(self, attempt: Attempt) -> str:
        """Log of the pod while it exists, then the saved copy."""
        pod = await self._namespace.pod_of(attempt.session_id)
        text = await (await self._namespace.pods()).log(pod.metadata.name) if pod else ""
        if not text:
            with contextlib.suppress(OSError):
                return self._log_file(attempt.session_id).read_text(errors="replace")
        return text

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session_id = attempt.session_id
        try:
            session = await self._track(session_id)
        except UsageError as error:
            self._attempts.record_exit(session_id, failed_exit(str(error), Reason.LAUNCH))
            raise
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await JobLaunch(self._namespace, self._attempts, self._sessions, session).run(
                    attempt, payload
                )
            return
        except RateLimited as error:
            self._attempts.record_failed_launch(session_id, error)
            await self._delete_failed(session)
            raise
        except TimeoutError:
            message = f"was not ready within {self._start_timeout_s:g} s: {session.observed.summary}"
            failure = InfrastructureFailure(f"{session_id} {message}", Reason.LAUNCH)
        except (Unavailable, KubernetesRefused) as error:
            failure = InfrastructureFailure(f"{session_id} cannot be launched: {error}", Reason.LAUNCH)
        except RolloutFailure as error:
            failure = error
        tail = await self._save_log(session)
        if tail and LOG_ENDS not in str(failure):
            failure = type(failure)(f"{failure}{LOG_ENDS}{tail}", failure.reason)
        self._attempts.record_exit(session_id, Exit(failure.failure, tail))
        await self._delete_failed(session)
        raise failure

    async def _delete_failed(self, session: KubernetesSession) -> None:
        """Delete the Job of a failed launch."""
        try:
            await self._namespace.delete(session.id, session.uid)
            self._sessions.remove(session.id)
        except AfieldError as error:
            log.warning("%s was not launched, and its Job could not be deleted: %s", session.id, error)

    # --- observed state --------------------------------------------------------------------------

    async def _track(self, session_id: str) -> KubernetesSession:
        """Follow a session; starts the watches at first use."""
        cluster = await self._namespace.cluster()
        if not self._watching:
            watches = (*self._sessions.watches(cluster), self._poll())
            self._watching = [self._group.create_task(watch) for watch in watches]
        return self._sessions.add(session_id)

    async def _refresh_working(self, session: KubernetesSession) -> bool | None:
        """Read the session's state; returns whether its agent works, None if it does not answer.

        The agent does not work if the launching process died before it sent the payload.
        """
        await self._sessions.refresh(session)
        job = session.observed.job
        is_working = await self._sessions.is_working(session) if job and not job.ended else False
        session.accepted = session.was_ready = is_working is not False
        return is_working

    async def _search(self, session: KubernetesSession) -> None:
        """Retry until the cluster tells whether the session exists."""
        while self._attempts.is_running(session.id):
            await asyncio.sleep(SEARCH_S)
            try:
                if await self._refresh_working(session) is not False:
                    return
                self._attempts.record_exit(session.id, Exit(lingers=True))
            except (Unavailable, RateLimited, KubernetesRefused) as error:
                log.info("%s still cannot be looked for: %s", session.id, error)

    def _review(self, session: KubernetesSession, after_delay: bool = False) -> None:
        session.changed_event.set()
        end = end_of(session.observed)
        if end is None or session.ending or not self._attempts.is_running(session.id):
            return
        if after_delay:
            session.review_timer = None
        if end.sure or after_delay:
            self._end(session, end)
        elif session.review_timer is None:
            later = asyncio.get_running_loop().call_later
            session.review_timer = later(CAUSE_DELAY_S, self._review, session, True)

    # --- session ends ----------------------------------------------------------------------------

    def _end(self, session: KubernetesSession, end: SessionEnd) -> None:
        if session.ending or not self._open:
            return
        session.ending = True
        if session.review_timer is not None:
            session.review_timer.cancel()
        self._background(self._record_end(session, end))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _record_end(self, session: KubernetesSession, end: SessionEnd) -> None:
        tail = await self._save_log(session)
        self._attempts.record_exit(session.id, Exit(_failure(session, end, tail), tail, lingers=True))
        session.changed_event.set()

    async def _poll(self) -> None:
        """Ping working agents at a rate that all sessions share."""
        while True:
            await asyncio.sleep(self._poll_s)
            working = [
                s for s in self._sessions.sessions.values() if s.accepted and self._attempts.is_running(s.id)
            ]
            for start in range(0, len(working), PINGS_AT_ONCE):
                some = working[start : start + PINGS_AT_ONCE]
                await asyncio.gather(*map(self._check_finished, some))
                if len(working) > PINGS_AT_ONCE:
                    await asyncio.sleep(len(some) / PINGS_PER_S)

    async def _check_finished(self, session: KubernetesSession) -> None:
        if await self._sessions.is_working(session) is False and end_of(session.observed) is None:
            self._end(session, SessionEnd())

    # --- helpers ---------------------------------------------------------------------------------

    def _job_status(self, job: Job, session_id: str) -> SessionStatus:
        born = job.metadata.creation_timestamp
        phase = Phase.RUNNING if job.status.ready else Phase.STARTING
        if job.ended or job.metadata.deletion_timestamp or self._attempts.has_finished(session_id):
            phase = Phase.ENDED
        return SessionStatus(
            session_id=session_id,
            phase=phase,
            where=f"{self._options.namespace}/{job.metadata.name}",
            since=born.timestamp() if born else None,
        )

    async def _delete_all(self) -> None:
        turns = asyncio.Semaphore(DELETES_AT_ONCE)

        async def delete(session: KubernetesSession) -> None:
            async with turns:
                await self._save_log(session)
                while True:
                    try:
                        return await self._namespace.delete(session.id, session.uid)
                    except RateLimited as error:
                        await asyncio.sleep(error.retry_after_s or 1.0)
                    except AfieldError as error:
                        return log.warning("%s is left behind until its deadline: %s", session.id, error)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(delete, self._sessions.sessions.values()))
                self._sessions.sessions.clear()
        for session in self._sessions.sessions.values():
            log.warning("%s may be left behind until its deadline", session.id)

    async def _save_log(self, session: KubernetesSession) -> str:
        """Save the log before the pod is deleted; returns its tail."""
        if session.log or session.pod is None:
            return session.log
        text = await (await self._namespace.pods()).log(session.pod.metadata.name)
        session.log = text[-TAIL:].strip()
        if text:
            try:
                self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._log_file(session.id).write_text(text)
            except OSError as error:
                log.warning("the log of %s cannot be kept: %s", session.id, error)
        return session.log

    def _log_file(self, session_id: str) -> Path:
        return self._log_dir / f"{session_id}.log"


def _failure(session: KubernetesSession, end: SessionEnd, tail: str) -> Failure | None:
    if end.failure:
        reason = end.reason if session.was_ready or end.reason is not Reason.DIED else Reason.LAUNCH
        message = f"{session.id}: {end.failure}"
    elif session.was_ready:
        return None
    else:
        reason, message = Reason.LAUNCH, f"{session.id} ended before it served"
    if tail:
        message = f"{message}{LOG_ENDS}{tail}"
    return InfrastructureFailure(message, reason).failure
