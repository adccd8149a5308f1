"""A small HTTP server of the test process: agents bring outcomes there, and tell what they do.

It needs nothing of a place but that it can reach an address: no shared files, no visible process ids.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
from aiohttp import web
from msgspec import Struct

from afield import wire
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt
from afield.wire import Invocation, OutcomeRecord
from agents.invoking import EXP, invocation

BOUND_S = 120.0
# An agent reports ten times a second. It has ended once its connection is closed and no report follows within
# SETTLE_S seconds; or, for connections that do not close with the process, after QUIET_S seconds.
SETTLE_S = 0.3
QUIET_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Mark(Struct, frozen=True):
    """What an agent told: its session, what happened, and its process id as it sees it."""

    session_id: str
    what: str
    pid: int
    at: float
    connection: asyncio.BaseTransport | None

    @property
    def over(self) -> bool:
        """Whether the process that reported has closed its connection."""
        return self.connection is None or self.connection.is_closing()


class Sink:
    def __init__(self, transport: FilesTransport) -> None:
        self.url = ""
        self.port = 0
        self._host = ""
        self._number = 0
        self.reset(transport)

    def reset(self, transport: FilesTransport) -> None:
        """Begin the next test at another URL of the same port: agents of earlier tests get a 404."""
        self.transport = transport
        self.marks: list[Mark] = []
        self._enough: set[str] = set()
        self._number += 1
        self.url = f"http://{self._host}:{self.port}/{self._number}"

    def invocation(self, attempt: Attempt) -> Invocation:
        """As a gateway at this address would have it: model and outcome under one base."""
        base = f"{self.url}/s/{attempt.session_id}"
        return invocation(attempt.rollout_id, attempt.n, base_url=base, outcome_url=f"{base}/outcome")

    def told(self, what: str, session_id: str = "") -> list[Mark]:
        return [m for m in self.marks if m.what == what and session_id in ("", m.session_id)]

    async def until_told(self, what: str, session_id: str = "", times: int = 1) -> None:
        """The next ones, not those that were told before: whoever tells them is alive now."""
        await self.until_seen(what, session_id, len(self.told(what, session_id)) + times)

    async def until_seen(self, what: str, session_id: str = "", wanted: int = 1) -> None:
        """So many in all."""
        with anyio.fail_after(BOUND_S):
            while len(self.told(what, session_id)) < wanted:
                await anyio.sleep(0.02)

    async def until_quiet(self, what: str, session_id: str = "") -> None:
        """Until nothing more of this kind is told: whoever told it no longer runs."""
        with anyio.fail_after(BOUND_S):
            while (marks := self.told(what, session_id)) and not self._is_quiet(marks):
                await anyio.sleep(0.02)

    def _is_quiet(self, marks: list[Mark]) -> bool:
        silent_s = anyio.current_time() - marks[-1].at
        return silent_s > QUIET_S or (silent_s > SETTLE_S and all(mark.over for mark in marks))

    def enough(self, session_id: str) -> None:
        """An agent of it that beats ends, as well as one that has done its work."""
        self._enough.add(session_id)

    @contextlib.asynccontextmanager
    async def running(self, bind: str = "127.0.0.1", name: str = "127.0.0.1") -> AsyncIterator[Sink]:
        """`name` is what agents call the address it listens on."""
        app = web.Application(client_max_size=2**24)
        app.add_routes(
            [
                web.post("/{number}/tell", self._current(self._tell)),
                web.post("/{number}/s/{id}/outcome", self._current(self._outcome)),
                web.post("/{number}/s/{id}/alive", self._current(self._alive)),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, bind, 0).start()
            self._host, self.port = name, runner.addresses[0][1]
            self.reset(self.transport)
            yield self
        finally:
            await runner.cleanup()

    def _current(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.match_info["number"] != str(self._number):
                raise web.HTTPNotFound
            return await handler(request)

        return handle

    async def _tell(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        now = anyio.current_time()
        self.marks.append(Mark(body["session_id"], body["what"], body["pid"], now, request.transport))
        return web.json_response({}, status=410 if body["session_id"] in self._enough else 200)

    async def _outcome(self, request: web.Request) -> web.Response:
        record = wire.decode(await request.read(), OutcomeRecord, "an outcome")
        if record.session_id != request.match_info["id"]:
            return web.json_response({"error": f"this is not {record.session_id}"}, status=403)
        attempt = Attempt(record.outcome.rollout_id, record.outcome.attempt)
        stored = invocation(attempt.rollout_id, attempt.n, **self.transport.address(EXP))
        stands = await self.transport.deliver(stored, record)
        return web.json_response({}, status=200 if stands else 409)

    async def _alive(self, request: web.Request) -> web.Response:
        return web.json_response({"phase": "open"})
