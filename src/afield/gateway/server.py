"""Serve a gateway over HTTP until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

import uvicorn

from afield.errors import UsageError
from afield.gateway.app import App
from afield.gateway.service import LocalGateway


def bind(host: str, port: int) -> socket.socket:
    """Take the port first, so that one in use is known before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use: choose another with --port, or 0 for any"
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener


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
    server = uvicorn.Server(config)
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
