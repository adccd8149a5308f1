"""ASGI server: uvicorn in a running event loop, without polling.

1. Idle servers do not wake up; uvicorn's ten wake-ups per second cost a full CPU for hundreds of servers.
2. A stopped server ends with its last response; uvicorn sleeps at least 0.1 s more.
3. `serving` leaves signals to the owner of the event loop. `AsgiServer.run` handles them like uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import uvicorn

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.01


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Configuration of uvicorn without access log, web sockets and `date` header, changed by `options`."""
    defaults = {"log_level": "warning", "access_log": False, "ws": "none", "date_header": False}
    return uvicorn.Config(app, **{**defaults, **options})


class AsgiServer(uvicorn.Server):
    """uvicorn server that waits for `stop` instead of polling.

    Args:
        config: configuration; `callback_notify`, `limit_max_requests` and `date_header` have no effect.
        on_start: called once the server listens.
    """

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.captures_signals = True
        self._on_start = on_start
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Stop accepting connections and end after the open responses; call it in the event loop."""
        self.should_exit = True
        self._stopping.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server when the process gets a signal; a second signal drops open responses."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle signals like uvicorn, except in `serving`."""
        with super().capture_signals() if self.captures_signals else nullcontext():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self.server_state.default_headers = self.config.encoded_headers
        self.listening.set()
        self._on_start()

    async def main_loop(self) -> None:
        """Wait for `stop` or a signal."""
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the sockets and idle connections, and wait for open responses."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self._drain()
        except TimeoutError:
            tasks = self.server_state.tasks
            log.warning("server: shutdown timed out responses=%d event=cancelled", len(tasks))
            for task in tasks:
                task.cancel(msg="the server stops")
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _drain(self) -> None:
        state = self.server_state
        while (state.connections or state.tasks) and not self.force_exit:
            await asyncio.sleep(DRAIN_POLL_S)
        for server in self.servers:
            await server.wait_closed()


@asynccontextmanager
async def serving(server: AsgiServer, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve on a listening socket inside the block; yields the server's task once it listens."""
    server.captures_signals = False
    running = asyncio.create_task(server.serve(sockets=[listener]))
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        yield running
    finally:
        listening.cancel()
        server.stop()
        await running
        listener.close()
