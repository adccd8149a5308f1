"""Remote runtime: agents on servers at known URLs, e.g. `afield.sdk.serve`.

1. An attempt goes to the server with the fewest attempts of this runtime. It continues when this process
ends, and `adopt` finds it again.
2. One `/ping` per server and poll interval detects ended attempts. A server that restarts, or does not answer
for `unreachable_s` seconds, has lost its attempts.
3. Servers without afield's SDK (a plain BedrockAgentCoreApp) do not list their sessions: their attempts count
as ended when the server is idle. Such servers must answer a POST before the work, and cannot stop an attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
from msgspec import Struct

from afield.errors import InfrastructureFailure, RateLimited, UsageError
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.runtimes import invocations
from afield.runtimes.base import BaseRuntime, failed_exit
from afield.runtimes.invocations import NO_ANSWER, PingResponse
from afield.sdk.signed_invocations import key_from_file, user_key
from afield.types import Attempt, Reason

# Below the 5 s after which common servers close an idle connection.
KEEPALIVE_S = 3.0
# Time for which a server that refused a connection is the last choice, in seconds.
AVOIDED_S = 5.0
# Errors that guarantee that the server received nothing.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class AgentServer:
    """Agent server and the sessions assigned to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.reserved: set[str] = set()
        """Ids of sessions that are being posted."""
        self.accepted: dict[str, str] = {}
        """Instance id of the server by accepted session; empty if the server sends none."""
        self.has_sessions = asyncio.Event()
        """Wakes the poll task when there are sessions."""
        self.ping_lock = asyncio.Lock()
        """Lets concurrent callers share a ping."""
        self.avoided_until = 0.0
        """Loop time until which the server is the last choice."""
        self.unreachable_since: float | None = None
        """Loop time of the first failed ping; None while the server answers."""
        self.last_ping: tuple[float, PingResponse] | None = None
        """Loop time and content of the last answer."""

    @property
    def load(self) -> int:
        return len(self.reserved | self.accepted.keys())

    def accept(self, session_id: str, instance: str) -> None:
        self.accepted[session_id] = instance
        self.has_sessions.set()

    def release(self, session_id: str) -> None:
        self.reserved.discard(session_id)
        self.accepted.pop(session_id, None)


class SessionLocation(Struct, frozen=True, kw_only=True):
    """Result of looking for a session on all servers."""

    server: AgentServer | None = None
    """Server that lists the session; None if no server does."""
    instance: str = ""
    """Instance id of that server; empty if it sends none."""
    unreachable: Sequence[str] = ()
    """URLs of servers that did not answer."""
    ambiguous: bool = False
    """Whether a busy server that does not list its sessions may run it."""

    @property
    def absent(self) -> bool:
        return not (self.server or self.unreachable or self.ambiguous)


class RemoteRuntime(BaseRuntime):
    """Runs agents on servers at `urls`, such as `http://10.0.0.7:8080`. Closing it does not stop agents.

    `key_file` holds the key that signs requests; None uses this user's key. `poll_s` is the poll interval in
    seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key_file: Path | None = None,
        poll_s: float = 0.5,
        unreachable_s: float = 10.0,
    ) -> None:
        if not urls:
            raise ValueError("a served runtime needs at least one address, such as http://127.0.0.1:8080")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"address {url!r} must begin with http:// or https://")
        super().__init__()
        self._servers = [AgentServer(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._key_file = key_file
        self._poll_s = poll_s
        self._unreachable_s = unreachable_s
        self._polls: list[asyncio.Task[None]] = []
        self._searches: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._key = key_from_file(self._key_file) if self._key_file else user_key()
        self._http = await invocations.http_session(KEEPALIVE_S).__aenter__()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._polls = [self._group.create_task(self._poll(server)) for server in self._servers]
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            for task in (*self._attempts.launches.values(), *self._searches.values(), *self._polls):
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            self._attempts.cancel_all("; the agent may run on")
            await self._http.close()

    @property
    def capabilities(self) -> Capabilities:
        """Sessions outlive this process, because their server owns them."""
        return Capabilities(isolation="none", reaches=True, outlives=True)

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        """Raise UsageError unless at least one server answers."""
        answers = await asyncio.gather(*(self._ping(server) for server in self._servers))
        if not any(isinstance(answer, PingResponse) for answer in answers):
            message = "; ".join(
                f"{a.url}: {answer}" for a, answer in zip(self._servers, answers, strict=True)
            )
            raise UsageError(
                f"no agent answers GET /ping ({message});"
                " start one, for example with: python -m afield.sdk.serve agent.py:agent --port 8080"
            )

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None while a server is unreachable or does not list sessions; a search then continues."""
        session_id = attempt.session_id
        if self._attempts.is_running(session_id):
            return None if session_id in self._searches else True
        location = await self._locate(session_id)
        if location.absent or not self._attempts.begin(session_id):
            return self._attempts.is_running(session_id)
        if location.server:
            location.server.accept(session_id, location.instance)
            return True
        self._searches[session_id] = self._group.create_task(self._search(session_id))
        self._searches[session_id].add_done_callback(lambda _: self._searches.pop(session_id, None))
        return None

    async def stop(self, attempt: Attempt) -> None:
        """Ask the server that has the session to stop it, or all servers if unknown.

        Unreachable servers are ignored.
        """
        session_id = attempt.session_id
        if self._attempts.has_finished(session_id):
            return
        self._attempts.record_stop(session_id)
        if session_id in self._attempts.launches:
            return  # `_launch` deletes the session once a server has accepted it.
        holders = [server for server in self._servers if session_id in server.accepted]
        for server in holders:
            server.release(session_id)
        await asyncio.gather(*(self._delete(server, attempt) for server in holders or self._servers))

    async def status(self, attempt: Attempt) -> SessionStatus:
        """Also finds attempts of other processes, on servers that list their sessions."""
        session_id = attempt.session_id
        if self._attempts.is_running(session_id):
            return self._status(session_id)
        location = await self._locate(session_id)
        if location.server:
            return SessionStatus(session_id=session_id, phase=Phase.RUNNING, where=location.server.url)
        return self._attempts.status(session_id)

    async def list(self) -> list[SessionStatus]:
        return [self._status(session_id) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        """Always empty: the log stays on the server."""
        return ""

    def _status(self, session_id: str) -> SessionStatus:
        holders = [server.url for server in self._servers if session_id in server.accepted]
        starting = session_id in self._attempts.launches
        return self._attempts.status(session_id, holders[0] if holders else "", starting=starting)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session_id = attempt.session_id
        server = await self._post_to_any(attempt, payload)
        if not self._attempts.is_running(session_id):
            server.release(session_id)
            await self._delete(server, attempt)
        self._attempts.check_not_stopped(session_id)

    async def _post_to_any(self, attempt: Attempt, payload: dict[str, Any]) -> AgentServer:
        """Post to the least loaded server that is reachable and accepts."""
        session_id = attempt.session_id
        left = list(self._servers)
        failures: list[str] = []
        busy: list[RateLimited] = []
        while left and self._attempts.is_running(session_id):
            now = asyncio.get_running_loop().time()
            server = min(left, key=lambda a: (a.avoided_until > now, a.load))
            left.remove(server)
            # Reserve before the first await, so that concurrent launches count this attempt.
            server.reserved.add(session_id)
            try:
                server.accept(session_id, await self._post(server, attempt, payload))
                return server
            except NOT_CONNECTED as error:
                server.avoided_until = now + AVOIDED_S
                failures.append(f"{server.url}: {_describe(error)}")
            except RateLimited as error:
                busy.append(error)
            finally:
                server.reserved.discard(session_id)
        self._attempts.check_not_stopped(session_id)
        if busy:
            waits = [error.retry_after_s for error in busy if error.retry_after_s is not None]
            raise RateLimited(str(busy[0]), min(waits, default=None))
        message = f"no server takes {session_id}: {'; '.join(failures)}"
        raise InfrastructureFailure(message, Reason.LAUNCH)

    async def _post(self, server: AgentServer, attempt: Attempt, payload: dict[str, Any]) -> str:
        """Post with one retry, at the same server.

        The server may have accepted the first request, and the attempt must not run twice.
        """
        for last in (False, True):
            try:
                return await invocations.post(self._http, server.url, attempt, payload, self._key)
            except (aiohttp.ClientError, OSError) as error:
                # TimeoutError is an OSError.
                if not last and isinstance(error, NOT_CONNECTED):
                    raise
                if last or isinstance(error, TimeoutError):
                    message = f"{server.url} did not take {attempt.session_id}: {_describe(error)}"
                    raise InfrastructureFailure(message, Reason.LAUNCH) from error
        raise AssertionError("unreachable")

    async def _delete(self, server: AgentServer, attempt: Attempt) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await invocations.delete(self._http, server.url, attempt, self._key)

    # --- exit detection --------------------------------------------------------------------------

    async def _poll(self, server: AgentServer) -> None:
        while True:
            if not server.accepted:
                server.unreachable_since = None
                server.has_sessions.clear()
                await server.has_sessions.wait()
            await asyncio.sleep(self._poll_s)
            # Copy before the ping: a session accepted during the ping is missing from its answer.
            expected = dict(server.accepted)
            asked_at = asyncio.get_running_loop().time()
            answer = await self._ping(server)
            if isinstance(answer, PingResponse):
                server.unreachable_since = None
                self._record_ended(server, expected, answer)
                continue
            if server.unreachable_since is None:
                server.unreachable_since = asked_at
            unanswered_s = asyncio.get_running_loop().time() - server.unreachable_since
            if unanswered_s >= self._unreachable_s:
                message = f"{server.url} has not answered for {unanswered_s:.0f} s: {answer}"
                self._fail(server, expected, message)

    def _record_ended(self, server: AgentServer, expected: dict[str, str], reply: PingResponse) -> None:
        active = reply.active
        if active is None:
            active = [] if reply.status == "Healthy" else list(expected)
        gone = expected.keys() - set(active)
        lost = {s for s in gone if expected[s] and expected[s] != reply.instance}
        for session_id in gone - lost:
            self._attempts.record_exit(session_id, Exit())
            server.release(session_id)
        self._fail(server, lost, f"{server.url} was restarted")

    def _fail(self, server: AgentServer, sessions: Iterable[str], message: str) -> None:
        for session_id in sessions:
            self._attempts.record_exit(
                session_id, failed_exit(f"{message}; {session_id} ran there", Reason.DIED)
            )
            server.release(session_id)

    async def _locate(self, session_id: str) -> SessionLocation:
        answers = await asyncio.gather(*(self._recent_ping(server) for server in self._servers))
        unreachable: list[str] = []
        vague = False
        for server, message in zip(self._servers, answers, strict=True):
            if message is None:
                unreachable.append(server.url)
            elif message.active is None:
                vague |= message.status != "Healthy"
            elif session_id in message.active:
                return SessionLocation(server=server, instance=message.instance)
        return SessionLocation(unreachable=unreachable, ambiguous=vague)

    async def _search(self, session_id: str) -> None:
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while self._attempts.is_running(session_id):
            await asyncio.sleep(self._poll_s)
            location = await self._locate(session_id)
            if location.server:
                location.server.accept(session_id, location.instance)
                return
            if location.absent:
                self._attempts.record_exit(session_id, Exit())
            elif not location.unreachable:
                heard_at = loop.time()
            elif loop.time() - heard_at >= self._unreachable_s:
                unreachable = ", ".join(location.unreachable)
                message = f"{session_id} is on no server that answers; unreachable: {unreachable}"
                self._attempts.record_exit(session_id, failed_exit(message, Reason.DIED))

    async def _recent_ping(self, server: AgentServer) -> PingResponse | None:
        """Ping answer of at most one poll interval ago; None if the server does not answer.

        Concurrent callers share one request.
        """
        async with server.ping_lock:
            now = asyncio.get_running_loop().time()
            if server.last_ping is not None and now - server.last_ping[0] < self._poll_s:
                return server.last_ping[1]
            answer = await self._ping(server)
            if not isinstance(answer, PingResponse):
                return None
            server.last_ping = (now, answer)
            return answer

    async def _ping(self, server: AgentServer) -> PingResponse | str:
        """Ping answer, or the error message if there is none."""
        try:
            return await invocations.ping(self._http, server.url, self._unreachable_s)
        except NO_ANSWER as error:
            return _describe(error)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
