"""ASGI application: routing and authentication.

Paths under `/s/{session}/` and the bare dialect paths take a session key. All other paths take the admin
key (see `admin_api`). A wrong or missing key gets 401. `POST /sessions` opens sessions, and so does a
request with a header key.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import MutableMapping
from typing import Any

from msgspec import structs

from afield.errors import Conflict, NotFound, Unavailable, UsageError, boundary
from afield.gateway import admin_api, side_calls, stored_responses
from afield.gateway.api_error import (
    ApiError,
    bad_request,
    conflict,
    engine_down,
    forbidden,
    not_found,
    unauthorized,
)
from afield.gateway.dialects import Dialect, Dialects, RawRequest, ResponseOptions, RouteMatch, models
from afield.gateway.dialects.base import PREFILL, idempotency_key
from afield.gateway.http import (
    KEYED,
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    headers,
    key_of,
    path_key,
    query,
    read_body,
    send_json,
)
from afield.gateway.model_request import ModelRequest
from afield.gateway.responder import Responder
from afield.gateway.service import LocalGateway
from afield.gateway.session_keys import HEADER_PREFIX, PREFIX, Grant, KeyScope
from afield.gateway.sessions import BodyBytes, Session
from afield.gateway.shards import session_of
from afield.types import Failure, FailureKind, Reason

log = logging.getLogger(__name__)

# Dialect routes without `/v1`, for clients whose base URL lacks it.
_BARE = re.compile(
    r"/(chat/completions|completions|responses(/[^/]+(/input_items|/cancel)?)?|messages(/count_tokens)?|models|models/[^/]+)"
)
# A repeated version prefix: the last one is the client's, the others come from the base URL.
_DOUBLED = re.compile(r"^(/v1|/v1beta)+(?=/v1/|/v1beta/)")
LARGE = 512 * 1024
"""Size of a body above which it is decoded in a thread, in bytes."""
_AGENT = ("/v1/", "/v1beta/")
PATH_KEY = "afield.path_key"
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})
HAND_IN_LESS = (
    "keep large files elsewhere and hand in their names, or start the gateway with --max-submission-mb,"
    " or a run with --set max_submission_mb=N"
)


class _Answer:
    """ASGI `send` that records whether the response has started."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.begun = True
        await self._send(message)


def _request_line(scope: Scope) -> str:
    """Method and path for a log line, with control characters escaped."""
    return f"{scope['method']} {scope['path'][:200].encode('unicode_escape').decode()}"


class GatewayApp:
    """ASGI application of a gateway."""

    def __init__(self, gateway: LocalGateway) -> None:
        self._gateway = gateway
        self._dialects = Dialects(gateway.tokenizer)
        self._responder = Responder(gateway)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway serves http, not {scope['type']}")
        if scope["path"].startswith(KEYED):
            scope = without_path_key(scope)
        failures: list[Failure] = []
        answer = _Answer(send)
        with boundary(FailureKind.INFRASTRUCTURE, Reason.RAISED, failures.append):
            await self._serve(scope, receive, answer)
        for failure in failures:
            log.error("%s: %s\n%s", _request_line(scope), failure.message, failure.traceback)
            if not answer.begun:  # otherwise the connection breaks off
                error = ApiError(500, "internal_error", "the gateway failed at this request", "see its log")
                await self._refuse(error, scope, answer)

    async def _refuse(self, error: ApiError, scope: Scope, send: Send) -> None:
        _, path = split_path(scope["path"])
        self._gateway.metrics.request_rejected(error.status)
        encode_error = (
            self._dialects.of_path(path).encode_error if path.startswith(_AGENT) else admin_api.encode_error
        )
        await send_json(send, error.status, encode_error(error), error.retry_after_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id, path = split_path(scope["path"])
        is_dialect_path = path.startswith(_AGENT)
        try:
            if scope.get(PATH_KEY) and not self._gateway.path_keys:
                raise unauthorized("keys in paths are not accepted", "start the gateway with --path-keys")
            if self._gateway.shard is not None:
                replayed = await self._gateway.shard.elsewhere(scope, receive, send, self._admits)
                if replayed is None:
                    return
                receive = replayed
            if is_dialect_path or session_id is not None:
                await self._agent(session_id, path, scope, receive, send)
            else:
                await self._control(path, scope, receive, send)
        except (ApiError, NotFound, Unavailable, OverflowError) as error:
            api_error = to_api_error(error)
            log.info("%s: %d %s", _request_line(scope), api_error.status, api_error.message)
            await self._refuse(api_error, scope, send)
        except (ClientGone, asyncio.CancelledError):
            log.info("%s: client disconnected", _request_line(scope))

    # --- agents and verifiers ---

    async def _agent(
        self, session_id: str | None, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        method = scope["method"]
        match = self._dialects.match(path) if method == "POST" else None
        if match is not None:
            session = await self._session(session_id, scope, KeyScope.INFER)
            try:
                await self._model_call(session, match, path, scope, receive, send)
            except (ApiError, NotFound, Unavailable, OverflowError) as error:
                session.refuse(to_api_error(error))
                raise
        elif method == "GET" and (
            listing := models(self._gateway.tokenizer.name, path, headers(scope), query(scope))
        ):
            await self._check(session_id, scope, KeyScope.INFER)
            await send_json(send, 200, listing)
        elif (parts := stored_responses.match(method, path)) is not None:
            session = await self._session(session_id, scope, KeyScope.INFER)
            await send_json(send, 200, await self._gateway.responses.serve(session, scope, parts))
        elif (method, path) in admin_api.SESSION_ROUTES:
            session = await self._session(session_id, scope, admin_api.SESSION_ROUTES[method, path].needs)
            grant = self._grant(key_of(scope))
            limits = self._gateway.limits
            with BodyBytes(session, limits.session_bytes) as body_bytes:
                body = await read_body(scope, receive, limits.submission_bytes, HAND_IN_LESS, body_bytes.take)
                response = await admin_api.handle_session(self._gateway, session, grant, scope, path, body)
            await send_json(send, 200, response)
        else:
            await self._check(session_id, scope, None)
            if header(scope, b"upgrade").lower() == "websocket":
                hint = "POST v1/responses over HTTP, with stream true for events"
                raise not_found(f"{path} is not served over a web socket", hint)
            raise not_found(f"{method} {path} is not served", "POST v1/chat/completions is, for one")

    async def _model_call(
        self, session: Session, match: RouteMatch, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        limits = self._gateway.limits
        with BodyBytes(session, limits.session_bytes) as body_bytes:
            body = await read_body(scope, receive, limits.request_bytes, count=body_bytes.take)
            raw = RawRequest(
                path,
                body,
                match.parts,
                query(scope),
                headers(scope),
                session.message_cache,
                session.id,
                session.row.spec.unsupported == "ignore",
            )
            dialect = match.dialect
            if match.verb == "compact":
                dialect = self._gateway.responses.compaction(session)
            request, options = await _decode(dialect, raw)
            if match.verb == "count":
                tokens = await self._gateway.calls.count(session, request)
                await send_json(send, 200, dialect.count(tokens))
            else:
                await self._responder.respond(session, dialect, request, options, receive, send)

    async def _check(self, session_id: str | None, scope: Scope, needs: KeyScope | None) -> None:
        """Checks a key for a request that needs no session, and opens none."""
        if self._gateway.header_keys.check(key_of(scope)) is None:
            await self._session(session_id, scope, needs)

    async def _session(self, session_id: str | None, scope: Scope, needs: KeyScope | None) -> Session:
        """Returns the session of a request. The key names the session; the path must agree."""
        key = key_of(scope)
        if not key:
            raise unauthorized()
        if self._gateway.keys.is_admin(key):
            if session_id is None:
                raise bad_request("an admin key names no session", "use /s/{session}/..., or a session key")
            return self._gateway.sessions.get(session_id)
        grant = self._gateway.keys.check(key)
        if grant is None and (row := self._gateway.header_keys.check(key)) is not None:
            if needs is not None and needs not in row.grant.scopes:
                raise _out_of_scope(row.grant, needs, f"header key {row.id}")
            return await self._gateway.header_keys.session(row, session_id, scope)
        if grant is None or session_id not in (None, grant.session_id):
            raise unauthorized()
        if needs is not None and needs not in grant.scopes:
            raise _out_of_scope(grant, needs, f"session {grant.session_id}")
        try:
            session = self._gateway.sessions.get(grant.session_id)
        except NotFound as gone:
            raise unauthorized("the session of this key no longer exists") from gone
        if session.row.nonce != grant.nonce:
            raise unauthorized("the session of this key was deleted; another has its id now")
        return session

    def _grant(self, key: str) -> Grant | None:
        """Returns the grant of a checked key; None for the admin key."""
        if self._gateway.keys.is_admin(key):
            return None
        row = self._gateway.header_keys.check(key)
        grant = row.grant if row else self._gateway.keys.check(key)
        if grant is None:
            raise unauthorized()
        return grant

    def _admits(self, key: str) -> bool:
        """Returns whether a key belongs to this gateway."""
        keys = self._gateway.keys
        return keys.is_admin(key) or bool(keys.check(key) or self._gateway.header_keys.check(key))

    # --- admin ---

    async def _control(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/live":
            await send_json(send, 200, {"status": "ok"})
            return
        if path == "/health":
            await send_json(send, *await self._gateway.health())
            return
        if not self._gateway.keys.is_admin(key_of(scope)):
            raise unauthorized("this needs the admin key", "the gateway printed it, or it was given one")
        body = await read_body(scope, receive, self._gateway.limits.request_bytes)
        try:
            if self._gateway.shard is not None:
                await self._gateway.shard.tell_others(scope, body)
            status, value = await admin_api.handle(self._gateway, scope, path, body)
        except Conflict as error:
            raise conflict(str(error)) from error
        except (UsageError, ValueError) as error:
            raise bad_request(str(error)) from error
        await send_json(send, status, value)


async def _decode(dialect: Dialect, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    if len(raw.body) > LARGE:
        # The session's message cache belongs to the event loop.
        request, options = await asyncio.to_thread(dialect.decode, structs.replace(raw, memo=None))
    else:
        request, options = dialect.decode(raw)
    if not request.messages and request.prompt is None and request.after is None:
        raise bad_request("nothing in this request is a message to answer", "send at least one message")
    if (tag := side_calls.tag_of(raw.headers, request)) is not None:
        request = structs.replace(request, tags=(*request.tags, tag))
    if request.messages and request.messages[-1].role == "assistant" and PREFILL not in request.tags:
        request = structs.replace(request, tags=(*request.tags, PREFILL))
    if key := idempotency_key(raw):
        request = structs.replace(request, idempotency_key=key)
    return request, options


def _out_of_scope(grant: Grant, needs: KeyScope, owner: str) -> ApiError:
    log.warning("%s: key lacks scope=%s", owner, needs)
    return forbidden(f"this key may not {needs}", f"its scopes are: {', '.join(sorted(grant.scopes))}")


def to_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverflowError):
        return bad_request(f"a number is too large: {error}")
    return not_found(str(error)) if isinstance(error, NotFound) else engine_down(str(error))


def without_path_key(scope: Scope) -> Scope:
    """Moves the key of a `/k/KEY/...` path into a header, so that logs of the path do not show it."""
    key, rest = path_key(scope["path"]) or ("", "")
    key = key if key.startswith((PREFIX, HEADER_PREFIX)) else ""  # the admin key is not accepted in a path
    other_headers = [(name, value) for name, value in scope["headers"] if name not in KEY_HEADERS]
    other_headers.append((b"authorization", f"Bearer {key}".encode()))
    session_id = session_of("", scope, key)
    path = f"/s/{session_id}{rest}" if session_id else rest
    return {**scope, "path": path, "raw_path": path.encode(), "headers": other_headers, PATH_KEY: True}


def split_path(path: str) -> tuple[str | None, str]:
    """Splits a path into session id and route, with exactly one version prefix."""
    session_id = None
    if path.startswith("/s/"):
        session_id, slash, rest = path[3:].partition("/")
        path = slash + rest
    path = _DOUBLED.sub("", path)
    if _BARE.fullmatch(path):
        path = ("/v1beta" if ":" in path else "/v1") + path
    elif path.startswith("/v1/models/") and ":" in path:
        path = "/v1beta" + path[3:]
    return session_id, path.rstrip("/") or "/"
