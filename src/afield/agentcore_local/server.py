"""Local AgentCore server: both planes, logs and statistics on one port.

    options = AgentCoreServerOptions(images={"math": AgentImage(script="app.py")})
    async with AgentCoreServer(options) as server:
        boto3.client("bedrock-agentcore", endpoint_url=server.url, ...)

`FilterLogEvents` finds log streams by the prefix `YYYY/MM/DD/[runtime-logs-SESSION]` and ignores the date;
patterns and times are not modelled. `/_acr/sessions` and `/_acr/stats` show sessions and counters.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote, unquote

from msgspec import Struct, field

from afield.agentcore_local.control_plane import Account, ControlPlane, Reply
from afield.agentcore_local.data_plane import DataPlane
from afield.agentcore_local.errors import ConnectionCut, ServiceError, invalid
from afield.agentcore_local.faults import FaultInjector, InjectedFault
from afield.agentcore_local.hosts import ProcessHosts, ProgramHosts
from afield.agentcore_local.http import ApiRequest, Receive, Scope, Send
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.quotas import CallCounts, Quotas
from afield.agentcore_local.requests import read
from afield.agentcore_local.sessions import LocalSessions, Timings
from afield.sdk.listen import listen
from afield.settings.runtimes import ResourceLimits
from afield.utils.asgi_server import AsgiServer, server_config, serving

ALGORITHM = "AWS4-HMAC-SHA256"
LATE_S = 900.0
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=(?P<key>[^/,\s]+)/(?P<scope>(?P<date>\d{{8}})/(?P<region>[^/,\s]+)/"
    r"(?P<service>[^/,\s]+)/aws4_request),\s*SignedHeaders=(?P<headers>[^,\s]+),\s*Signature=(?P<signature>\w+)"
)


def signature_problem(
    secret: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
) -> str | None:
    """Why a request's AWS Signature Version 4 is invalid; None if it is valid.

    `path` and `query` are as sent, without decoding.
    """
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if match is None:
        return "Missing Authentication Token: the request is not signed"
    stamp = headers.get("x-amz-date", "")
    if not _recent(stamp) or not stamp.startswith(match["date"]):
        return f"Signature expired: x-amz-date is {stamp!r}; the clocks of client and server differ too much"
    digest = hashlib.sha256(body).hexdigest()
    if headers.get("x-amz-content-sha256", digest) != digest:
        return "The provided x-amz-content-sha256 header does not match the body"
    names = match["headers"].split(";")
    if "host" not in names or "x-amz-date" not in names:
        return "The signature must cover the headers host and x-amz-date"
    signed = "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names)
    pairs = sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&") if pair)
    canonical = [method, quote(path, safe="/~"), "&".join(pairs), signed, match["headers"], digest]
    hashed = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for part in (match["date"], match["region"], match["service"], "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = "\n".join([ALGORITHM, stamp, match["scope"], hashed])
    wanted = hmac.digest(key, text.encode(), "sha256").hex()
    if not hmac.compare_digest(wanted, match["signature"]):
        return "The request signature does not match: sign with the secret access key of this server"
    return None


def _recent(stamp: str) -> bool:
    try:
        signed = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return False
    return abs(time.time() - signed.timestamp()) <= LATE_S


LOG_TARGET = "Logs_20140328.FilterLogEvents"
STREAM = re.compile(r"^\d{4}/\d\d/\d\d/\[runtime-logs-([A-Za-z0-9][A-Za-z0-9._-]{0,127})\]$")
LAST_BYTES = 1024 * 1024


def is_log_request(request: ApiRequest) -> bool:
    return request.method == "POST" and request.headers.get("x-amz-target", "") == LOG_TARGET


async def answer_logs(request: ApiRequest, folder: Path) -> None:
    options: dict[str, Any] = read(await request.body(), dict[str, Any])
    match = STREAM.match(str(options.get("logStreamNamePrefix", "")))
    if match is None or options.get("filterPattern"):
        raise invalid(
            "logStreamNamePrefix", "this local server finds logs by YYYY/MM/DD/[runtime-logs-SESSION] only"
        )
    events = [event for path in _log_files(folder, match[1]) for event in _log_events(path, match[0])]
    await request.answer(200, {"events": events, "searchedLogStreams": []})


def _log_files(folder: Path, session_id: str) -> list[Path]:
    """Log of each start of the session, oldest first."""
    number = re.compile(rf"^{re.escape(session_id)}-(\d+)\.log$")
    matches = ((number.match(path.name), path) for path in folder.iterdir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def _log_events(path: Path, stream: str) -> list[dict[str, object]]:
    at = int(path.stat().st_mtime * 1000)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [
        {
            "logStreamName": f"{stream}{path.stem}",
            "timestamp": at,
            "ingestionTime": at,
            "message": line,
            "eventId": str(n),
        }
        for n, line in enumerate(lines)
    ]


log = logging.getLogger(__name__)
SIGNED = "AWS4-HMAC-SHA256 "
CARD = "/invocations/.well-known/agent-card.json"


class LocalAgentCoreApp:
    """ASGI app with the routes of both planes."""

    def __init__(
        self,
        control: ControlPlane,
        data: DataPlane,
        sessions: LocalSessions,
        counts: CallCounts,
        faults: FaultInjector,
        *,
        signed: bool,
        secret_key: str,
        folder: Path,
    ) -> None:
        self._secret_key = secret_key
        self._control, self._sessions = control, sessions
        self._counts, self._faults, self._signed, self._folder = counts, faults, signed, folder
        self._handlers = {
            ("POST", "/invocations"): ("InvokeAgentRuntime", data.invoke),
            ("POST", "/commands"): ("InvokeAgentRuntimeCommand", data.command),
            ("POST", "/stopruntimesession"): ("StopRuntimeSession", data.stop),
            ("GET", CARD): ("GetAgentCard", data.card),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = ApiRequest(scope, receive, send)
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
        except ServiceError as problem:
            log.info("%s %s: %d %s: %s", request.method, request.path, problem.status, problem.kind, problem)
            await (request.cut() if request.status else request.refuse(problem))
        except ConnectionCut:
            await request.cut()
        finally:
            if operation:
                self._counts.answered(operation, request.status)

    async def _check_signed(self, request: ApiRequest) -> None:
        if self._secret_key:
            body = await request.body()
            signed_parts = request.method, request.path, request.query_string, request.headers, body
            if problem := signature_problem(self._secret_key, *signed_parts):
                raise ServiceError("AccessDeniedException", problem)
        elif self._signed and not request.headers.get("authorization", "").startswith(SIGNED):
            raise ServiceError(
                "AccessDeniedException", "Missing Authentication Token: the request is not signed"
            )

    def _view(self, path: str) -> object:
        if path == "/_acr/sessions":
            return {"sessions": self._sessions.view()}
        if path == "/_acr/stats":
            return {**self._counts.view(), "sessions": len(self._sessions), "faults": self._faults.injected}
        raise ServiceError(
            "ResourceNotFoundException", f"there is no {path}; only /_acr/sessions and /_acr/stats"
        )

    # --- routes ----------------------------------------------------------------------------------

    def _route(self, request: ApiRequest) -> tuple[str, Callable[[], Any]]:
        for (method, end), (name, handler) in self._handlers.items():
            if request.method == method and request.path.endswith(end):
                arn = unquote(request.path.removeprefix("/runtimes/").removesuffix(end))
                return name, partial(handler, request, arn)
        if is_log_request(request):
            return "FilterLogEvents", partial(answer_logs, request, self._folder)
        name, make = self._control_route(request)
        return name, partial(_answer_control, request, make)

    def _control_route(self, request: ApiRequest) -> tuple[str, Callable[[bytes], Reply]]:
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

    def _endpoint_route(self, request: ApiRequest, parts: list[str]) -> tuple[str, Callable[[bytes], Reply]]:
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

    def _tag_route(self, request: ApiRequest, parts: list[str]) -> tuple[str, Callable[[bytes], Reply]]:
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
                raise ServiceError("ResourceNotFoundException", message)


async def _answer_control(request: ApiRequest, make: Callable[[bytes], Reply]) -> None:
    status, body = make(await request.body())
    await request.answer(status, body)


class AgentCoreServerOptions(Struct, frozen=True, kw_only=True):
    """Settings of the server."""

    images: Mapping[str, AgentImage] = field(default_factory=dict)
    """Programs by image name."""
    isolation: Literal["sandbox", "none"] = "sandbox"
    """Host of the programs: sandboxes, or plain processes for `none`."""
    allow: tuple[tuple[str, int], ...] = ()
    """Addresses that sandboxed programs reach, as host and port; plain processes reach everything."""
    mounts: tuple[str, ...] = ()
    """Further paths that sandboxed programs see, read-only."""
    warm: tuple[str, ...] = ()
    """Names of modules that fork servers import in advance."""
    limits: ResourceLimits = ResourceLimits()
    """Resource limits of each sandbox."""
    quotas: Quotas = Quotas()
    """Quotas and rate limits of the service."""
    pace: Timings = Timings()
    """Durations of starts and responses."""
    account: Account = Account()
    """AWS account and region."""
    faults: Mapping[str, InjectedFault] = field(default_factory=dict)
    """Injected faults by kind; empty injects none."""
    seed: int = 0
    """Seed of the fault draws."""
    signed: bool = False
    """Whether to reject requests without an AWS signature; signatures are not verified."""
    secret_key: str = ""
    """Secret access key that all requests must be signed with; empty does not verify signatures."""
    logs: Path | None = None
    """Directory for session logs; None uses a temporary one."""


class AgentCoreServer:
    """Local AgentCore server; use it with `async with`. `url` is its address."""

    def __init__(
        self,
        options: AgentCoreServerOptions,
        listener: socket.socket | None = None,
        *,
        http: Literal["auto", "h11", "httptools"] = "auto",
    ) -> None:
        """Without `listener`, the server listens on a free port of 127.0.0.1.

        `http` is uvicorn's HTTP parser; `auto` prefers httptools.
        """
        self._http: Literal["auto", "h11", "httptools"] = http
        self._options = options
        self._listener = listener
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        options = self._options
        logs = options.logs
        if logs is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afield-agentcore-")))
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        faults, counts = FaultInjector(dict(options.faults), options.seed), CallCounts(time.monotonic)
        hosts = await stack.enter_async_context(self._hosts(logs))
        sessions = LocalSessions(hosts, options.quotas, options.pace, faults, counts)
        await stack.enter_async_context(sessions)
        control = ControlPlane(options.account, options.images, hosts, sessions, faults)
        stack.push_async_callback(control.close)
        data = DataPlane(control, sessions, options.quotas, options.pace, faults)
        app = LocalAgentCoreApp(
            control,
            data,
            sessions,
            counts,
            faults,
            signed=options.signed,
            secret_key=options.secret_key,
            folder=logs,
        )
        await self._serve(stack, app)

    def _hosts(self, logs: Path) -> ProgramHosts:
        if self._options.isolation == "none":
            return ProcessHosts(logs)
        from afield.agentcore_local.hosts import SandboxHosts

        options = self._options
        return SandboxHosts(
            logs,
            options.limits,
            allow=options.allow,
            mounts=options.mounts,
            warm=options.warm,
            init_s=options.pace.init_s,
        )

    async def _serve(self, stack: AsyncExitStack, app: LocalAgentCoreApp) -> None:
        listener = self._listener or listen("127.0.0.1", 0)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = server_config(
            app,
            http=self._http,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            lifespan="off",
            backlog=2048,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=60,
        )
        await stack.enter_async_context(serving(AsgiServer(config), listener))

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
