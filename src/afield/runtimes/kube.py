"""Agents as Jobs of a Kubernetes cluster: one Job for each attempt, named after its session.

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
    RolloutFailure,
    TaskFailure,
    Throttled,
    Unavailable,
    UsageError,
    WireError,
)
from afield.options import KubernetesOptions
from afield.runtimes.attempts import Attempts, broken
from afield.runtimes.kube_api import Cluster, Refused, opened, patiently
from afield.runtimes.kube_check import check
from afield.runtimes.kube_ends import End, end_of, stalled
from afield.runtimes.kube_job import job_for
from afield.runtimes.kube_objects import RUN, SESSION, Job, Pod, label_of, name_of
from afield.runtimes.kube_pods import Pods
from afield.runtimes.kube_session import Session
from afield.runtimes.kube_watch import Watch
from afield.seams.runtime import Capabilities, Exit, Live, Phase
from afield.types import Attempt, Failure, Reason

log = logging.getLogger("afield.runtimes.kube")

POLL_S = 2.0
PINGS_PER_S = 25.0  # of all sessions together: they all go through one API server
PINGS_AT_ONCE = 10
# How long a cause may come after its effect.
DOUBT_S = 2.0
# A Job without a pod for so long is asked about.
PODLESS_S = 3.0
POSTS = 4
# How long after its connection broke a dead pod is noticed.
NOTICE_S = 5.0
DELETES_AT_ONCE = 16
CLOSE_S = 60.0
TAIL = 4_000
JOB_EXISTS = 409
MISSING = 404


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
    ) -> None:
        self._options = options
        self._run = name
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._poll_s = poll_s
        self._attempts = Attempts()
        self._sessions: dict[str, Session] = {}
        self._launches: dict[str, asyncio.Task[AfieldError | None]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._reached: Cluster | None = None
        self._reaching = asyncio.Lock()
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
            for session in self._sessions.values():
                session.news.set()
            if self._launches:
                # One that is cut off while it creates a Job would leave it behind.
                await asyncio.wait(self._launches.values(), timeout=CLOSE_S / 2)
            await self._delete_all()
        finally:
            for task in (*self._launches.values(), *self._endings, *self._watching):
                task.cancel()
            await self._group.__aexit__(None, None, None)
            if self._reached is not None:
                await self._reached.close()

    # --- the verbs -------------------------------------------------------------------------------

    async def check(self) -> None:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"no logs can be kept in {self._log_dir}: {error}; choose another") from error
        await check(await self._cluster(), self._options, self._run)

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("launch is called inside 'async with runtime'")
        session_id = attempt.session_id
        if self._attempts.begin(session_id):
            self._launches[session_id] = self._group.create_task(self._launch(attempt, payload))
            self._launches[session_id].add_done_callback(lambda _: self._launches.pop(session_id, None))
        if task := self._launches.get(session_id):
            # Shielded: a caller that gives up can still stop what it launched.
            failure = await asyncio.shield(task)
            if failure is not None:
                raise failure

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None where its pod is there and does not answer; it is waited for all the same."""
        session_id = attempt.session_id
        if self._attempts.running(session_id):
            return True
        job = await self._job(session_id)
        if job is None or job.ended or not self._attempts.begin(session_id):
            return False
        session = await self._enter(session_id)
        await self._look(session)
        lives = await self._works(session)
        if lives is False:
            self._sessions.pop(session_id, None)
            said = f"{session_id} has a Job, but no agent works on it"
            self._attempts.forget(session_id, broken(said, Reason.DIED))
            return False
        session.taken = session.was_ready = True
        self._review(session)
        return lives

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.exit(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.settle(session_id, broken(f"{session_id} was stopped", Reason.CANCELLED))
        session = self._sessions.get(session_id)
        if session is not None:
            session.news.set()
            await self._keep_log(session)
            await self._delete(session.name, session.uid)
            if session_id not in self._launches:
                self._sessions.pop(session_id, None)
        elif job := await self._job(session_id):
            await self._delete(job.metadata.name, job.metadata.uid)

    async def status(self, attempt: Attempt) -> Live:
        session_id = attempt.session_id
        job = await self._job(session_id)
        if job is None:
            return Live(session_id=session_id, phase=Phase.UNKNOWN)
        return self._live(job, session_id)

    async def list(self) -> list[Live]:
        cluster = await self._cluster()
        found = await cluster.list(cluster.jobs(), Job, {"labelSelector": self._selector})
        seen = [self._live(job, job.metadata.annotations.get(SESSION, "")) for job in found.items]
        return [live for live in seen if live.session_id and live.phase is not Phase.ENDED]

    async def logs(self, attempt: Attempt) -> str:
        """From the pod while there is one; then what was kept of it here."""
        pods = Pods(await self._cluster(), self._options.port)
        selector = f"{self._selector},{SESSION}={label_of(attempt.session_id)}"
        found = await pods.of(selector)
        said = await pods.log(found[0].metadata.name) if found else ""
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
                await self._start(session, attempt, payload)
            return None
        except Throttled as error:
            throttled = Throttled(str(error), error.retry_after_s)
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
        self._attempts.settle(session_id, Exit(failure.failure, tail))
        await self._abandon(session)
        return failure

    async def _start(self, session: Session, attempt: Attempt, payload: dict[str, Any]) -> None:
        try:
            body = wire.encode(payload)
        except WireError as error:
            raise TaskFailure(f"the payload of {session.id} {error}", Reason.LAUNCH) from error
        fresh = await self._create(session)
        await self._check_wanted(session)
        if not fresh:
            await self._look(session)
            self._review(session)
        pod = await self._ready(session)
        # Its agent may not know a payload it has had; then one that works has it.
        if pod and (fresh or await self._works(session) is not True):
            await self._post(session, pod, attempt, body)
        session.taken = True
        # A stop that came meanwhile found it; its own end is told by the watch.
        await self._check_wanted(session)

    async def _create(self, session: Session) -> bool:
        """False where it was there before."""
        cluster = await self._cluster()
        body = job_for(self._options, self._run, session.id)
        try:
            await patiently(lambda: cluster.call("POST", cluster.jobs(), body=body))
            return True
        except Refused as error:
            if error.status != JOB_EXISTS:
                raise
        job = await cluster.get(cluster.jobs(session.name), Job)
        if job.metadata.labels.get(RUN) != label_of(self._run):
            other = job.metadata.annotations.get(RUN, "somebody else")
            said = (
                f"{session.name} in {cluster.namespace} is a Job of {other!r}; use another namespace or name"
            )
            raise InfrastructureFailure(said, Reason.LAUNCH)
        if job.metadata.deletion_timestamp:
            raise Throttled(f"an earlier Job {session.name} is still being deleted", 1.0)
        return False

    async def _ready(self, session: Session) -> Pod | None:
        """Its pod, once that serves; None where a Job that was there before has ended well."""
        began = asked = asyncio.get_running_loop().time()
        while True:
            await self._check_wanted(session)
            if not self._attempts.running(session.id):
                return None
            pod = session.pod
            if pod is not None and pod.ready:
                return pod
            if pod is not None and (why := stalled(pod, self._options.unschedulable_s)):
                raise InfrastructureFailure(f"{session.id} cannot start: {why}", Reason.LAUNCH)
            now = asyncio.get_running_loop().time()
            if pod is None and now - max(began, asked) >= PODLESS_S:
                asked = now
                await self._explain_podless(session)
            await session.changed(min(1.0, self._options.unschedulable_s + 0.05))

    async def _explain_podless(self, session: Session) -> None:
        why = await Pods(await self._cluster(), self._options.port).not_created(session.name)
        if "exceeded quota" in why:
            raise Throttled(f"{session.id} gets no pod: {why}")
        if why:
            raise InfrastructureFailure(f"{session.id} gets no pod: {why}", Reason.LAUNCH)

    async def _post(self, session: Session, pod: Pod, attempt: Attempt, body: bytes) -> None:
        pods = Pods(await self._cluster(), self._options.port)
        why = ""
        for _ in range(POSTS):
            missed = await pods.post(pod.metadata.name, attempt, body)
            if missed is None:
                return
            why = missed.why
            # It may have died of it: then its end says more than a broken connection.
            end = asyncio.get_running_loop().time() + NOTICE_S
            while asyncio.get_running_loop().time() < end:
                await self._check_wanted(session)
                await session.changed(0.5)
            if not missed.again:
                break
        raise InfrastructureFailure(f"{session.id} did not take its payload: {why}", Reason.LAUNCH)

    async def _check_wanted(self, session: Session) -> None:
        """Raises how it ended, where it has, unless it ended well."""
        if self._attempts.running(session.id) and not session.ending:
            return
        ended = await self._attempts.exit(session.id)
        if ended.failure is not None:
            raise InfrastructureFailure(ended.failure.message, ended.failure.reason)

    async def _abandon(self, session: Session) -> None:
        """Nothing is left of a launch that failed."""
        try:
            await self._delete(session.name, session.uid)
            self._sessions.pop(session.id, None)
        except AfieldError as error:
            log.warning("%s was not launched, and its Job could not be deleted: %s", session.id, error)

    # --- what is seen ----------------------------------------------------------------------------

    async def _enter(self, session_id: str) -> Session:
        """Watched from here on."""
        cluster = await self._cluster()
        session = self._sessions[session_id] = Session(session_id)
        if not self._watching:
            jobs = Watch(
                cluster, cluster.jobs(), Job, self._selector, changed=self._saw_job, gone=self._lost_job
            )
            path = cluster.core("pods")
            pods = Watch(cluster, path, Pod, self._selector, changed=self._saw_pod, gone=self._lost_pod)
            works: list[Coroutine[Any, Any, None]] = [jobs.keep(), pods.keep(), self._poll()]
            self._watching = [self._group.create_task(work) for work in works]
        return session

    async def _look(self, session: Session) -> None:
        """Ask once about one that was there before it was watched."""
        session.sight.job = await self._job(session.id)
        selector = f"{self._selector},{SESSION}={label_of(session.id)}"
        found = await Pods(await self._cluster(), self._options.port).of(selector)
        if found:
            session.saw_pod(found[0])

    async def _works(self, session: Session) -> bool | None:
        """Whether its agent works on it; None where it does not say."""
        pod = session.pod
        if pod is None or pod.status.phase in ("Pending", "Succeeded", "Failed"):
            return False
        said = await Pods(await self._cluster(), self._options.port).ping(pod.metadata.name)
        if said is None:
            return None
        return said.status != "Healthy" if said.active is None else session.id in said.active

    def _saw_job(self, job: Job) -> None:
        if session := self._sessions.get(job.metadata.annotations.get(SESSION, "")):
            session.sight.job, session.sight.job_gone = job, False
            self._review(session)

    def _lost_job(self, job: Job) -> None:
        session = self._sessions.get(job.metadata.annotations.get(SESSION, ""))
        if session and session.uid in ("", job.metadata.uid):
            session.sight.job, session.sight.job_gone = job, True
            self._review(session)

    def _saw_pod(self, pod: Pod) -> None:
        if session := self._sessions.get(pod.metadata.annotations.get(SESSION, "")):
            session.saw_pod(pod)
            self._review(session)

    def _lost_pod(self, pod: Pod) -> None:
        session = self._sessions.get(pod.metadata.annotations.get(SESSION, ""))
        if session and session.pod and session.pod.metadata.uid == pod.metadata.uid:
            session.saw_pod(pod)
            session.sight.pod_gone = True
            self._review(session)

    def _review(self, session: Session, doubted: bool = False) -> None:
        session.news.set()
        end = end_of(session.sight)
        if end is None or session.ending or not self._attempts.running(session.id):
            return
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
        task = self._group.create_task(self._bury(session, end))
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
            working = [s for s in self._sessions.values() if s.taken and self._attempts.running(s.id)]
            for start in range(0, len(working), PINGS_AT_ONCE):
                some = working[start : start + PINGS_AT_ONCE]
                await asyncio.gather(*map(self._ask, some))
                if len(working) > PINGS_AT_ONCE:
                    await asyncio.sleep(len(some) / PINGS_PER_S)

    async def _ask(self, session: Session) -> None:
        if await self._works(session) is False and end_of(session.sight) is None:
            self._end(session, End())

    # --- small things ----------------------------------------------------------------------------

    async def _cluster(self) -> Cluster:
        async with self._reaching:
            if self._reached is None:
                self._reached = await opened(self._options)
            return self._reached

    @property
    def _selector(self) -> str:
        return f"{RUN}={label_of(self._run)}"

    async def _job(self, session_id: str) -> Job | None:
        """Of this run; None where there is none, or it is on its way out."""
        cluster = await self._cluster()
        try:
            job = await cluster.get(cluster.jobs(name_of(session_id)), Job)
        except Refused as error:
            if error.status == MISSING:
                return None
            raise
        ours = job.metadata.labels.get(RUN) == label_of(self._run)
        return job if ours and job.metadata.deletion_timestamp is None else None

    def _live(self, job: Job, session_id: str) -> Live:
        born = job.metadata.creation_timestamp
        phase = Phase.RUNNING if job.status.ready else Phase.STARTING
        if job.ended or job.metadata.deletion_timestamp or self._attempts.finished(session_id):
            phase = Phase.ENDED
        return Live(
            session_id=session_id,
            phase=phase,
            where=f"{self._options.namespace}/{job.metadata.name}",
            since=born.timestamp() if born else None,
        )

    async def _delete(self, name: str, uid: str) -> None:
        """With its pods. One that is gone, or another one of that name, is left alone."""
        cluster = await self._cluster()
        body: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
        }
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await patiently(lambda: cluster.call("DELETE", cluster.jobs(name), body=body))
        except Refused as error:
            if error.status not in (MISSING, JOB_EXISTS):
                raise Unavailable(f"Job {name} cannot be deleted: {error}") from error

    async def _delete_all(self) -> None:
        turns = asyncio.Semaphore(DELETES_AT_ONCE)

        async def delete(session: Session) -> None:
            async with turns:
                await self._keep_log(session)
                while True:
                    try:
                        return await self._delete(session.name, session.uid)
                    except Throttled as error:
                        await asyncio.sleep(error.retry_after_s or 1.0)
                    except AfieldError as error:
                        return log.warning("%s is left behind until its deadline: %s", session.name, error)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(delete, self._sessions.values()))
                self._sessions.clear()
        for session in self._sessions.values():
            log.warning("%s may be left behind until its deadline", session.name)

    async def _keep_log(self, session: Session) -> str:
        """The tail of what it printed, which is kept here as well: the pod's own goes with the pod."""
        if session.log_kept or session.pod is None:
            return ""
        said = await Pods(await self._cluster(), self._options.port).log(session.pod.metadata.name)
        session.log_kept = bool(said)
        if said:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                self._log_file(session.id).write_text(said)
            except OSError as error:
                log.warning("the log of %s cannot be kept: %s", session.id, error)
        return said[-TAIL:].strip()

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
        said = f"{said}; its log ends: {tail}"
    return InfrastructureFailure(said, reason).failure
