"""Agents as Jobs of a Kubernetes cluster: one Job for each attempt, named after run and session.

The image is the one that other places run; its payload goes to it through the API server once its pod is
ready, so that no key is ever part of a Job, and nothing but the API server need be reached from here. One
watch on Jobs and one on pods tell of every session's end; `/ping` tells when an agent has finished while its
pod stays. A killed controller leaves its Jobs to the next one, to a reaper, or to their own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

from afield import wire
from afield.errors import (
    AfieldError,
    InfrastructureFailure,
    RateLimited,
    RolloutFailure,
    TaskFailure,
    Unavailable,
    UsageError,
    WireError,
)
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.runtimes.attempt_table import Attempts, broken
from afield.runtimes.kubernetes.api import TOKEN_S, Refused
from afield.runtimes.kubernetes.objects import SESSION, End, Job, Pod, end_of, unschedulable, unstartable
from afield.runtimes.kubernetes.preflight import check
from afield.runtimes.kubernetes.sessions import Session, Sessions, Space
from afield.settings.runtimes import KubernetesOptions
from afield.types import Attempt, Failure, Reason

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


log = logging.getLogger("afield.runtimes.kubernetes.runtime")

POLL_S = 2.0
PINGS_PER_S = 25.0  # of all sessions together: they all go through one API server
PINGS_AT_ONCE = 10
# How long a cause may come after its effect.
DOUBT_S = 2.0
DELETES_AT_ONCE = 16
CLOSE_S = 60.0
# Between two looks for a session, while the API server does not answer.
SEEK_S = 2.0
TAIL = 4_000
LOG_ENDS = "; its log ends: "


class KubernetesRuntime:
    """`name` is the run's: Jobs of other runs are neither listed nor stopped."""

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
        self._options = options
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._poll_s = poll_s
        self._attempts = Attempts()
        self._space = Space(options, name, token_s)
        self._sessions = Sessions(self._space, self._review)
        self._launches: dict[str, asyncio.Task[AfieldError | None]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._open = False

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
            for session_id in self._attempts:
                said = f"{session_id}: the runtime was closed"
                self._attempts.settle(session_id, broken(said, Reason.CANCELLED))
            for session in self._sessions.known.values():
                session.news.set()
            if self._launches:
                # One that is cut off while it creates a Job would leave it behind.
                await asyncio.wait(self._launches.values(), timeout=CLOSE_S / 2)
            await self._delete_all()
        finally:
            for task in (*self._launches.values(), *self._endings, *self._watching):
                task.cancel()
            await self._group.__aexit__(None, None, None)
            await self._space.close()

    # --- the verbs -------------------------------------------------------------------------------

    async def check(self) -> None:
        try:
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"no logs can be kept in {self._log_dir}: {error}; choose another") from error
        await check(await self._space.cluster(), self._options, self._space.run)

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("launch is called inside 'async with runtime'")
        await self._attempts.once(
            attempt.session_id,
            self._launches,
            lambda: self._group.create_task(self._launch(attempt, payload)),
        )

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None where its pod is there and does not answer; it is waited for all the same."""
        session_id = attempt.session_id
        if self._attempts.running(session_id):
            return True
        await self._space.cluster()
        if not self._attempts.begin(session_id):
            return False
        session = await self._enter(session_id)
        try:
            lives = await self._seen_working(session)
        except (Unavailable, RateLimited, Refused) as error:
            log.warning("%s cannot be looked for: %s; tried again", session_id, error)
            self._background(self._seek(session))
            return None
        if lives is False:
            self._sessions.leave(session_id)
            said = f"no agent works on {session_id}"
            self._attempts.forget(session_id, broken(said, Reason.DIED))
        return lives

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.exit(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.settle(session_id, broken(f"{session_id} was stopped", Reason.CANCELLED))
        session = self._sessions.known.get(session_id)
        if session is not None:
            session.news.set()
            await self._keep_log(session)
        await self._space.delete(session_id, session.uid if session else "")
        # A launch under way may yet make a Job; it sees that it is not wanted, and ends it.
        if session_id not in self._launches:
            self._sessions.leave(session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        session_id = attempt.session_id
        job = await self._space.find(session_id)
        if job is None:
            return SessionStatus(session_id=session_id, phase=Phase.UNKNOWN)
        return self._live(job, session_id)

    async def list(self) -> list[SessionStatus]:
        jobs = await self._space.all()
        seen = [self._live(job, job.metadata.annotations.get(SESSION, "")) for job in jobs]
        return [live for live in seen if live.session_id and live.phase is not Phase.ENDED]

    async def logs(self, attempt: Attempt) -> str:
        """From the pod while there is one; then what was kept of it here."""
        pod = await self._space.pod_of(attempt.session_id)
        said = await (await self._space.pods()).log(pod.metadata.name) if pod else ""
        if not said:
            with contextlib.suppress(OSError):
                return self._log_file(attempt.session_id).read_text(errors="replace")
        return said

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> AfieldError | None:
        session_id = attempt.session_id
        try:
            session = await self._enter(session_id)
        except UsageError as error:
            self._attempts.settle(session_id, broken(str(error), Reason.LAUNCH))
            return error
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await Launch(self._space, self._attempts, self._sessions, session).run(attempt, payload)
            return None
        except RateLimited as error:
            throttled = RateLimited(str(error), error.retry_after_s)
            self._attempts.forget(session_id, broken(str(error), Reason.LAUNCH))
            await self._abandon(session)
            return throttled
        except TimeoutError:
            said = f"was not ready within {self._start_timeout_s:g} s: {session.sight.told}"
            failure = InfrastructureFailure(f"{session_id} {said}", Reason.LAUNCH)
        except (Unavailable, Refused) as error:
            failure = InfrastructureFailure(f"{session_id} cannot be launched: {error}", Reason.LAUNCH)
        except RolloutFailure as error:
            failure = error
        tail = await self._keep_log(session)
        if tail and LOG_ENDS not in str(failure):
            failure = type(failure)(f"{failure}{LOG_ENDS}{tail}", failure.reason)
        self._attempts.settle(session_id, Exit(failure.failure, tail))
        await self._abandon(session)
        return failure

    async def _abandon(self, session: Session) -> None:
        """Nothing is left of a launch that failed."""
        try:
            await self._space.delete(session.id, session.uid)
            self._sessions.leave(session.id)
        except AfieldError as error:
            log.warning("%s was not launched, and its Job could not be deleted: %s", session.id, error)

    # --- what is seen ----------------------------------------------------------------------------

    async def _enter(self, session_id: str) -> Session:
        """Watched from here on."""
        cluster = await self._space.cluster()
        if not self._watching:
            works = (*self._sessions.watches(cluster), self._poll())
            self._watching = [self._group.create_task(work) for work in works]
        return self._sessions.enter(session_id)

    async def _seen_working(self, session: Session) -> bool | None:
        """One whose launcher died before it had its payload has a Job, and nothing works there."""
        await self._sessions.look(session)
        job = session.sight.job
        lives = await self._sessions.works(session) if job and not job.ended else False
        session.taken = session.was_ready = lives is not False
        return lives

    async def _seek(self, session: Session) -> None:
        """Until the cluster says whether it is there."""
        while self._attempts.running(session.id):
            await asyncio.sleep(SEEK_S)
            try:
                if await self._seen_working(session) is not False:
                    return
                self._attempts.settle(session.id, Exit(lingers=True))
            except (Unavailable, RateLimited, Refused) as error:
                log.info("%s still cannot be looked for: %s", session.id, error)

    def _review(self, session: Session, doubted: bool = False) -> None:
        session.news.set()
        end = end_of(session.sight)
        if end is None or session.ending or not self._attempts.running(session.id):
            return
        if doubted:
            session.doubt = None
        if end.sure or doubted:
            self._end(session, end)
        elif session.doubt is None:
            later = asyncio.get_running_loop().call_later
            session.doubt = later(DOUBT_S, self._review, session, True)

    # --- ends ------------------------------------------------------------------------------------

    def _end(self, session: Session, end: End) -> None:
        if session.ending or not self._open:
            return
        session.ending = True
        if session.doubt is not None:
            session.doubt.cancel()
        self._background(self._bury(session, end))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _bury(self, session: Session, end: End) -> None:
        tail = await self._keep_log(session)
        self._attempts.settle(session.id, Exit(_failure(session, end, tail), tail, lingers=True))
        session.news.set()

    async def _poll(self) -> None:
        """Ask agents whether they have finished: one question each, at a rate all of them share."""
        while True:
            await asyncio.sleep(self._poll_s)
            working = [s for s in self._sessions.known.values() if s.taken and self._attempts.running(s.id)]
            for start in range(0, len(working), PINGS_AT_ONCE):
                some = working[start : start + PINGS_AT_ONCE]
                await asyncio.gather(*map(self._ask, some))
                if len(working) > PINGS_AT_ONCE:
                    await asyncio.sleep(len(some) / PINGS_PER_S)

    async def _ask(self, session: Session) -> None:
        if await self._sessions.works(session) is False and end_of(session.sight) is None:
            self._end(session, End())

    # --- small things ----------------------------------------------------------------------------

    def _live(self, job: Job, session_id: str) -> SessionStatus:
        born = job.metadata.creation_timestamp
        phase = Phase.RUNNING if job.status.ready else Phase.STARTING
        if job.ended or job.metadata.deletion_timestamp or self._attempts.finished(session_id):
            phase = Phase.ENDED
        return SessionStatus(
            session_id=session_id,
            phase=phase,
            where=f"{self._options.namespace}/{job.metadata.name}",
            since=born.timestamp() if born else None,
        )

    async def _delete_all(self) -> None:
        turns = asyncio.Semaphore(DELETES_AT_ONCE)

        async def delete(session: Session) -> None:
            async with turns:
                await self._keep_log(session)
                while True:
                    try:
                        return await self._space.delete(session.id, session.uid)
                    except RateLimited as error:
                        await asyncio.sleep(error.retry_after_s or 1.0)
                    except AfieldError as error:
                        return log.warning("%s is left behind until its deadline: %s", session.id, error)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(delete, self._sessions.known.values()))
                self._sessions.known.clear()
        for session in self._sessions.known.values():
            log.warning("%s may be left behind until its deadline", session.id)

    async def _keep_log(self, session: Session) -> str:
        """The tail of what it printed, which is kept here as well: the pod's own goes with the pod."""
        if session.log or session.pod is None:
            return session.log
        said = await (await self._space.pods()).log(session.pod.metadata.name)
        session.log = said[-TAIL:].strip()
        if said:
            try:
                self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._log_file(session.id).write_text(said)
            except OSError as error:
                log.warning("the log of %s cannot be kept: %s", session.id, error)
        return session.log

    def _log_file(self, session_id: str) -> Path:
        return self._log_dir / f"{session_id}.log"


def _failure(session: Session, end: End, tail: str) -> Failure | None:
    if end.said:
        reason = end.reason if session.was_ready or end.reason is not Reason.DIED else Reason.LAUNCH
        said = f"{session.id}: {end.said}"
    elif session.was_ready:
        return None
    else:
        reason, said = Reason.LAUNCH, f"{session.id} ended before it served"
    if tail:
        said = f"{said}{LOG_ENDS}{tail}"
    return InfrastructureFailure(said, reason).failure
