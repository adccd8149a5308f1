"""Serve a gateway over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import uvicorn

from afield.gateway.app import App
from afield.gateway.connections import ConnectionLimits, Connections, LimitedHttp
from afield.gateway.front import receive_connections
from afield.gateway.service import LocalGateway
from afield.gateway.shards import PASSED


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are for whoever runs the event loop; a gateway that is cancelled stops in good order."""
        yield

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that somebody else accepted."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._connect(connection))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            made = self.config.http_protocol_class
            return made(config=self.config, server_state=self.server_state, app_state={PASSED: True})  # pyright: ignore[reportCallIssue]

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)


async def serve(
    gateway: LocalGateway,
    listener: socket.socket,
    ready: Callable[[], None],
    *,
    link: int | None = None,
    connections: ConnectionLimits | None = None,
) -> None:
    """Until cancelled. With `link`, connections also come from the front, through that descriptor."""
    limited = Connections(connections or ConnectionLimits())
    config = uvicorn.Config(
        App(gateway),
        http=partial(LimitedHttp, limited),  # pyright: ignore[reportArgumentType]
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",  # who asks for a web socket gets the answer to a GET: there is none
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    taking = asyncio.create_task(receive_connections(link, server.take)) if link is not None else None
    sweeping = asyncio.create_task(limited.sweep())
    ready()
    try:
        await asyncio.shield(running)
    finally:
        sweeping.cancel()
        if taking:
            taking.cancel()
        server.should_exit = True
        await running
        listener.close()
