"""RolloutApp: `BedrockAgentCoreApp` with rollouts (extra `agentcore`).

An AgentCore agent replaces its decorator by `@app.rollout_entrypoint`, or has both: payloads with rollout
data reach the rollout entrypoint, all others `@app.entrypoint`. The base class's request context reaches the
agent, and its task tracking determines the status of `/ping`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Protocol

import msgspec
from msgspec import structs

from afield import wire
from afield.errors import UsageError
from afield.sdk.agent import AgentEntry, Context
from afield.sdk.app import Entrypoints, HttpReply, Ping, Receive, Scope, Send, parse_json, read_body, respond
from afield.sdk.runner import Runner
from afield.sdk.signed_invocations import default_host, in_container, key_for

try:
    from bedrock_agentcore import BedrockAgentCoreApp
    from bedrock_agentcore.runtime.context import BedrockAgentCoreContext
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise UsageError("RolloutApp needs bedrock-agentcore: pip install 'afield[agentcore]'") from error


class Lifespan(Protocol):
    def __call__(self, app: Any, /) -> AbstractAsyncContextManager[Any]: ...


class AgentCoreContext(Context, frozen=True):
    """Context of a rollout with the request headers of its invocation."""

    @property
    def request_headers(self) -> dict[str, str]:
        return BedrockAgentCoreContext.get_request_headers() or {}


class RolloutApp(BedrockAgentCoreApp, Entrypoints):
    """Behaves as `afield.App`; `entrypoint`, `ping` and `websocket` are those of the base class.

    An app may have an `entrypoint` and a `rollout_entrypoint`, in any order; the payload tells them apart.
    """

    def __init__(
        self,
        debug: bool = False,
        lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] | None = None,
    ) -> None:
        @asynccontextmanager
        async def lifespan_with_runner(app: Starlette) -> AsyncIterator[Any]:
            async with lifespan(app) if lifespan else nullcontext() as state:
                yield state
            if self.runner is not None:
                self.runner.close()

        self._production: Callable[..., Any] | None = None
        super().__init__(
            debug, lifespan_with_runner, [*(middleware or ()), Middleware(_CheckedBody, entrypoints=self)]
        )
        self.router.routes.insert(0, Route("/ping", self._ping_status, methods=["GET"]))
        stop_route = Route("/invocations/{session_id}", self._stop, methods=["DELETE"])
        self.router.routes.insert(0, stop_route)
        self._tasks: dict[str, int] = {}

    def _runner_of(self, entry: AgentEntry) -> Runner:
        async def invoked(payload: Any) -> Response:
            return _response(self.invoke(payload))

        super().entrypoint(invoked)
        entry = structs.replace(entry, context=AgentCoreContext)
        return Runner(entry, began=self._began, ended=self._ended)

    def entrypoint(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function for invocations that are no rollouts."""
        rollouts = self.handlers.get("main") if self.runner is not None else None
        self._production = super().entrypoint(func)
        if rollouts is not None:
            self.handlers["main"] = rollouts
        return func

    async def _invoke_handler(
        self, handler: Callable[..., Any], request_context: Any, takes_context: bool, payload: Any
    ) -> Any:
        rollout = isinstance(payload, Mapping) and wire.ROLLOUT_FIELD in payload
        if self._production is not None and not rollout:
            handler, takes_context = self._production, self._takes_context(self._production)
        return await super()._invoke_handler(handler, request_context, takes_context, payload)

    def _began(self, session_id: str) -> None:
        self._tasks[session_id] = self.add_async_task(f"rollout {session_id}")

    def _ended(self, session_id: str) -> None:
        self.complete_async_task(self._tasks.pop(session_id))

    async def _ping_status(self, request: Request) -> Response:
        status = self.get_current_ping_status()
        active = self.runner.active if self.runner else []
        instance = self.runner.instance if self.runner else ""
        changed = int(self._last_status_update_time)
        ping = Ping(status=status.value, time_of_last_update=changed, active=active, instance=instance)
        return _response(HttpReply(200, ping))

    def run(self, port: int = 8080, host: str | None = None, **kwargs: Any) -> None:
        """Serve on loopback with signed invocations, or on all addresses inside a container."""
        container = in_container()
        host = host or default_host(container)
        self.restrict(key_for(host, None, unsigned=False, container=container), [])
        super().run(port=port, host=host, **kwargs)

    async def _stop(self, request: Request) -> Response:
        if unsigned := self.check_signature(request.scope):
            return _response(unsigned)
        return _response(self.stop(request.path_params["session_id"]))


class _CheckedBody:
    """Middleware that rejects bodies as `App` does: too large, unsigned or not JSON."""

    def __init__(self, app: Any, entrypoints: Entrypoints) -> None:
        self._app = app
        self._entrypoints = entrypoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/invocations":
            await self._app(scope, receive, send)
            return
        body = await read_body(receive)
        parsed = body
        if not isinstance(body, HttpReply):
            parsed = self._entrypoints.check_signature(scope, body) or parse_json(body)
        if isinstance(parsed, HttpReply):
            await respond(send, parsed)
            return
        messages: list[MutableMapping[str, Any]] = [
            {"type": "http.request", "body": body, "more_body": False}
        ]

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def _response(answer: HttpReply) -> Response:
    return Response(msgspec.json.encode(answer.body), answer.status, media_type="application/json")
