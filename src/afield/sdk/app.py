"""App: ASGI server of the `/invocations` and `/ping` contract of agent containers.

1. `POST /invocations` checks the payload, responds at once and runs the agent in the background. A repeated
   session gets the same response and no second run.
2. `GET /ping` always responds, because agents run in their own threads.
3. `DELETE /invocations/{session_id}` stops a rollout.
4. Bodies that are too large, not JSON or not an invocation get a 4xx with the reason and a hint.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Struct

from afield import wire
from afield.errors import Unavailable, UsageError, WireError
from afield.sdk.agent import AgentEntry, entry_of, mark
from afield.sdk.results import Aggregate, check_aggregate
from afield.sdk.runner import Runner
from afield.sdk.signed_invocations import HEADER, InvocationKey, default_host, in_container, key_for

log = logging.getLogger(__name__)

SESSION_PATH = "/invocations/"
SIGNATURE = HEADER.lower().encode()
ROUTES = "GET /ping, POST /invocations or DELETE /invocations/{session_id}"
BODY_BYTES = 100 * 1024 * 1024
F = TypeVar("F", bound=Callable[..., Any])
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class HttpReply(Struct, frozen=True):
    """A JSON response."""

    status: int
    """HTTP status."""
    body: object
    """Value to encode as JSON."""


class Ping(Struct, frozen=True, kw_only=True):
    """Response to `GET /ping`, as AgentCore defines it, with two more fields."""

    status: str
    """"Healthy", or "HealthyBusy" while rollouts run."""
    time_of_last_update: int
    """Last change of the status, in seconds since the epoch."""
    active: list[str]
    """Ids of running sessions."""
    instance: str = ""
    """Random id of this process; after a restart it differs, and earlier rollouts are gone."""


def error_reply(status: int, kind: str, message: str, hint: str) -> HttpReply:
    """An error response with a message and a remedy."""
    return HttpReply(status, {"error": {"type": kind, "message": message, "hint": hint}})


class Entrypoints:
    """Base of agent apps: the entrypoint decorator, and running and stopping rollouts."""

    runner: Runner | None = None
    key: InvocationKey | None = None

    def restrict(self, key: InvocationKey | None, outcome_roots: Sequence[Path]) -> None:
        """Accept only invocations signed with `key`; write `file:` outcomes only below these directories."""
        self.key = key
        if self.runner is not None:
            self.runner.file_roots = tuple(outcome_roots)

    def check_signature(self, scope: Scope, body: bytes = b"") -> HttpReply | None:
        """A 401 for a request without a valid signature; None for a valid one."""
        if self.key is None:
            return None
        signatures = [value.decode("latin-1") for name, value in scope["headers"] if name == SIGNATURE]
        problem = self.key.problem(signatures[0] if signatures else "", scope["method"], scope["path"], body)
        if not problem:
            return None
        hint = "send it through afield as the user who started this agent, or give both the same --key-file"
        return error_reply(
            401, "unsigned", f"the invocation is not signed by the controller: {problem}", hint
        )

    @overload
    def rollout_entrypoint(self, fn: F) -> F: ...

    @overload
    def rollout_entrypoint(self, *, aggregate: Aggregate = None) -> Callable[[F], F]: ...

    def rollout_entrypoint(self, fn: Callable[..., Any] | None = None, *, aggregate: Aggregate = None) -> Any:
        """Register `fn(payload)` or `fn(payload, context)`, sync or async, as this app's agent."""
        check_aggregate(aggregate)
        if fn is None:
            return lambda fn: self._decorate(fn, aggregate)
        return self._decorate(fn, aggregate)

    def _decorate(self, fn: F, aggregate: Aggregate) -> F:
        entry = entry_of(fn, whole_payload=True, aggregate=aggregate)
        if self.runner is not None:
            raise UsageError(
                "this app already has a rollout entrypoint; create another App for a second agent"
            )
        self.runner = self._runner_of(entry)
        return mark(fn, entry)

    def _runner_of(self, entry: AgentEntry) -> Runner:
        return Runner(entry)

    def invoke(self, payload: object) -> HttpReply:
        """Start a rollout."""
        if self.runner is None:
            hint = "decorate the agent's function with @app.rollout_entrypoint"
            return error_reply(500, "no_entrypoint", "this app has no rollout entrypoint", hint)
        try:
            return HttpReply(200, self.runner.accept(payload))
        except WireError as error:
            hint = f"send the task as a JSON object with a valid '{wire.ROLLOUT_FIELD}' field"
            return error_reply(400, "invalid_payload", str(error), hint)
        except Unavailable as error:
            return error_reply(503, "busy", str(error), "retry when other rollouts have ended")

    def stop(self, session_id: str) -> HttpReply:
        """Stop a rollout."""
        stopped = self.runner is not None and self.runner.stop(session_id)
        return HttpReply(200, {"session_id": session_id, "stopped": stopped})


class App(Entrypoints):
    """An agent server: decorate one function with `@app.rollout_entrypoint`, then call `app.run()`."""

    def __init__(self, entry: AgentEntry | None = None) -> None:
        self.runner = None if entry is None else self._runner_of(entry)

    def run(
        self,
        host: str = "",
        port: int = 8080,
        *,
        key_file: str | Path | None = None,
        outcome_root: str | Path | None = None,
        unsigned: bool = False,
    ) -> None:
        """Serve on loopback, or on all addresses inside a container.

        Invocations must be signed with the user's key or the one in `key_file`, except inside a container,
        whose platform does not sign. `file:` outcomes may be written below `outcome_root`.
        """
        import uvicorn

        logging.basicConfig(level=logging.INFO)
        container = in_container()
        host = host or default_host(container)
        key = key_for(host, Path(key_file) if key_file else None, unsigned=unsigned, container=container)
        self.restrict(key, [Path(outcome_root)] if outcome_root else [])
        uvicorn.run(self, host=host, port=port, log_level="warning", access_log=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await respond(send, await self._respond_to(scope, receive))

    async def _respond_to(self, scope: Scope, receive: Receive) -> HttpReply:
        match scope["path"], scope["method"]:
            case "/ping", "GET" | "HEAD":
                return HttpReply(200, self._ping())
            case "/invocations", "POST":
                return await self._handle_invocation(scope, receive)
            case path, "DELETE" if path.startswith(SESSION_PATH):
                return self.check_signature(scope) or self.stop(path.removeprefix(SESSION_PATH))
            case "/ping" | "/invocations" as path, method:
                return error_reply(405, "method", f"{path} does not support {method}", ROUTES)
            case path, _:
                return error_reply(404, "not_found", f"no route {path}", ROUTES)

    async def _handle_invocation(self, scope: Scope, receive: Receive) -> HttpReply:
        body = await read_body(receive)
        if isinstance(body, HttpReply):
            return body
        if unsigned := self.check_signature(scope, body):
            return unsigned
        payload = parse_json(body)
        return payload if isinstance(payload, HttpReply) else self.invoke(payload)

    def _ping(self) -> Ping:
        if self.runner is None:
            return Ping(status="Healthy", time_of_last_update=0, active=[])
        active, changed = self.runner.active, int(self.runner.changed)
        status = "HealthyBusy" if active else "Healthy"
        return Ping(status=status, time_of_last_update=changed, active=active, instance=self.runner.instance)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self.runner:
                self.runner.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


async def read_body(receive: Receive) -> bytes | HttpReply:
    """The body, or a 413 if it is too large."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            message = f"the body is larger than {BODY_BYTES // 2**20} MiB"
            return error_reply(413, "too_large", message, "keep large inputs in a store and send their URL")
    return bytes(body)


def parse_json(body: bytes) -> object | HttpReply:
    """The body as JSON, or a 400 if it is not."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return error_reply(
            400,
            "invalid_json",
            f"the body is not JSON: {wire.json_problem(body, error)}",
            "send the payload as a JSON object",
        )


async def respond(send: Send, answer: HttpReply) -> None:
    body = msgspec.json.encode(answer.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
