"""One run's part of a cluster: its Jobs and their pods, found by label, from any process.

The cluster is opened when it is first asked for. Jobs of other runs are neither seen nor touched.
"""

from __future__ import annotations

import asyncio
from typing import Any

from afield.errors import RateLimited, Unavailable
from afield.options import KubernetesOptions
from afield.runtimes.kubernetes.api import TOKEN_S, Cluster, Refused, opened, patiently
from afield.runtimes.kubernetes.job import job_for
from afield.runtimes.kubernetes.objects import RUN, SESSION, Job, Pod, label_of, name_of
from afield.runtimes.kubernetes.pods import Pods

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
