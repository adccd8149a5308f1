"""The data plane: invoke, command, stop. Answers of programs pass through as they come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from afield.agentcore_local import http
from afield.agentcore_local.control_plane import DEFAULT, Control, Runtime
from afield.agentcore_local.errors import ConnectionCut, Problem, invalid, not_found
from afield.agentcore_local.faults import Luck
from afield.agentcore_local.hosts import Broken, Ended, Output, Place
from afield.agentcore_local.http import BROKEN, Reply, Request, ask
from afield.agentcore_local.quotas import Bucket, Quotas
from afield.agentcore_local.requests import Command, RequestHeaders, read
from afield.agentcore_local.sessions import Key, Pace, Session, Sessions, Wanted

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


class Data:
    def __init__(self, control: Control, sessions: Sessions, quotas: Quotas, pace: Pace, luck: Luck) -> None:
        self._control, self._sessions, self._pace, self._luck = control, sessions, pace, luck
        self._quotas = quotas
        self._invokes: dict[str, Bucket] = {}
        self._stops = Bucket(quotas.stop_rate, quotas.burst_s, time.monotonic)

    async def invoke(self, request: Request, arn: str) -> None:
        body = await request.body()
        await self._ask(request, arn, "POST", "/invocations", body)

    async def card(self, request: Request, arn: str) -> None:
        await self._ask(request, arn, "GET", "/.well-known/agent-card.json", b"")

    async def _ask(self, request: Request, arn: str, method: str, path: str, body: bytes) -> None:
        runtime, key, wanted = self._wanted(request, arn)
        session = await self._sessions.enter(key, wanted)
        allowed = runtime.serving(key[1]).settings.request_header_configuration
        headers = {**_passed(request, allowed), SESSION: key[2], REQUEST: request.id}
        with session.busy():
            try:
                async with (
                    asyncio.timeout(self._pace.answer_s / self._pace.hurry) as limit,
                    ask(await session.ready.result().connect(), method, path, headers, body) as reply,
                ):
                    await self._unlucky(key[2])
                    limit.reschedule(asyncio.get_running_loop().time() + self._stream_s)
                    await _pass_on(request, reply, key[2])
            except TimeoutError as error:
                raise _failed("did not answer in time", session) from error
            except BROKEN as error:
                await self._mourn(session)
                # What asyncio says of it counts bytes that nobody knows of.
                why = "" if isinstance(error, asyncio.IncompleteReadError) else f": {error}"
                raise _failed(f"broke off before it had answered{why}", session) from error

    @property
    def _stream_s(self) -> float:
        return self._pace.stream_s / self._pace.hurry

    async def _unlucky(self, session_id: str) -> None:
        if fault := self._luck.strikes("hang", session_id):
            await asyncio.sleep(fault.seconds)
        if self._luck.strikes("cut", session_id):
            raise ConnectionCut

    async def _mourn(self, session: Session) -> None:
        """A program that broke off may be dead; then its session is over before anybody asks again."""
        place = session.ready.result()
        try:
            async with asyncio.timeout(1.0):
                await place.ended()
        except TimeoutError:
            return
        await self._sessions.stop(session, "died")

    async def command(self, request: Request, arn: str) -> None:
        wish = read(await request.body(), Command)
        _, key, wanted = self._wanted(request, arn)
        session = await self._sessions.enter(key, wanted)
        with session.busy():
            headers = [("content-type", http.EVENT_STREAM), (SESSION, key[2])]
            await request.begin(200, headers)
            async with aclosing(_events(session.ready.result(), wish)) as events:
                async for event in events:
                    await request.piece(event)
            await request.end()

    async def stop(self, request: Request, arn: str) -> None:
        await request.body()
        runtime = self._control.find(arn)
        key = self._key(request, runtime)
        if SESSION not in request.headers:
            raise invalid("runtimeSessionId", "is required")
        self._stops.take("stops")
        session = self._sessions.find(key)
        if session is None:
            raise not_found(f"session {key[2]} of agent {runtime.id}")
        if not self._luck.strikes("lie", key[2]):
            await self._sessions.stop(session)
        await request.answer(200, {}, [(SESSION, key[2])])

    # --- what is asked for -----------------------------------------------------------------------

    def _wanted(self, request: Request, arn: str) -> tuple[Runtime, Key, Wanted]:
        runtime = self._control.find(arn)
        key = self._key(request, runtime)
        version = runtime.serving(key[1])
        bucket = self._invokes.get(runtime.id)
        if bucket is None:
            bucket = Bucket(self._quotas.invoke_rate, self._quotas.burst_s, time.monotonic)
            self._invokes[runtime.id] = bucket
        bucket.take("invokes of one agent")
        self._luck.check(key[2])
        settings = version.settings
        wanted = Wanted(
            image=version.image,
            version=version.number,
            env=settings.environment_variables,
            lifecycle=settings.lifecycle_configuration,
        )
        return runtime, key, wanted

    def _key(self, request: Request, runtime: Runtime) -> Key:
        session_id = request.headers.get(SESSION) or str(uuid.uuid4())
        if not 33 <= len(session_id) <= 256:
            raise invalid("runtimeSessionId", f"has {len(session_id)} characters; 33 to 256 are allowed")
        return runtime.id, request.query.get("qualifier", DEFAULT), session_id


def _passed(request: Request, allowed: RequestHeaders | None) -> dict[str, str]:
    more = {name.lower() for name in allowed.request_header_allowlist} if allowed else set()
    known = PASSED | more
    return {
        name: value for name, value in request.headers.items() if name in known or name.startswith(CUSTOM)
    }


def _failed(why: str, session: Session) -> Problem:
    return Problem("RuntimeClientError", f"the program of session {session.key[2]} {why}. {LOGS}")


async def _pass_on(request: Request, reply: Reply, session_id: str) -> None:
    if reply.status >= 400:
        await reply.read()
        raise Problem("RuntimeClientError", f"Received error ({reply.status}) from runtime. {LOGS}")
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


async def _events(place: Place, wish: Command) -> AsyncGenerator[bytes]:
    yield http.event_frame("chunk", {"contentStart": {}})
    try:
        async with aclosing(place.run(wish.command, wish.timeout)) as said:
            async for one in said:
                yield http.event_frame("chunk", _chunk(one))
    except Broken as error:
        yield http.exception_frame("runtimeClientError", {"message": str(error)})


def _chunk(said: Output | Ended) -> dict[str, object]:
    if isinstance(said, Output):
        return {"contentDelta": {said.channel: said.text}}
    status = "TIMED_OUT" if said.timed_out else "COMPLETED"
    return {"contentStop": {"exitCode": said.exit_code, "status": status}}
