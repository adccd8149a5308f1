"""HTTP server: uvicorn with connection limits and connections passed from the front.

A periodic sweep counts how often it finds a connection waiting for its client, and closes it above the
limit. Connections keep counters only, so that a request costs a few assignments. A process that was
suspended counts one sweep.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from afield.gateway.api_error import ApiError
from afield.gateway.app import GatewayApp
from afield.gateway.front import receive_connections
from afield.gateway.service import LocalGateway
from afield.gateway.shards import PASSED
from afield.utils.asgi_server import AsgiServer, server_config, serving

log = logging.getLogger(__name__)


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Limits for client connections."""

    per_address: int = 16_384
    """Connections per address (default: 16,384)."""
    head_s: float = 30.0
    """Seconds for the head of a request, from the connection or the first byte (default: 30)."""
    body_s: float = 30.0
    """Seconds for the body of a request, plus the time that its size allows (default: 30)."""
    body_rate: float = 4096.0
    """Minimum rate of long bodies in bytes per second (default: 4,096)."""
    poll_interval_s: float = 2.0
    """Seconds between sweeps (default: 2)."""
    shutdown_s: int = 5
    """Seconds for open responses when the server stops (default: 5)."""


class Connections:
    """External connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.by_address: Counter[str] = Counter()
        self.open: set[LimitedHttp] = set()

    async def sweep(self) -> None:
        """Closes connections that time out, until cancelled."""
        while True:
            await asyncio.sleep(self.limits.poll_interval_s)
            for connection in [one for one in self.open if one.waits]:
                connection.sweeps += 1
                if connection.sweeps * self.limits.poll_interval_s > connection.allowed_s():
                    connection.time_out()


class LimitedHttp(HttpToolsProtocol):
    """An HTTP connection with timeouts; `waits` while the client has to send the next byte."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._all = connections
        self._address: str | None = None
        self.waits = True
        self.sweeps = 0
        self._begun = False
        self._in_body = False
        self._received = 0

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: the response tells the client that there are no web sockets."""

    def allowed_s(self) -> float:
        limits = self._all.limits
        return limits.body_s + self._received / limits.body_rate if self._in_body else limits.head_s

    def time_out(self) -> None:
        if self.transport.is_closing():
            return
        answering = (
            self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        )
        if self._begun and not answering:
            part = "body" if self._in_body else "head"
            message = f"the {part} of the request did not come within {self.allowed_s():g} s"
            log.info("connection %s: closed reason=%s", self._address, message)
            self._write_error(ApiError(408, "request_timeout", message, "send it faster"))
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if self.client is None:  # another process of this gateway
            self.waits = False
            return
        self._all.open.add(self)
        self._address = self.client[0]
        self._all.by_address[self._address] += 1
        limit = self._all.limits.per_address
        if self._all.by_address[self._address] > limit:
            message = f"{self._address} has {limit} connections, the most allowed"
            log.warning("connection: refused reason=%s", message)
            self._write_error(ApiError(503, "too_many_connections", message, "close some, or try again"))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.open.discard(self)
        if self._address is not None:
            self._all.by_address[self._address] -= 1
            if not self._all.by_address[self._address]:
                del self._all.by_address[self._address]
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begun = True
        self.sweeps = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._received = self.sweeps = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._begun = self._in_body = False
        self.sweeps = 0
        self.waits = self._address is not None and self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.sweeps = 0
        answers_next = bool(self.pipeline) and not self._in_body
        self.waits = self._address is not None and not answers_next
        super().on_response_complete()

    def _write_error(self, error: ApiError) -> None:
        body = msgspec.json.encode(
            {"error": {"type": error.code, "message": error.message, "hint": error.hint}}
        )
        reason = HTTPStatus(error.status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(body)
        self.transport.write(head % (error.status, reason) + length + body)


class _GatewayServer(AsgiServer):
    """Server that also serves connections passed from the front."""

    def take(self, connection: socket.socket) -> None:
        """Serves a connection that the front accepted."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._connect(connection))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            protocol_class = self.config.http_protocol_class
            state = {PASSED: True}
            return protocol_class(config=self.config, server_state=self.server_state, app_state=state)  # pyright: ignore[reportCallIssue]

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)


async def serve(
    gateway: LocalGateway,
    listener: socket.socket,
    ready: Callable[[], None],
    *,
    link: int | None = None,
    connections: ConnectionLimits | None = None,
    app: GatewayApp | None = None,
) -> None:
    """Serves until cancelled. `link` is the descriptor from which the front's connections come."""
    limited = Connections(connections or ConnectionLimits())
    config = server_config(
        app or GatewayApp(gateway),
        http=partial(LimitedHttp, limited),
        log_config=None,
        proxy_headers=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=limited.limits.shutdown_s,
        timeout_keep_alive=30,
    )
    server = _GatewayServer(config)
    async with serving(server, listener) as running:
        tasks = [asyncio.create_task(limited.sweep())]
        if link is not None:
            tasks.append(asyncio.create_task(receive_connections(link, server.take)))
        ready()
        try:
            await asyncio.shield(running)
        finally:
            for task in tasks:
                task.cancel()
