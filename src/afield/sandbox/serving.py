"""An agent on the `/invocations` contract in a cell: loaded beforehand, served on a socket that listens.

With `once` the cell's program ends when its first rollout has ended and every request was answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from afield.sdk.app import Entrypoints, Receive, Scope, Send
from afield.sdk.serve import load


class Prepared:
    """All that can be done before the fork; whatever is unique to a session is done after it."""

    def __init__(self, app: Entrypoints) -> None:
        self.app = app
        self.front = _Front(app)
        self.config = uvicorn.Config(
            self.front,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            ws="none",
            date_header=False,
        )
        self.config.load()


def prepared(target: str) -> Prepared:
    """Raises UsageError when there is nothing to serve."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("afield").setLevel(logging.INFO)
    return Prepared(load(target))


def serve(agent: Prepared, listener: socket.socket, *, once: bool) -> NoReturn:
    if agent.app.runner is not None:
        agent.app.runner.instance = secrets.token_hex(8)
        if once:
            agent.app.runner.on_end(agent.front.over)
    _Server(agent.config).run(sockets=[listener])
    leave(0)


def leave(code: int) -> NoReturn:
    """At once: what an agent left running must not keep its cell."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Server(uvicorn.Server):
    """Does nothing while nobody asks: ten ticks a second, times hundreds of cells, are a processor's work."""

    async def main_loop(self) -> None:
        await asyncio.Event().wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        leave(128 + sig)


class _Front:
    """The app, and when it is done."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._asked = 0
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._loop = asyncio.get_running_loop()
        self._asked += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._asked -= 1
            self._leave_if_over()

    def over(self, session_id: str) -> None:
        """From the thread of the rollout."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        self._over = True
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        if self._over and not self._asked:
            leave(0)
