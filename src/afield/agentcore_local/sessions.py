"""Sessions of the local AgentCore server: one isolated host each.

1. Concurrent invokes of a cold session share one start.
2. A session ends when it is stopped, idle or alive for too long, or when its program dies. The next invoke
with its id starts a fresh one.
3. An open invoke, or a `/ping` answer of HealthyBusy with `time_of_last_update`, keeps a session alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Self

import msgspec
from msgspec import Struct

from afield.agentcore_local.errors import ServiceError
from afield.agentcore_local.faults import FaultInjector
from afield.agentcore_local.hosts import HostError, ProgramHost, ProgramHosts
from afield.agentcore_local.http import BROKEN, ask
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.quotas import CallCounts, Quotas, TokenBucket
from afield.agentcore_local.requests import Lifecycle
from afield.utils.log_tail import tail

PING_S = 5.0
TAIL_BYTES = 4_000
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.05, 60.0
FIRST_ASK_S, LONGEST_ASK_S = 0.02, 0.5
SAFE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
Key = tuple[str, str, str]  # runtime id, endpoint, session id


class Timings(Struct, frozen=True, kw_only=True):
    """Durations of the server."""

    cold_start_s: float = 0.0
    """Minimum duration of a session start, in seconds."""
    init_s: float = 30.0
    """Time limit from the start of a program until it answers `/ping`, in seconds."""
    speed: float = 1.0
    """Divisor of session lifetimes, idle timeouts and response time limits, for fast tests."""
    answer_s: float = 900.0
    """Time limit until a program's response begins, in seconds."""
    stream_s: float = 3600.0
    """Time limit for the body of a response, in seconds."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, least = getattr(self, name), 0.0 if name == "cold_start_s" else 1e-3
            if not least <= value < math.inf:
                raise ValueError(f"{name} = {value:g} must be finite and at least {least:g}")


class HostedSession(Struct, frozen=True, kw_only=True):
    """Program and settings of a session."""

    image: AgentImage
    """Program to start."""
    version: str
    """Version of the agent runtime."""
    env: Mapping[str, str]
    """Environment variables of the program."""
    lifecycle: Lifecycle
    """Lifetime limits."""


class _Ping(Struct, frozen=True):
    """Answer to `/ping`."""

    status: str = ""
    time_of_last_update: float | None = None


class LocalSession:
    """Session of the server."""

    def __init__(self, key: Key, wanted: HostedSession) -> None:
        loop = asyncio.get_running_loop()
        self.key, self.wanted = key, wanted
        self.started = self.active = loop.time()
        self.since = time.time()
        self.invokes = self.answering = 0
        self.ready: asyncio.Future[ProgramHost] = loop.create_future()
        # Retrieve the exception, since no task may be waiting for it.
        self.ready.add_done_callback(lambda ready: ready.exception())
        self.over: asyncio.Future[str] = loop.create_future()
        self.removed = asyncio.Event()
        self.host: ProgramHost | None = None

    @contextmanager
    def busy(self) -> Generator[None]:
        """Count an open invoke, which keeps the session alive."""
        self.answering += 1
        self.invokes += 1
        try:
            yield
        finally:
            self.answering -= 1
            self.active = asyncio.get_running_loop().time()

    def end(self, why: str) -> None:
        """End the session; the first reason counts."""
        if not self.over.done():
            self.over.set_result(why)

    def view(self) -> dict[str, object]:
        runtime, endpoint, session_id = self.key
        return {
            "runtimeSessionId": session_id,
            "agentRuntimeId": runtime,
            "endpoint": endpoint,
            "agentRuntimeVersion": self.wanted.version,
            "state": "ready" if self.ready.done() else "starting",
            "where": self.host.where if self.host else "",
            "log": str(self.host.log) if self.host else "",
            "since": self.since,
            "idle_s": round(asyncio.get_running_loop().time() - self.active, 3)
            if not self.answering
            else 0.0,
            "invokes": self.invokes,
        }


class LocalSessions:
    """Sessions of the server, by runtime, endpoint and session id."""

    def __init__(
        self, hosts: ProgramHosts, quotas: Quotas, pace: Timings, faults: FaultInjector, counts: CallCounts
    ) -> None:
        self._hosts, self._quotas, self._pace, self._faults = hosts, quotas, pace, faults
        self._counts = counts
        self._alive: dict[Key, LocalSession] = {}
        self._starts = TokenBucket(quotas.start_rate, quotas.burst_s, time.monotonic)

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for session in self._alive.values():
            session.end("closed")
        await self._group.__aexit__(None, None, None)

    def find(self, key: Key) -> LocalSession | None:
        return self._alive.get(key)

    async def enter(self, key: Key, wanted: HostedSession) -> LocalSession:
        """Return the session, started if necessary; raises ServiceError if it cannot start."""
        while (session := self._alive.get(key)) is not None and session.over.done():
            await session.removed.wait()
        if session is None:
            session = self._begin(key, wanted)
        # Shield: a client that disconnects must not cancel a start that others wait for.
        await asyncio.shield(session.ready)
        return session

    def _begin(self, key: Key, wanted: HostedSession) -> LocalSession:
        if len(self._alive) >= self._quotas.sessions:
            message = f"maxVms limit exceeded: {self._quotas.sessions} sessions at once"
            raise ServiceError("ServiceQuotaExceededException", message)
        self._starts.take("session starts")
        session = self._alive[key] = LocalSession(key, wanted)
        self._counts.started()
        self._group.create_task(self._live(session))
        return session

    async def stop(self, session: LocalSession, why: str = "stopped") -> None:
        """End a session and wait until its id is free again."""
        session.end(why)
        await session.removed.wait()

    def stop_all(self, runtime_id: str) -> None:
        for session in [s for s in self._alive.values() if s.key[0] == runtime_id]:
            session.end("deleted")

    def view(self) -> list[dict[str, object]]:
        return [session.view() for session in self._alive.values()]

    def __len__(self) -> int:
        return len(self._alive)

    # --- session lifecycle -----------------------------------------------------------------------

    async def _live(self, session: LocalSession) -> None:
        starting = asyncio.create_task(self._start(session))
        problem: ServiceError | None = None
        try:
            await asyncio.wait({starting, session.over}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and (problem := starting.result()) is not None:
                session.end("failed")
            elif session.host is not None and not session.over.done():
                session.active = asyncio.get_running_loop().time()
                session.ready.set_result(session.host)
                await self._watch(session, session.host)
        finally:
            await self._remove(session, starting, problem)

    async def _remove(
        self, session: LocalSession, starting: asyncio.Task[ServiceError | None], problem: ServiceError | None
    ) -> None:
        """Kill the program, free the id, then fail the invokes that waited for the start."""
        session.end("closed")
        starting.cancel()
        await asyncio.wait({starting})
        if session.host:
            session.host.kill()
            await session.host.ended()
        why = session.over.result()
        self._counts.ends[why] += 1
        self._alive.pop(session.key, None)
        session.removed.set()
        if not session.ready.done():
            stopped = ServiceError("RetryableConflictException", f"the session ended while it started: {why}")
            session.ready.set_exception(problem or stopped)

    async def _start(self, session: LocalSession) -> ServiceError | None:
        began = asyncio.get_running_loop().time()
        wanted, pace = session.wanted, self._pace
        name = _file_name(session.key[2], self._counts.starts)
        try:
            session.host = await self._hosts.start(wanted.image, name, wanted.env)
            async with asyncio.timeout(pace.init_s):
                problem = await self._first_ping(session.host)
        except HostError as error:
            return ServiceError("RuntimeClientError", f"the program cannot be started: {error}")
        except TimeoutError:
            log = tail(session.host.log, TAIL_BYTES) if session.host else ""
            message = f"Runtime initialization time exceeded: no /ping within {pace.init_s:g} s. {log}"
            return ServiceError("RuntimeClientError", message.strip())
        except OSError as error:  # local problem, such as too many open files; other sessions continue
            return ServiceError("InternalServerException", f"the session cannot be started: {error}")
        await asyncio.sleep(began + pace.cold_start_s - asyncio.get_running_loop().time())
        return problem

    async def _first_ping(self, host: ProgramHost) -> ServiceError | None:
        ended = asyncio.ensure_future(host.ended())
        wait_s = FIRST_ASK_S
        try:
            while not ended.done():
                if await _ping(host) is not None:
                    return None
                await asyncio.wait({ended}, timeout=wait_s)
                wait_s = min(wait_s * 1.5, LONGEST_ASK_S)
            message = f"the program ended before it served ({ended.result()}). {tail(host.log, TAIL_BYTES)}"
            return ServiceError("RuntimeClientError", message.strip())
        finally:
            ended.cancel()

    async def _watch(self, session: LocalSession, host: ProgramHost) -> None:
        """Wait until the session ends: program exit, idle timeout, lifetime, fault or `end`."""
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(host.ended())
        lifecycle, speed = session.wanted.lifecycle, self._pace.speed
        idle_s, max_lifetime_s = (
            lifecycle.idle_runtime_session_timeout / speed,
            lifecycle.max_lifetime / speed,
        )
        fault = self._faults.draw("die", session.key[2])
        killed_at = loop.time() + fault.seconds if fault else float("inf")
        look_s = min(max(idle_s / 4, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        try:
            while True:
                next_s = min(look_s, max(0.0, min(session.started + max_lifetime_s, killed_at) - loop.time()))
                await asyncio.wait({ended, session.over}, timeout=next_s, return_when=asyncio.FIRST_COMPLETED)
                if ended.done() or session.over.done():
                    break
                await self._look(session, host, idle_s, max_lifetime_s, killed_at)
            if ended.done():
                session.end("died")
        finally:
            ended.cancel()

    async def _look(
        self, session: LocalSession, host: ProgramHost, idle_s: float, max_lifetime_s: float, killed_at: float
    ) -> None:
        now = asyncio.get_running_loop().time()
        if now >= session.started + max_lifetime_s:
            session.end("lifetime")
        elif now >= killed_at:
            session.end("fault")
        elif session.answering:
            session.active = now
        else:
            message = await _ping(host)
            if message and message.status == "HealthyBusy" and message.time_of_last_update is not None:
                session.active = now
            elif now - session.active >= idle_s and not session.answering:
                session.end("idle")


async def _ping(host: ProgramHost) -> _Ping | None:
    """The program's answer to `/ping`; None if it does not answer with status 200."""
    try:
        async with (
            asyncio.timeout(PING_S),
            ask(await host.connect(), "GET", "/ping", {"accept": "*/*"}) as reply,
        ):
            body = await reply.read()
            if reply.status != 200:
                return None
    except (*BROKEN, TimeoutError):
        return None
    try:
        return msgspec.json.decode(body, type=_Ping)
    except msgspec.MsgspecError:
        return _Ping()


def _file_name(session_id: str, number: int) -> str:
    """Name of a log file; session ids may contain any character."""
    name = session_id if SAFE.match(session_id) else hashlib.sha256(session_id.encode()).hexdigest()
    return f"{name}-{number}"
