"""The sessions this process has in a cluster: what was last seen of each, and how far we are with it.

Fed by one watch on Jobs and one on pods. Whoever takes an interest is told of every change of a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from afield.runtimes.kubernetes.api import Cluster
from afield.runtimes.kubernetes.job_status import Observed
from afield.runtimes.kubernetes.namespace import Space
from afield.runtimes.kubernetes.objects import SESSION, Job, Pod
from afield.runtimes.kubernetes.watch import Watch


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
