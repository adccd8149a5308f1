"""App: the `/invocations` and `/ping` contract of an agent's container, as a small ASGI app.

`POST /invocations` checks the payload before any work, answers at once, and works in the background.
The same session again gets the same answer and no second run. `GET /ping` always answers: agents run
in threads of their own. A body that is too large, not JSON or not a rollout is refused with an error
that names what is wrong. `DELETE /invocations/{session_id}` stops a rollout.
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

log = logging.getLogger("afield.sdk")

ONE = "/invocations/"
SIGNATURE = HEADER.lower().encode()
ROUTES = "GET /ping, POST /invocations or DELETE /invocations/{session_id}"
BODY_BYTES = 100 * 1024 * 1024
F = TypeVar("F", bound=Callable[..., Any])
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Answer(Struct, frozen=True):
    status: int
    body: object


class Ping(Struct, frozen=True, kw_only=True):
    status: str
    time_of_last_update: int
    active: list[str]
    # Another one after a restart: what ran before has died.
    instance: str = ""


def refusal(status: int, kind: str, message: str, hint: str) -> Answer:
    return Answer(status, {"error": {"type": kind, "message": message, "hint": hint}})


class Entrypoints:
    """What every rollout app offers: the decorator, and the rollouts of what it decorates."""

    runner: Runner | None = None
    key: InvocationKey | None = None

    def guard(self, key: InvocationKey | None, outcome_roots: Sequence[Path]) -> None:
        """From now on: take only what is signed with `key`, and deliver to no `file:` outside these roots."""
        self.key = key
        if self.runner is not None:
            self.runner.file_roots = tuple(outcome_roots)

    def refused(self, scope: Scope, body: bytes = b"") -> Answer | None:
        """The answer to whoever may not ask this; None for those who may."""
        if self.key is None:
            return None
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == SIGNATURE]
        problem = self.key.problem(given[0] if given else "", scope["method"], scope["path"], body)
        if not problem:
            return None
        hint = "send it through afield as the user who started this agent, or give both the same key file"
        return refusal(401, "unsigned", f"only the controller may do that: {problem}", hint)

    @overload
    def rollout_entrypoint(self, fn: F) -> F: ...

    @overload
    def rollout_entrypoint(self, *, aggregate: Aggregate = None) -> Callable[[F], F]: ...

    def rollout_entrypoint(self, fn: Callable[..., Any] | None = None, *, aggregate: Aggregate = None) -> Any:
        """Makes `fn(payload)` or `fn(payload, context)`, sync or async, what this app runs."""
        check_aggregate(aggregate)
        if fn is None:
            return lambda fn: self._decorate(fn, aggregate)
        return self._decorate(fn, aggregate)

    def _decorate(self, fn: F, aggregate: Aggregate) -> F:
        entry = entry_of(fn, whole_payload=True, aggregate=aggregate)
        if self.runner is not None:
            raise UsageError("this app has a rollout entrypoint already; an app runs one agent")
        self.runner = self._runner_of(entry)
        return mark(fn, entry)

    def _runner_of(self, entry: AgentEntry) -> Runner:
        return Runner(entry)

    def invoke(self, payload: object) -> Answer:
        if self.runner is None:
            hint = "decorate the agent's function with @app.rollout_entrypoint"
            return refusal(500, "no_entrypoint", "this app has no rollout entrypoint", hint)
        try:
            return Answer(200, self.runner.accept(payload))
        except WireError as error:
            hint = f"send the task's row as a JSON object with a valid '{wire.ROLLOUT_FIELD}'"
            return refusal(400, "invalid_payload", str(error), hint)
        except Unavailable as error:
            return refusal(503, "busy", str(error), "try again when other rollouts have ended")

    def stop(self, session_id: str) -> Answer:
        stopped = self.runner is not None and self.runner.stop(session_id)
        return Answer(200, {"session_id": session_id, "stopped": stopped})


class App(Entrypoints):
    """Decorate one function with `@app.rollout_entrypoint`, then `app.run()`."""

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
        """Serve on loopback, or on all addresses where the program has a container to itself.

        Invocations are signed, with the user's own key or the one in `key_file`; those of a container's
        platform need not be. `outcome_root` is a directory below which `file:` outcomes may be written.
        """
        import uvicorn

        logging.basicConfig(level=logging.INFO)
        container = in_container()
        host = host or default_host(container)
        key = key_for(host, Path(key_file) if key_file else None, unsigned=unsigned, container=container)
        self.guard(key, [Path(outcome_root)] if outcome_root else [])
        uvicorn.run(self, host=host, port=port, log_level="warning", access_log=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await respond(send, await self._answer(scope, receive))

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        match scope["path"], scope["method"]:
            case "/ping", "GET" | "HEAD":
                return Answer(200, self._ping())
            case "/invocations", "POST":
                return await self._invoked(scope, receive)
            case path, "DELETE" if path.startswith(ONE):
                return self.refused(scope) or self.stop(path.removeprefix(ONE))
            case "/ping" | "/invocations" as path, method:
                return refusal(405, "method", f"{path} does not take {method}", ROUTES)
            case path, _:
                return refusal(404, "not_found", f"there is no {path} here", ROUTES)

    async def _invoked(self, scope: Scope, receive: Receive) -> Answer:
        body = await read_body(receive)
        if isinstance(body, Answer):
            return body
        if refused := self.refused(scope, body):
            return refused
        payload = parse_json(body)
        return payload if isinstance(payload, Answer) else self.invoke(payload)

    def _ping(self) -> Ping:
        if self.runner is None:
            return Ping(status="Healthy", time_of_last_update=0, active=[])
        active, changed = self.runner.active, int(self.runner.changed)
        status = "HealthyBusy" if active else "Healthy"
        return Ping(status=status, time_of_last_update=changed, active=active, instance=self.runner.instance)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and self.runner:
                self.runner.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


async def read_body(receive: Receive) -> bytes | Answer:
    """The body, or the answer that refuses it."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            said = f"the body is over {BODY_BYTES // 2**20} MiB"
            return refusal(413, "too_large", said, "keep large inputs in a store and send their address")
    return bytes(body)


def parse_json(body: bytes) -> object | Answer:
    """The body as JSON, or the answer that refuses it."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return refusal(
            400,
            "invalid_json",
            f"the body is not JSON: {wire.json_problem(body, error)}",
            "send the payload as a JSON object",
        )


async def respond(send: Send, answer: Answer) -> None:
    body = msgspec.json.encode(answer.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
