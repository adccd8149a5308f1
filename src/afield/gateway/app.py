"""The gateway's HTTP face: a raw ASGI app.

Paths under `/s/{session}/` and the bare dialect paths are for agents, with the session's key; the rest
is for trainers and collectors, with the admin key (see `control`). A wrong or missing key is always
401, and nothing but `POST /sessions` ever makes a session.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import Any

from afield.errors import Conflict, Missing, Unavailable, UsageError
from afield.gateway import control
from afield.gateway.calls import Done, Piece, Started
from afield.gateway.dialects import chat
from afield.gateway.http import ClientGone, EventStream, Receive, Scope, Send, key_of, read_body, send_json
from afield.gateway.keys import Scope as KeyScope
from afield.gateway.refusal import (
    Refusal,
    bad_request,
    conflict,
    engine_down,
    forbidden,
    not_found,
    unauthorized,
)
from afield.gateway.service import LocalGateway
from afield.gateway.sessions import Session

log = logging.getLogger("afield.gateway")


class App:
    def __init__(self, gateway: LocalGateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway serves http, not {scope['type']}")
        session_id, path = split_path(scope["path"])
        dialect = path.startswith("/v1/")
        try:
            if dialect or session_id:
                await self._agent(session_id, path, scope, receive, send)
            else:
                await self._control(path, scope, receive, send)
        except (Refusal, Missing, Unavailable, OverflowError) as error:
            refusal = as_refusal(error)
            log.info("%s %s: %d %s", scope["method"], scope["path"], refusal.status, refusal.message)
            shape = chat.encode_error if dialect else control.encode_error
            await send_json(send, refusal.status, shape(refusal))
        except (ClientGone, asyncio.CancelledError):
            log.info("%s %s: the client left", scope["method"], scope["path"])

    # --- agents ----------------------------------------------------------------------------------

    async def _agent(
        self, session_id: str | None, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        route = (scope["method"], path)
        if route == ("POST", "/v1/chat/completions"):
            session = self._session(session_id, scope, KeyScope.INFER)
            await self._chat(session, scope, receive, send)
        elif route == ("GET", "/v1/models"):
            self._session(session_id, scope, KeyScope.INFER)
            model = {"id": self._gateway.tokens.name, "object": "model", "created": 0, "owned_by": "afield"}
            await send_json(send, 200, {"object": "list", "data": [model]})
        elif route in (("POST", "/reward"), ("POST", "/complete")):
            session = self._session(session_id, scope, KeyScope.REWARD)
            body = await read_body(scope, receive)
            await send_json(send, 200, await control.report(self._gateway, session, path, body))
        else:
            self._session(session_id, scope, KeyScope.INFER)
            raise not_found(f"{scope['method']} {path} is not served", "POST v1/chat/completions is")

    def _session(self, session_id: str | None, scope: Scope, needs: KeyScope) -> Session:
        """The session a request may use; the key decides, the path must agree."""
        key = key_of(scope)
        if not key:
            raise unauthorized()
        if self._gateway.keys.is_admin(key):
            if session_id is None:
                raise bad_request("an admin key names no session", "use /s/{session}/..., or a session key")
            return self._gateway.sessions.get(session_id)
        grant = self._gateway.keys.check(key)
        if grant is None or session_id not in (None, grant.session_id):
            raise unauthorized()
        if needs not in grant.scopes:
            raise forbidden(f"this key may not {needs}")
        try:
            return self._gateway.sessions.get(grant.session_id)
        except Missing as gone:
            raise unauthorized("the session of this key no longer exists") from gone

    async def _chat(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        request, wish = chat.decode(await read_body(scope, receive))
        task = asyncio.current_task()
        assert task is not None
        session.in_flight.add(task)
        watch = asyncio.create_task(_cancel_when_gone(receive, task))
        out = EventStream(send)
        turn_id: str | None = None
        try:
            async with aclosing(self._gateway.calls.run(session, request)) as items:
                started = await anext(items)
                assert isinstance(started, Started)
                turn_id = started.turn_id
                if request.stream:
                    await self._stream(session, started, items, wish, out)
                else:
                    done = [item async for item in items][-1]
                    assert isinstance(done, Done)
                    answer = chat.fold(session.id, started, done, wish, self._gateway.tokens)
                    await send_json(send, 200, answer)
        except asyncio.CancelledError:
            if turn_id and turn_id in session.forest:
                await asyncio.shield(self._gateway.sessions.withhold(session, turn_id))
            if watch.done():
                raise
            ended = conflict(f"session {session.id} was ended while this call ran")
            if not out.started:
                raise ended from None
            with suppress(TimeoutError):  # a client that no longer reads is not waited for
                async with asyncio.timeout(1):
                    await out.emit([chat.encode_error(ended)])
                    await out.close()
        finally:
            session.in_flight.discard(task)
            watch.cancel()

    async def _stream(
        self, session: Session, started: Started, items: Any, wish: chat.Wish, out: EventStream
    ) -> None:
        view = chat.Stream(session.id, started, session.last_activity, wish, self._gateway.tokens)
        try:
            async for item in items:
                opening = [] if out.started else view.opening()
                if isinstance(item, Piece):
                    await out.emit(opening + view.piece(item))
                elif isinstance(item, Done):
                    await out.emit(opening + view.closing(item))
            await out.close(b"data: [DONE]\n\n")
        except Refusal as refusal:
            if not out.started:
                raise
            await out.emit([chat.encode_error(refusal)])
            await out.close()

    # --- trainers and collectors -----------------------------------------------------------------

    async def _control(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/health":
            info = await self._gateway.engine.info()
            await send_json(send, 200, {"status": "ok", "version": info.version, "engine": info.kind})
            return
        if not self._gateway.keys.is_admin(key_of(scope)):
            raise unauthorized("this needs the admin key", "the gateway printed it, or it was given one")
        body = await read_body(scope, receive)
        try:
            status, value = await control.handle(self._gateway, scope, path, body)
        except Conflict as error:
            raise conflict(str(error)) from error
        except (UsageError, ValueError) as error:
            raise bad_request(str(error)) from error
        await send_json(send, status, value)


def as_refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, OverflowError):
        return bad_request(f"a number is too large: {error}")
    return not_found(str(error)) if isinstance(error, Missing) else engine_down(str(error))


def split_path(path: str) -> tuple[str | None, str]:
    """The session a path names, and the rest with exactly one /v1 before a dialect's route."""
    session_id = None
    if path.startswith("/s/"):
        session_id, slash, rest = path[3:].partition("/")
        path = slash + rest
    while path.startswith("/v1/v1/"):
        path = path[3:]
    if path in ("/chat/completions", "/models"):
        path = "/v1" + path
    return session_id, path.rstrip("/") or "/"


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
