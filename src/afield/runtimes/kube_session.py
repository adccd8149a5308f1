"""One session in a cluster: its Job's name, what was last seen of it, and how far we are with it."""

from __future__ import annotations

import asyncio

from afield.runtimes.kube_ends import Sight
from afield.runtimes.kube_objects import Pod, name_of


class Session:
    """`taken`: the agent has its payload. `ending`: its end is known and being told."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.name = name_of(session_id)
        self.sight = Sight()
        self.news = asyncio.Event()
        self.was_ready = False
        self.taken = False
        self.ending = False
        self.doubt: asyncio.TimerHandle | None = None
        self.log_kept = False

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
