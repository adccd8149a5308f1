"""The sessions this process has in a cluster: what was last seen of each, and how far we are with it.

Fed by one watch on Jobs and one on pods. Whoever takes an interest is told of every change of a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from afield.errors import AfieldError, RateLimited, Unavailable
from afield.runtimes import invocations
from afield.runtimes.invocations import Said
from afield.runtimes.kubernetes.api import (
    CONNECT_S,
    SILENT,
    TOKEN_S,
    Cluster,
    Refused,
    Watch,
    named,
    opened,
    patiently,
    refusal,
    status_in,
)
from afield.runtimes.kubernetes.objects import (
    CONTAINER,
    RUN,
    SESSION,
    Event,
    Job,
    Observed,
    Pod,
    job_for,
    label_of,
    name_of,
)
from afield.settings.runtimes import KubernetesOptions
from afield.types import Attempt

PING_S = 10.0
LOG_S = 5.0
LOG_LINES = 1_000
LOG_BYTES = 64 * 1024


class Unanswered(Struct, frozen=True):
    """A payload that may not have arrived. `again`: sending it once more cannot make two of it."""

    why: str
    again: bool


class Pods:
    def __init__(self, cluster: Cluster, port: int) -> None:
        self._cluster = cluster
        self._port = port

    async def post(self, pod: str, attempt: Attempt, body: bytes) -> Unanswered | None:
        """None once the agent has it; raises what its refusal means."""
        headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": attempt.session_id}
        try:
            async with self._cluster.asked(
                "POST", self._path(pod, "invocations"), body=body, headers=headers
            ) as response:
                said = await response.read()
        except SILENT as error:
            return Unanswered(named(error), again=not isinstance(error, TimeoutError))
        if response.status in (200, 202):
            return None
        retry_after = response.headers.get("Retry-After", "")
        if status_in(said).kind:
            error = refusal(response.status, said, retry_after)
            if isinstance(error, Unavailable | RateLimited):
                return Unanswered(str(error), again=response.status != 504)
            raise error
        # Alone in its pod, an agent that is too busy is a place that broke.
        raise invocations.refused(attempt, response.status, said.decode("utf-8", "replace"))

    async def ping(self, pod: str) -> Said | None:
        timeout = aiohttp.ClientTimeout(total=PING_S, sock_connect=min(PING_S, CONNECT_S))
        try:
            async with self._cluster.asked("GET", self._path(pod, "ping"), timeout=timeout) as response:
                said = await response.read()
            return msgspec.json.decode(said, type=Said) if response.status == 200 else None
        except (*SILENT, msgspec.MsgspecError):
            return None

    async def log(self, pod: str) -> str:
        """The last of what it printed; empty where there is nothing, or nobody to ask."""
        path = f"{self._cluster.core('pods', pod)}/log"
        params = {"container": CONTAINER, "tailLines": str(LOG_LINES)}
        headers = {"Accept": "*/*"}
        try:
            said = await self._cluster.call("GET", path, params=params, headers=headers, timeout_s=LOG_S)
        except AfieldError:
            return ""
        return said[-LOG_BYTES:].decode("utf-8", "replace")

    async def of(self, selector: str) -> list[Pod]:
        """The newest first."""
        found, _ = await self._cluster.list(self._cluster.core("pods"), Pod, {"labelSelector": selector})
        return sorted(found, key=lambda pod: str(pod.metadata.creation_timestamp), reverse=True)

    async def not_created(self, uid: str) -> str:
        """Why a Job has no pod, in the words of who should make it; empty where nobody says."""
        selector = f"involvedObject.kind=Job,involvedObject.uid={uid}"
        path = self._cluster.core("events")
        try:
            found, _ = await self._cluster.list(path, Event, {"fieldSelector": selector})
        except Refused:  # events are not everybody's to read
            return ""
        return next((event.message for event in reversed(found) if event.reason == "FailedCreate"), "")

    def _path(self, pod: str, what: str) -> str:
        return f"{self._cluster.core('pods')}/{pod}:{self._port}/proxy/{what}"


EXISTS = 409
MISSING = 404


class Space:
    def __init__(self, options: KubernetesOptions, run: str, token_s: float = TOKEN_S) -> None:
        self.options = options
        self.run = run
        self.selector = f"{RUN}={label_of(run)}"
        self._token_s = token_s
        self._cluster: Cluster | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()
            self._cluster = None

    async def cluster(self) -> Cluster:
        async with self._opening:
            if self._cluster is None:
                self._cluster = await opened(self.options, self._token_s)
            return self._cluster

    async def pods(self) -> Pods:
        return Pods(await self.cluster(), self.options.port)

    async def pod_of(self, session_id: str) -> Pod | None:
        found = await (await self.pods()).of(f"{self.selector},{SESSION}={label_of(session_id)}")
        return found[0] if found else None

    async def all(self) -> list[Job]:
        cluster = await self.cluster()
        found, _ = await cluster.list(cluster.jobs(), Job, {"labelSelector": self.selector})
        return found

    async def find(self, session_id: str) -> Job | None:
        """None where there is none, or it is on its way out."""
        cluster = await self.cluster()
        try:
            job = await cluster.get(cluster.jobs(name_of(self.run, session_id)), Job)
        except Refused as error:
            if error.status == MISSING:
                return None
            raise Unavailable(f"the Job of {session_id} cannot be looked for: {error}") from error
        return job if job.metadata.deletion_timestamp is None else None

    async def create(self, session_id: str) -> bool:
        """False where this run had it before."""
        cluster = await self.cluster()
        body = job_for(self.options, self.run, session_id)
        try:
            await patiently(lambda: cluster.call("POST", cluster.jobs(), body=body))
            return True
        except Refused as error:
            if error.status != EXISTS:
                raise
        name = name_of(self.run, session_id)
        job = await cluster.get(cluster.jobs(name), Job)
        if job.metadata.deletion_timestamp:
            raise RateLimited(f"an earlier Job {name} is still being deleted", 1.0)
        return False

    async def delete(self, session_id: str, uid: str = "") -> None:
        """Its Job, with its pods. One that is gone, or another one of that name, is left alone."""
        if not uid:
            job = await self.find(session_id)
            if job is None:
                return
            uid = job.metadata.uid
        cluster, name = await self.cluster(), name_of(self.run, session_id)
        body: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await patiently(lambda: cluster.call("DELETE", cluster.jobs(name), body=body))
        except Refused as error:
            if error.status not in (MISSING, EXISTS):
                raise Unavailable(f"Job {name} cannot be deleted: {error}") from error


class Session:
    """`taken`: the agent has its payload. `ending`: its end is known and being told."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.sight = Observed()
        self.news = asyncio.Event()
        self.was_ready = False
        self.taken = False
        self.ending = False
        self.doubt: asyncio.TimerHandle | None = None
        self.log = ""

    @property
    def pod(self) -> Pod | None:
        return self.sight.pod

    @property
    def uid(self) -> str:
        return self.sight.job.metadata.uid if self.sight.job else ""

    def saw_pod(self, pod: Pod) -> None:
        """A Job has one pod here; where a controller made a second, the newest counts."""
        before = self.sight.pod
        if before is not None and before.metadata.uid != pod.metadata.uid:
            born, older = pod.metadata.creation_timestamp, before.metadata.creation_timestamp
            if born is not None and older is not None and born < older:
                return
        self.sight.pod, self.sight.pod_gone = pod, False
        self.was_ready |= pod.ready

    async def changed(self, seconds: float) -> None:
        """Until something new was seen, or so long."""
        self.news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.news.wait()
        except TimeoutError:
            pass


class Sessions:
    def __init__(self, space: Space, review: Callable[[Session], None]) -> None:
        self._space = space
        self._review = review
        self.known: dict[str, Session] = {}

    def leave(self, session_id: str) -> None:
        self.known.pop(session_id, None)

    def enter(self, session_id: str) -> Session:
        session = self.known[session_id] = Session(session_id)
        return session

    async def look(self, session: Session) -> None:
        """Ask once about one that was there before it was watched."""
        session.sight.job = await self._space.find(session.id)
        pod = await self._space.pod_of(session.id)
        if pod is not None:
            session.saw_pod(pod)
        self._review(session)

    async def works(self, session: Session) -> bool | None:
        """Whether its agent works on it; None where it does not say."""
        pod = session.pod
        if pod is None or pod.status.phase in ("Pending", "Succeeded", "Failed"):
            return False
        said = await (await self._space.pods()).ping(pod.metadata.name)
        if said is None:
            return None
        return said.status != "Healthy" if said.active is None else session.id in said.active

    def watches(self, cluster: Cluster) -> list[Coroutine[Any, Any, None]]:
        selector = self._space.selector
        jobs = Watch(cluster, cluster.jobs(), Job, selector, changed=self._saw_job, gone=self._lost_job)
        pods = Watch(cluster, cluster.core("pods"), Pod, selector, changed=self._saw_pod, gone=self._lost_pod)
        return [jobs.keep(), pods.keep()]

    def _of(self, item: Job | Pod) -> Session | None:
        return self.known.get(item.metadata.annotations.get(SESSION, ""))

    def _saw_job(self, job: Job) -> None:
        if session := self._of(job):
            session.sight.job, session.sight.job_gone = job, False
            self._review(session)

    def _lost_job(self, job: Job) -> None:
        session = self._of(job)
        if session and session.uid in ("", job.metadata.uid):
            session.sight.job, session.sight.job_gone = job, True
            self._review(session)

    def _saw_pod(self, pod: Pod) -> None:
        if session := self._of(pod):
            session.saw_pod(pod)
            self._review(session)

    def _lost_pod(self, pod: Pod) -> None:
        session = self._of(pod)
        if session and session.pod and session.pod.metadata.uid == pod.metadata.uid:
            session.saw_pod(pod)
            session.sight.pod_gone = True
            self._review(session)
