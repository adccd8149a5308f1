"""Talks to the agent in a pod, through the API server: from anywhere the API server can be reached from.

The contract is the same as everywhere (`/invocations`, `/ping`); what the API server says on the way is
told apart from what the agent says.
"""

from __future__ import annotations

import aiohttp
import msgspec
from msgspec import Struct

from afield.errors import AfieldError, RateLimited, Unavailable
from afield.runtimes import invocations
from afield.runtimes.invocations import Said
from afield.runtimes.kubernetes.api import CONNECT_S, SILENT, Cluster, Refused, named, refusal, status_in
from afield.runtimes.kubernetes.job import CONTAINER
from afield.runtimes.kubernetes.objects import Event, Pod
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
