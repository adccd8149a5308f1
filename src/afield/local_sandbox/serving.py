"""Serves an agent's `/invocations` app in a sandbox, on a listening socket.

With `once`, the program exits when its first rollout has ended and every request is answered.
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

from afield.sdk.app import Entrypoints, Receive, Scope, Send
from afield.sdk.serve import load
from afield.utils.asgi_server import AsgiServer, server_config


class Prepared:
    """App and uvicorn configuration, loaded before the fork.

    State that is unique to a session is created after the fork.
    """

    def __init__(self, app: Entrypoints) -> None:
        self.app = app
        self.front = _Front(app)
        self.config = server_config(self.front, timeout_keep_alive=30)
        self.config.load()


def prepared(target: str) -> Prepared:
    """Load a target; raises UsageError if it cannot be served."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("afield").setLevel(logging.INFO)
    return Prepared(load(target))


def serve(agent: Prepared, listener: socket.socket, *, once: bool) -> NoReturn:
    if agent.app.runner is not None:
        agent.app.runner.instance = secrets.token_hex(8)
        if once:
            agent.app.runner.on_end(agent.front.over)
    _SandboxServer(agent.config).run(sockets=[listener])
    leave(0)


def leave(code: int) -> NoReturn:
    """Exit at once, without waiting for threads that the agent left running."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _SandboxServer(AsgiServer):
    """Server that exits at once on a signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        leave(128 + sig)


class _Front:
    """App wrapper that exits once the rollout has ended and no request is open."""

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
        """Record the end of the rollout; called from the rollout's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        self._over = True
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        if self._over and not self._asked:
            leave(0)
