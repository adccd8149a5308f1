"""Serve a gateway over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from afield.gateway.app import App
from afield.gateway.service import LocalGateway


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are for whoever runs the event loop; a gateway that is cancelled stops in good order."""
        yield


async def serve(gateway: LocalGateway, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Until cancelled or signalled; calls in flight get a moment to end."""
    config = uvicorn.Config(
        App(gateway),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    ready()
    try:
        await asyncio.shield(running)
    finally:
        server.should_exit = True
        await running
        listener.close()
