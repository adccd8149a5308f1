"""ASGI application of `afield ui`: pages, JSON and binary data, GET only.

1. Requests need the key of the printed address, as a cookie or bearer token: other users of the
   machine, and agents on it, can reach a loopback port.
2. The Host header must be an IP address, localhost or the configured name, against DNS rebinding.
3. A strict content security policy with Trusted Types refuses inline scripts, other origins and HTML from
   strings: texts of agents are hostile.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import mimetypes
import re
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct

from afield.errors import AfieldError, NotFound, UsageError
from afield.ui import views
from afield.ui.data import RunData
from afield.ui.live_gateway import LiveGateway
from afield.ui.views import Query

STATIC = Path(__file__).parent / "static"
LIVE_INTERVAL_S = 1.0
"""Seconds between two checks for changes of runs."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Answer(Struct, frozen=True):
    """HTTP response."""

    body: bytes
    """Bytes of the body."""
    content_type: str
    """Value of the content-type header."""
    status: int = 200
    """HTTP status; 200 by default."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Further headers, as names and values; none by default."""


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(msgspec.json.encode(value), "application/json", status)


def error_answer(status: int, message: str) -> Answer:
    return json_answer({"error": message}, status)


class Runs:
    """Runs by key: the name of the directory, with a number if several have the same."""

    def __init__(self, runs: Callable[[], Sequence[RunData]]) -> None:
        """`runs` lists the runs anew for each request, so that new runs appear."""
        self._list = runs

    def all(self) -> Sequence[RunData]:
        return self._list()

    def get(self, key: str) -> RunData:
        runs = self._list()
        for run in runs:
            if run.key == key:
                return run
        raise NotFound(f"unknown run {key!r}; there are: {', '.join(run.key for run in runs) or 'none'}")


def data(runs: Runs, path: str, query: Query) -> Answer:
    """Data below /api; raises NotFound for an unknown path."""
    if path == "/api/runs":
        return json_answer({"runs": [views.summary_or_error(run) for run in runs.all()]})
    if path == "/api/diff":
        sides = [(runs.get(query.get(f"run_{s}", "")), query.get(s, "")) for s in ("a", "b")]
        return json_answer(views.diff_page(sides[0], sides[1]))
    for pattern, handler in ROUTES:
        if match := pattern.fullmatch(path):
            key, *names = map(unquote, match.groups())
            value = handler(runs.get(key), names, query)
            return (
                Answer(value, "application/octet-stream") if isinstance(value, bytes) else json_answer(value)
            )
    raise NotFound(f"{path} is not served; see docs/how-to/ui.md")


Handler = Callable[[RunData, list[str], Query], Any]
ROUTES: list[tuple[re.Pattern[str], Handler]] = [
    (re.compile("/api/runs/([^/]+)" + pattern), handler)
    for pattern, handler in (
        ("", lambda run, _, query: views.run_page(run, query)),
        ("/metrics", lambda run, _, query: views.run_page(run, query)),
        ("/rollouts", lambda run, _, query: views.rollouts(run, query)),
        (r"/rollouts\.bin", lambda run, _, query: views.rollouts_columns(run, query)),
        ("/rollouts/([^/]+)", lambda run, names, _: views.rollout_page(run, names[0])),
        ("/values/([^/]+)", lambda run, names, _: views.whole_values(run, names[0])),
        ("/messages/([^/]+)/([^/]+)", lambda run, names, _: views.messages(run, names[0], names[1])),
        ("/tokens/([^/]+)", lambda run, names, query: views.tokens(run, names[0], query)),
        ("/text/([^/]+)", lambda run, names, query: views.token_text(run, names[0], query)),
        ("/groups/([^/]+)", lambda run, names, _: views.group_page(run, names[0])),
        ("/timeline", lambda run, _, query: views.timeline_page(run, query)),
        ("/events", lambda run, _, query: views.events_columns(run, query)),
        ("/excluded", lambda run, _, __: views.excluded_page(run)),
    )
]


class UiApp:
    """The application. `hosts` are names besides localhost and IP addresses under which it may be reached."""

    def __init__(
        self,
        runs: Runs,
        *,
        key: str,
        cookie: str,
        hosts: Sequence[str] = (),
        gateway: LiveGateway | None = None,
    ) -> None:
        self._runs = runs
        self._key = key
        self._cookie = cookie
        self._hosts = {"localhost", *hosts}
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        refusal = self._refuse(scope, headers, query)
        if refusal is not None:
            await send_answer(send, refusal)
        elif scope["path"] == "/api/live":
            await self._live(receive, send)
        else:
            await send_answer(send, await self._answer(scope["path"], query))

    def _refuse(self, scope: Scope, headers: Mapping[str, str], query: Query) -> Answer | None:
        host = headers.get("host", "")
        if not self._allowed(host):
            return error_answer(403, f"host {host!r} is not served; use the printed address")
        if scope["method"] not in ("GET", "HEAD"):
            return error_answer(405, "only GET is served: the UI changes nothing")
        if scope["path"] == "/" and self._matches(query.get("key", "")):
            cookie = f"{self._cookie}={self._key}; Path=/; HttpOnly; SameSite=Lax"
            return Answer(b"", "text/plain", 303, ((b"location", b"/"), (b"set-cookie", cookie.encode())))
        scheme, _, token = headers.get("authorization", "").partition(" ")
        tokens = (token if scheme.lower() == "bearer" else "", self._cookie_of(headers))
        if not any(map(self._matches, tokens)):
            return error_answer(401, "the key is missing: open the address that `afield ui` printed")
        return None

    def _allowed(self, host: str) -> bool:
        name = re.sub(r":\d+$", "", host).strip("[]")
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _cookie_of(self, headers: Mapping[str, str]) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel else ""

    def _matches(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._key.encode())

    async def _answer(self, path: str, query: Query) -> Answer:
        try:
            if path == "/api/gateway":
                if self._gateway is None:
                    raise NotFound("no gateway is shown; start `afield ui` with --gateway URL")
                return json_answer(await self._gateway.read())
            if path.startswith("/api/"):
                return await asyncio.to_thread(data, self._runs, path, query)
            return static_file(path)
        except NotFound as error:
            return error_answer(404, str(error))
        except UsageError as error:
            return error_answer(400, str(error))
        except (AfieldError, OSError, sqlite3.Error) as error:  # such as a run that is removed meanwhile
            return error_answer(500, f"{path} cannot be read: {error}")

    async def _live(self, receive: Receive, send: Send) -> None:
        """Server-sent events: the keys of runs that changed."""
        headers = [(b"content-type", b"text/event-stream"), *HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_disconnected(receive))
        before: dict[str, Any] = {}
        try:
            while not gone.done():
                now = await asyncio.to_thread(self._signatures)
                changed = [key for key, signature in now.items() if before and before.get(key) != signature]
                body = f"data: {json.dumps({'runs': changed})}\n\n" if changed else ": \n\n"
                await send({"type": "http.response.body", "body": body.encode(), "more_body": True})
                before = now
                await asyncio.wait([gone], timeout=LIVE_INTERVAL_S)
        finally:
            gone.cancel()

    def _signatures(self) -> dict[str, Any]:
        try:
            return {run.key: run.signature() for run in self._runs.all()}
        except OSError:  # a run was removed meanwhile
            return {}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [
        (b"content-type", answer.content_type.encode()),
        (b"content-length", str(len(answer.body)).encode()),
        *HEADERS,
        *answer.headers,
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def static_file(path: str) -> Answer:
    """A file of `static/`; / is the page."""
    name = path.strip("/") or "index.html"
    file = STATIC / name
    try:
        file = file.resolve()
        served = file.is_relative_to(STATIC.resolve()) and file.is_file()
    except (OSError, ValueError):  # a name that no file can have
        served = False
    if not served:
        raise NotFound(f"{path[:200]} is not served")
    kind = mimetypes.guess_type(file.name)[0] or "text/plain"
    kind = "text/javascript" if file.suffix == ".js" else kind
    return Answer(file.read_bytes(), f"{kind}; charset=utf-8")
