"""Routes of both planes on one port, and a view of what goes on under `/_acr/`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from afield.agentcore_local import logs, sigv4
from afield.agentcore_local.control_plane import Control, Reply
from afield.agentcore_local.data_plane import Data
from afield.agentcore_local.errors import ConnectionCut, Problem
from afield.agentcore_local.faults import Luck
from afield.agentcore_local.http import Receive, Request, Scope, Send
from afield.agentcore_local.quotas import Counts
from afield.agentcore_local.sessions import Sessions

log = logging.getLogger("afield.agentcore_local")
SIGNED = "AWS4-HMAC-SHA256 "
CARD = "/invocations/.well-known/agent-card.json"


class LocalAgentCoreApp:
    def __init__(
        self,
        control: Control,
        data: Data,
        sessions: Sessions,
        counts: Counts,
        luck: Luck,
        *,
        signed: bool,
        secret_key: str,
        folder: Path,
    ) -> None:
        self._secret_key = secret_key
        self._control, self._sessions = control, sessions
        self._counts, self._luck, self._signed, self._folder = counts, luck, signed, folder
        self._asked = {
            ("POST", "/invocations"): ("InvokeAgentRuntime", data.invoke),
            ("POST", "/commands"): ("InvokeAgentRuntimeCommand", data.command),
            ("POST", "/stopruntimesession"): ("StopRuntimeSession", data.stop),
            ("GET", CARD): ("GetAgentCard", data.card),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive, send)
        operation = ""
        try:
            if request.path.startswith("/_acr/"):
                if self._secret_key:
                    await self._check_signed(request)
                await request.answer(200, self._view(request.path))
                return
            operation, answer = self._route(request)
            await self._check_signed(request)
            await answer()
        except Problem as problem:
            log.info("%s %s: %d %s: %s", request.method, request.path, problem.status, problem.kind, problem)
            await (request.cut() if request.status else request.refuse(problem))
        except ConnectionCut:
            await request.cut()
        finally:
            if operation:
                self._counts.answered(operation, request.status)

    async def _check_signed(self, request: Request) -> None:
        if self._secret_key:
            body = await request.body()
            asked = request.method, request.path, request.query_string, request.headers, body
            if problem := sigv4.problem(self._secret_key, *asked):
                raise Problem("AccessDeniedException", problem)
        elif self._signed and not request.headers.get("authorization", "").startswith(SIGNED):
            raise Problem("AccessDeniedException", "Missing Authentication Token: the request is not signed")

    def _view(self, path: str) -> object:
        if path == "/_acr/sessions":
            return {"sessions": self._sessions.view()}
        if path == "/_acr/stats":
            return {**self._counts.view(), "sessions": len(self._sessions), "faults": self._luck.struck}
        raise Problem("ResourceNotFoundException", f"there is no {path}; only /_acr/sessions and /_acr/stats")

    # --- routes ----------------------------------------------------------------------------------

    def _route(self, request: Request) -> tuple[str, Callable[[], Any]]:
        for (method, end), (name, asked) in self._asked.items():
            if request.method == method and request.path.endswith(end):
                arn = unquote(request.path.removeprefix("/runtimes/").removesuffix(end))
                return name, partial(asked, request, arn)
        if logs.asked(request):
            return "FilterLogEvents", partial(logs.answer, request, self._folder)
        name, make = self._control_route(request)
        return name, partial(_told, request, make)

    def _control_route(self, request: Request) -> tuple[str, Callable[[bytes], Reply]]:
        control, query = self._control, request.query
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        match request.method, parts:
            case "PUT", ["runtimes"]:
                return "CreateAgentRuntime", control.create
            case "POST", ["runtimes"]:
                return "ListAgentRuntimes", lambda _: control.list(query)
            case "GET", ["runtimes", runtime]:
                return "GetAgentRuntime", lambda _: control.get(runtime, query.get("version"))
            case "PUT", ["runtimes", runtime]:
                return "UpdateAgentRuntime", lambda body: control.update(runtime, body)
            case "DELETE", ["runtimes", runtime]:
                return "DeleteAgentRuntime", lambda _: control.delete(runtime)
            case "POST", ["runtimes", runtime, "versions"]:
                return "ListAgentRuntimeVersions", lambda _: control.versions(runtime, query)
            case _:
                return self._endpoint_route(request, parts)

    def _endpoint_route(self, request: Request, parts: list[str]) -> tuple[str, Callable[[bytes], Reply]]:
        control, query = self._control, request.query
        match request.method, parts:
            case "PUT", ["runtimes", runtime, "runtime-endpoints"]:
                return "CreateAgentRuntimeEndpoint", lambda body: control.create_endpoint(runtime, body)
            case "POST", ["runtimes", runtime, "runtime-endpoints"]:
                return "ListAgentRuntimeEndpoints", lambda _: control.list_endpoints(runtime, query)
            case "GET", ["runtimes", runtime, "runtime-endpoints", name]:
                return "GetAgentRuntimeEndpoint", lambda _: control.get_endpoint(runtime, name)
            case "PUT", ["runtimes", runtime, "runtime-endpoints", name]:
                return "UpdateAgentRuntimeEndpoint", lambda body: control.update_endpoint(runtime, name, body)
            case "DELETE", ["runtimes", runtime, "runtime-endpoints", name]:
                return "DeleteAgentRuntimeEndpoint", lambda _: control.delete_endpoint(runtime, name)
            case _:
                return self._tag_route(request, parts)

    def _tag_route(self, request: Request, parts: list[str]) -> tuple[str, Callable[[bytes], Reply]]:
        control = self._control
        match request.method, parts:
            case "GET", ["tags", arn]:
                return "ListTagsForResource", lambda _: control.tags(arn)
            case "POST", ["tags", arn]:
                return "TagResource", lambda body: control.tag(arn, body)
            case "DELETE", ["tags", arn]:
                names = [value for name, value in request.pairs if name == "tagKeys"]
                return "UntagResource", lambda _: control.untag(arn, names)
            case _:
                message = f"this local server does not model {request.method} {request.path}"
                raise Problem("ResourceNotFoundException", message)


async def _told(request: Request, make: Callable[[bytes], Reply]) -> None:
    status, body = make(await request.body())
    await request.answer(status, body)
