"""Jobs, pods and sessions of one run on Kubernetes.

1. `PodClient` talks to agents through the API server's pod proxy, and separates its errors from the agent's.
2. `RunNamespace` creates, finds and deletes the run's Jobs, by label and from any process. It never lists or
touches Jobs of other runs.
3. `SessionTracker` keeps the observed state of each session that this process follows, from one watch on Jobs
and one on pods.
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
from afield.runtimes.invocations import PingResponse
from afield.runtimes.kubernetes.api import (
    CONNECT_S,
    NO_ANSWER,
    TOKEN_S,
    KubernetesCluster,
    KubernetesRefused,
    Watch,
    describe,
    error_of,
    open_cluster,
    parse_status,
    retry_unavailable,
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
    job_name,
    label_value,
)
from afield.settings.runtimes import KubernetesOptions
from afield.types import Attempt

PING_S = 10.0
LOG_S = 5.0
LOG_LINES = 1_000
LOG_BYTES = 64 * 1024


class PostError(Struct, frozen=True):
    """Post of a payload that may not have arrived."""

    why: str
    """Error message."""
    again: bool
    """Whether the post may be repeated."""


class PodClient:
    """Sends requests to agents in pods."""

    def __init__(self, cluster: KubernetesCluster, port: int) -> None:
        self._cluster = cluster
        self._port = port

    async def post(self, pod: str, attempt: Attempt, body: bytes) -> PostError | None:
        """Send a payload; returns None once the agent has accepted it.

        Raises a failure for the agent's error status.
        """
        headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": attempt.session_id}
        try:
            async with self._cluster.request(
                "POST", self._path(pod, "invocations"), body=body, headers=headers
            ) as response:
                message = await response.read()
        except NO_ANSWER as error:
            return PostError(describe(error), again=not isinstance(error, TimeoutError))
        if response.status in (200, 202):
            return None
        retry_after = response.headers.get("Retry-After", "")
        if parse_status(message).kind:
            error = error_of(response.status, message, retry_after)
            if isinstance(error, Unavailable | RateLimited):
                return PostError(str(error), again=response.status != 504)
            raise error
        # An agent alone in its pod cannot be busy, so a busy status is an infrastructure failure.
        raise invocations.failure_of(attempt, response.status, message.decode("utf-8", "replace"))

    async def ping(self, pod: str) -> PingResponse | None:
        timeout = aiohttp.ClientTimeout(total=PING_S, sock_connect=min(PING_S, CONNECT_S))
        try:
            async with self._cluster.request("GET", self._path(pod, "ping"), timeout=timeout) as response:
                message = await response.read()
            return msgspec.json.decode(message, type=PingResponse) if response.status == 200 else None
        except (*NO_ANSWER, msgspec.MsgspecError):
            return None

    async def log(self, pod: str) -> str:
        """Last lines of the pod's log; empty if it is not available."""
        path = f"{self._cluster.core('pods', pod)}/log"
        params = {"container": CONTAINER, "tailLines": str(LOG_LINES)}
        headers = {"Accept": "*/*"}
        try:
            message = await self._cluster.call("GET", path, params=params, headers=headers, timeout_s=LOG_S)
        except AfieldError:
            return ""
        return message[-LOG_BYTES:].decode("utf-8", "replace")

    async def of(self, selector: str) -> list[Pod]:
        """Pods by label selector, the newest first."""
        pods, _ = await self._cluster.list(self._cluster.core("pods"), Pod, {"labelSelector": selector})
        return sorted(pods, key=lambda pod: str(pod.metadata.creation_timestamp), reverse=True)

    async def not_created(self, uid: str) -> str:
        """Why a Job has no pod, from its events; empty if unknown."""
        selector = f"involvedObject.kind=Job,involvedObject.uid={uid}"
        path = self._cluster.core("events")
        try:
            events, _ = await self._cluster.list(path, Event, {"fieldSelector": selector})
        except KubernetesRefused:  # no permission to read events
            return ""
        return next((event.message for event in reversed(events) if event.reason == "FailedCreate"), "")

    def _path(self, pod: str, what: str) -> str:
        return f"{self._cluster.core('pods')}/{pod}:{self._port}/proxy/{what}"


EXISTS = 409
MISSING = 404


class RunNamespace:
    """Jobs of one run in one namespace. The cluster connection opens at first use."""

    def __init__(self, options: KubernetesOptions, run: str, token_s: float = TOKEN_S) -> None:
        self.options = options
        self.run = run
        self.selector = f"{RUN}={label_value(run)}"
        self._token_s = token_s
        self._cluster: KubernetesCluster | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()
            self._cluster = None

    async def cluster(self) -> KubernetesCluster:
        async with self._opening:
            if self._cluster is None:
                self._cluster = await open_cluster(self.options, self._token_s)
            return self._cluster

    async def pods(self) -> PodClient:
        return PodClient(await self.cluster(), self.options.port)

    async def pod_of(self, session_id: str) -> Pod | None:
        pods = await (await self.pods()).of(f"{self.selector},{SESSION}={label_value(session_id)}")
        return pods[0] if pods else None

    async def all(self) -> list[Job]:
        cluster = await self.cluster()
        jobs, _ = await cluster.list(cluster.jobs(), Job, {"labelSelector": self.selector})
        return jobs

    async def find(self, session_id: str) -> Job | None:
        """Find the session's Job; None if it does not exist or is being deleted."""
        cluster = await self.cluster()
        try:
            job = await cluster.get(cluster.jobs(job_name(self.run, session_id)), Job)
        except KubernetesRefused as error:
            if error.status == MISSING:
                return None
            raise Unavailable(f"the Job of {session_id} cannot be looked up: {error}") from error
        return job if job.metadata.deletion_timestamp is None else None

    async def create(self, session_id: str, image: str) -> bool:
        """Create the session's Job; returns False if it exists."""
        cluster = await self.cluster()
        body = job_for(self.options, self.run, session_id, image)
        try:
            await retry_unavailable(lambda: cluster.call("POST", cluster.jobs(), body=body))
            return True
        except KubernetesRefused as error:
            if error.status != EXISTS:
                raise
        name = job_name(self.run, session_id)
        job = await cluster.get(cluster.jobs(name), Job)
        if job.metadata.deletion_timestamp:
            raise RateLimited(f"an earlier Job {name} is still being deleted", 1.0)
        return False

    async def delete(self, session_id: str, uid: str = "") -> None:
        """Delete the Job and its pods. Harmless if it is gone, or if another Job has its name."""
        if not uid:
            job = await self.find(session_id)
            if job is None:
                return
            uid = job.metadata.uid
        cluster, name = await self.cluster(), job_name(self.run, session_id)
        body: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await retry_unavailable(lambda: cluster.call("DELETE", cluster.jobs(name), body=body))
        except KubernetesRefused as error:
            if error.status not in (MISSING, EXISTS):
                raise Unavailable(f"Job {name} cannot be deleted: {error}") from error


class KubernetesSession:
    """Session that this process follows."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.observed = Observed()
        """Last observed Job and pod."""
        self.changed_event = asyncio.Event()
        """Set at each change."""
        self.was_ready = False
        """Whether the pod has been ready."""
        self.accepted = False
        """Whether the agent has accepted the payload."""
        self.ending = False
        """Whether the end is being recorded."""
        self.review_timer: asyncio.TimerHandle | None = None
        """Timer that confirms an end without a final cause; None if there is none."""
        self.log = ""
        """Saved tail of the log; empty until it is saved."""

    @property
    def pod(self) -> Pod | None:
        return self.observed.pod

    @property
    def uid(self) -> str:
        return self.observed.job.metadata.uid if self.observed.job else ""

    def update_pod(self, pod: Pod) -> None:
        """Store the pod; if a controller created a second one, the newest counts."""
        before = self.observed.pod
        if before is not None and before.metadata.uid != pod.metadata.uid:
            born, older = pod.metadata.creation_timestamp, before.metadata.creation_timestamp
            if born is not None and older is not None and born < older:
                return
        self.observed.pod, self.observed.pod_gone = pod, False
        self.was_ready |= pod.ready

    async def changed(self, seconds: float) -> None:
        """Wait for a change, up to `seconds`."""
        self.changed_event.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.changed_event.wait()
        except TimeoutError:
            pass


class SessionTracker:
    """Sessions by id; calls `review` after each change of one."""

    def __init__(self, namespace: RunNamespace, review: Callable[[KubernetesSession], None]) -> None:
        self._namespace = namespace
        self._review = review
        self.sessions: dict[str, KubernetesSession] = {}

    def remove(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    def add(self, session_id: str) -> KubernetesSession:
        session = self.sessions[session_id] = KubernetesSession(session_id)
        return session

    async def refresh(self, session: KubernetesSession) -> None:
        """Read Job and pod of a session that existed before it was watched."""
        session.observed.job = await self._namespace.find(session.id)
        pod = await self._namespace.pod_of(session.id)
        if pod is not None:
            session.update_pod(pod)
        self._review(session)

    async def is_working(self, session: KubernetesSession) -> bool | None:
        """Whether the agent works on the session; None if it does not answer."""
        pod = session.pod
        if pod is None or pod.status.phase in ("Pending", "Succeeded", "Failed"):
            return False
        message = await (await self._namespace.pods()).ping(pod.metadata.name)
        if message is None:
            return None
        return message.status != "Healthy" if message.active is None else session.id in message.active

    def watches(self, cluster: KubernetesCluster) -> list[Coroutine[Any, Any, None]]:
        selector = self._namespace.selector
        jobs = Watch(
            cluster, cluster.jobs(), Job, selector, changed=self._job_changed, gone=self._job_deleted
        )
        pods = Watch(
            cluster, cluster.core("pods"), Pod, selector, changed=self._pod_changed, gone=self._pod_deleted
        )
        return [jobs.run(), pods.run()]

    def _of(self, item: Job | Pod) -> KubernetesSession | None:
        return self.sessions.get(item.metadata.annotations.get(SESSION, ""))

    def _job_changed(self, job: Job) -> None:
        if session := self._of(job):
            session.observed.job, session.observed.job_gone = job, False
            self._review(session)

    def _job_deleted(self, job: Job) -> None:
        session = self._of(job)
        if session and session.uid in ("", job.metadata.uid):
            session.observed.job, session.observed.job_gone = job, True
            self._review(session)

    def _pod_changed(self, pod: Pod) -> None:
        if session := self._of(pod):
            session.update_pod(pod)
            self._review(session)

    def _pod_deleted(self, pod: Pod) -> None:
        session = self._of(pod)
        if session and session.pod and session.pod.metadata.uid == pod.metadata.uid:
            session.update_pod(pod)
            session.observed.pod_gone = True
            self._review(session)
