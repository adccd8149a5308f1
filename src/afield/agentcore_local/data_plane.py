"""Data plane: invoke, command and stop. Streams the programs' responses through."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from afield.agentcore_local import http
from afield.agentcore_local.control_plane import DEFAULT, ControlPlane, LocalAgentRuntime
from afield.agentcore_local.errors import ConnectionCut, ServiceError, invalid, not_found
from afield.agentcore_local.faults import FaultInjector
from afield.agentcore_local.hosts import CommandExit, CommandOutput, HostError, ProgramHost
from afield.agentcore_local.http import BROKEN, ApiRequest, Reply, ask
from afield.agentcore_local.quotas import Quotas, TokenBucket
from afield.agentcore_local.requests import CommandRequest, RequestHeaders, read
from afield.agentcore_local.sessions import HostedSession, Key, LocalSession, LocalSessions, Timings

SESSION = "x-amzn-bedrock-agentcore-runtime-session-id"
REQUEST = "x-amzn-bedrock-agentcore-runtime-request-id"
CUSTOM = "x-amzn-bedrock-agentcore-runtime-custom-"
PASSED = frozenset(
    {
        "content-type",
        "accept",
        "x-amzn-bedrock-agentcore-runtime-user-id",
        "mcp-session-id",
        "mcp-protocol-version",
        "x-amzn-trace-id",
        "traceparent",
        "tracestate",
        "baggage",
    }
)
RETURNED = (
    "mcp-session-id",
    "mcp-protocol-version",
    "x-amzn-trace-id",
    "traceparent",
    "tracestate",
    "baggage",
)
LOGS = "Please check the session's log for more information."


class DataPlane:
    """Operations on sessions."""

    def __init__(
        self,
        control: ControlPlane,
        sessions: LocalSessions,
        quotas: Quotas,
        pace: Timings,
        faults: FaultInjector,
    ) -> None:
        self._control, self._sessions, self._pace, self._faults = control, sessions, pace, faults
        self._quotas = quotas
        self._invokes: dict[str, TokenBucket] = {}
        self._stops = TokenBucket(quotas.stop_rate, quotas.burst_s, time.monotonic)

    async def invoke(self, request: ApiRequest, arn: str) -> None:
        body = await request.body()
        await self._ask(request, arn, "POST", "/invocations", body)

    async def card(self, request: ApiRequest, arn: str) -> None:
        await self._ask(request, arn, "GET", "/.well-known/agent-card.json", b"")

    async def _ask(self, request: ApiRequest, arn: str, method: str, path: str, body: bytes) -> None:
        runtime, key, wanted = self._wanted(request, arn)
        session = await self._sessions.enter(key, wanted)
        allowed = runtime.serving(key[1]).settings.request_header_configuration
        headers = {**_passed(request, allowed), SESSION: key[2], REQUEST: request.id}
        with session.busy():
            try:
                async with (
                    asyncio.timeout(self._pace.answer_s / self._pace.speed) as limit,
                    ask(await session.ready.result().connect(), method, path, headers, body) as reply,
                ):
                    await self._inject_fault(key[2])
                    limit.reschedule(asyncio.get_running_loop().time() + self._stream_s)
                    await _pass_on(request, reply, key[2])
            except TimeoutError as error:
                raise _failed("did not answer in time", session) from error
            except BROKEN as error:
                await self._stop_if_dead(session)
                # The message of IncompleteReadError counts bytes, which tells a client nothing.
                why = "" if isinstance(error, asyncio.IncompleteReadError) else f": {error}"
                raise _failed(f"broke off before it had answered{why}", session) from error

    @property
    def _stream_s(self) -> float:
        return self._pace.stream_s / self._pace.speed

    async def _inject_fault(self, session_id: str) -> None:
        if fault := self._faults.draw("hang", session_id):
            await asyncio.sleep(fault.seconds)
        if self._faults.draw("cut", session_id):
            raise ConnectionCut

    async def _stop_if_dead(self, session: LocalSession) -> None:
        """End the session if its program died, so that the next request starts a fresh one."""
        host = session.ready.result()
        try:
            async with asyncio.timeout(1.0):
                await host.ended()
        except TimeoutError:
            return
        await self._sessions.stop(session, "died")

    async def command(self, request: ApiRequest, arn: str) -> None:
        options = read(await request.body(), CommandRequest)
        _, key, wanted = self._wanted(request, arn)
        session = await self._sessions.enter(key, wanted)
        with session.busy():
            headers = [("content-type", http.EVENT_STREAM), (SESSION, key[2])]
            await request.begin(200, headers)
            async with aclosing(_events(session.ready.result(), options)) as events:
                async for event in events:
                    await request.piece(event)
            await request.end()

    async def stop(self, request: ApiRequest, arn: str) -> None:
        await request.body()
        runtime = self._control.find(arn)
        key = self._key(request, runtime)
        if SESSION not in request.headers:
            raise invalid("runtimeSessionId", "is required")
        self._stops.take("stops")
        session = self._sessions.find(key)
        if session is None:
            raise not_found(f"session {key[2]} of agent {runtime.id}")
        if not self._faults.draw("lie", key[2]):
            await self._sessions.stop(session)
        await request.answer(200, {}, [(SESSION, key[2])])

    # --- request parsing -------------------------------------------------------------------------

    def _wanted(self, request: ApiRequest, arn: str) -> tuple[LocalAgentRuntime, Key, HostedSession]:
        runtime = self._control.find(arn)
        key = self._key(request, runtime)
        version = runtime.serving(key[1])
        bucket = self._invokes.get(runtime.id)
        if bucket is None:
            bucket = TokenBucket(self._quotas.invoke_rate, self._quotas.burst_s, time.monotonic)
            self._invokes[runtime.id] = bucket
        bucket.take("invokes of one agent")
        self._faults.check(key[2])
        settings = version.settings
        wanted = HostedSession(
            image=version.image,
            version=version.number,
            env=settings.environment_variables,
            lifecycle=settings.lifecycle_configuration,
        )
        return runtime, key, wanted

    def _key(self, request: ApiRequest, runtime: LocalAgentRuntime) -> Key:
        session_id = request.headers.get(SESSION) or str(uuid.uuid4())
        if not 33 <= len(session_id) <= 256:
            raise invalid("runtimeSessionId", f"has {len(session_id)} characters; 33 to 256 are allowed")
        return runtime.id, request.query.get("qualifier", DEFAULT), session_id


def _passed(request: ApiRequest, allowed: RequestHeaders | None) -> dict[str, str]:
    more = {name.lower() for name in allowed.request_header_allowlist} if allowed else set()
    names = PASSED | more
    return {
        name: value for name, value in request.headers.items() if name in names or name.startswith(CUSTOM)
    }


def _failed(why: str, session: LocalSession) -> ServiceError:
    return ServiceError("RuntimeClientError", f"the program of session {session.key[2]} {why}. {LOGS}")


async def _pass_on(request: ApiRequest, reply: Reply, session_id: str) -> None:
    if reply.status >= 400:
        await reply.read()
        raise ServiceError("RuntimeClientError", f"Received error ({reply.status}) from runtime. {LOGS}")
    headers = [(SESSION, session_id), ("content-type", reply.headers.get("content-type", "application/json"))]
    headers += [(name, reply.headers[name]) for name in RETURNED if name in reply.headers]
    if reply.whole:
        body = await reply.read()
        await request.begin(reply.status, [*headers, ("content-length", str(len(body)))])
        await request.end(body)
        return
    await request.begin(reply.status, headers)
    gone = asyncio.create_task(request.gone())
    try:
        async for piece in reply.pieces():
            if gone.done():
                return
            await request.piece(piece)
    except BROKEN as error:
        raise ConnectionCut from error
    finally:
        gone.cancel()
    await request.end()


async def _events(host: ProgramHost, options: CommandRequest) -> AsyncGenerator[bytes]:
    yield http.event_frame("chunk", {"contentStart": {}})
    try:
        async with aclosing(host.run(options.command, options.timeout)) as output:
            async for event in output:
                yield http.event_frame("chunk", _chunk(event))
    except HostError as error:
        yield http.exception_frame("runtimeClientError", {"message": str(error)})


def _chunk(event: CommandOutput | CommandExit) -> dict[str, object]:
    if isinstance(event, CommandOutput):
        return {"contentDelta": {event.channel: event.text}}
    status = "TIMED_OUT" if event.timed_out else "COMPLETED"
    return {"contentStop": {"exitCode": event.exit_code, "status": status}}
