"""HTTP/1.1 connections to one server, on httptools.

aiohttp's client costs twice the CPU per call, and calls its parser again for each chunk of a stream.

1. A connection has one request at a time. It returns to the pool after a complete response.
2. Reading pauses while more than `BUFFER` bytes wait for the caller.
3. Redirects, cookies, proxies and compressed responses are not supported: inference servers use none.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Mapping
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

BUFFER = 1024 * 1024
KEEP_S = 4.0  # uvicorn drops idle connections after 5
LENGTHS = (b"content-length", b"transfer-encoding")
LAST_CHUNK = b"0\r\n\r\n"  # an event never ends like it


class HttpConnection(asyncio.Protocol):
    """Connection to a server: `send` a request, then `read` its response."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._gathering: asyncio.TimerHandle | None = None
        self._unparsed: list[bytes] = []  # received while gathering
        self._error: Exception | None = None
        self.idle_since: float | None = None
        """Time of the last response; None before the first one."""
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._full = False  # reading pauses until the caller has read
        self._until_close = True  # the response has no length
        self._complete = self._keeps = False

    # --- requests ---

    async def send(self, request: bytes) -> None:
        """Send a request and wait for the status of its response; raises OSError."""
        if self._error is not None:
            raise self._error
        self._begin()
        self._transport.write(request)
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Wait for bytes of the response's body and return all; empty at its end. Raises OSError."""
        while self._gathering is not None or not self._parts:
            if self._complete and not self._parts:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._full:
            self._full = False
            self._transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        """Wait for the whole body of the response; raises OSError."""
        parts: list[bytes] = []
        while data := await self.read():
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def gather(self, seconds: float) -> None:
        """Let the next `read` wait for more bytes, until the response ends or `seconds` have passed."""
        if not (self._complete or self._full or self._error):
            self._gathering = self._loop.call_later(seconds, self._gathered)

    def _gathered(self) -> None:
        self._gathering = None
        if self._unparsed:
            self._parse(b"".join(self._unparsed))

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathered()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- end ---

    @property
    def reusable(self) -> bool:
        """Whether the connection can take another request."""
        return self._complete and self._keeps and self._error is None and not self._transport.is_closing()

    def fail(self, error: Exception) -> None:
        """Close the connection; the caller that waits for the response gets the error."""
        self._error = self._error or error
        self.close()
        self._wake()

    def close(self) -> None:
        self._end_gathering()
        self._transport.abort()

    # --- callbacks of the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_gathering()
        if self.status and self._until_close and exc is None:
            self._complete = True
        self.fail(exc or ConnectionResetError("the response is incomplete"))

    def data_received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > BUFFER and not self._full:
            self._full = True
            self._transport.pause_reading()
        if self._gathering is None:
            self._parse(data)
            return
        self._unparsed.append(data)
        if self._full or data.endswith(LAST_CHUNK):
            self._end_gathering()

    def _parse(self, data: bytes) -> None:
        self._unparsed.clear()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(ConnectionAbortedError(f"the response is not HTTP: {error}"))
        self._wake()

    # --- callbacks of the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in LENGTHS:
            self._until_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._complete:  # a response without a request
            self._keeps = False
        elif status >= 200:  # others announce the response
            self.status = status

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self.status and not self._complete:
            self._complete, self._keeps = True, self._parser.should_keep_alive()


class ConnectionPool:
    """Connections to one server; `headers` are those of every request."""

    def __init__(self, url: str, headers: Mapping[str, str], connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        fixed = {"host": parts.netloc.rpartition("@")[2], "accept-encoding": "identity", **headers}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            fixed.setdefault("authorization", f"Basic {b64encode(user.encode()).decode()}")
        self._fixed = _lines(fixed)
        self._context: ssl.SSLContext | None = None
        self._busy: set[HttpConnection] = set()
        self._idle: deque[HttpConnection] = deque()
        self._cleanup: asyncio.TimerHandle | None = None

    def request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        """Bytes of a request; raises ValueError for a header that is not text of one line."""
        length = "" if body is None and method == "GET" else f"content-length: {len(body or b'')}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}{_lines(headers)}{length}\r\n"
        return head.encode() + (body or b"")

    def take_idle(self) -> HttpConnection | None:
        """The connection that was used last; None if none is idle."""
        self._close_expired()  # the cleanup is late if something has blocked the event loop
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                self._busy.add(connection)
                return connection
            connection.close()
        return None

    async def connect(self) -> HttpConnection:
        """A new connection; raises OSError, and TimeoutError after `connect_timeout_s`."""
        loop = asyncio.get_running_loop()
        if self._tls and self._context is None:
            self._context = await asyncio.to_thread(ssl.create_default_context)
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(
                HttpConnection, self._host, self._port, ssl=self._context
            )
        self._busy.add(connection)
        return connection

    def put(self, connection: HttpConnection) -> None:
        """Keep a connection for the next request if its response is complete, else close it."""
        self._busy.discard(connection)
        if not connection.reusable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._cleanup is None:
            self._cleanup = loop.call_later(KEEP_S / 4, self._close_idle)

    def _close_expired(self) -> None:
        expired = asyncio.get_running_loop().time() - KEEP_S
        while self._idle and (self._idle[0].idle_since or 0.0) <= expired:
            self._idle.popleft().close()

    def _close_idle(self) -> None:
        self._close_expired()
        loop = asyncio.get_running_loop()
        self._cleanup = loop.call_later(KEEP_S / 4, self._close_idle) if self._idle else None

    def close(self) -> None:
        """Close all connections; requests in flight fail."""
        for connection in tuple(self._busy):
            connection.fail(ConnectionAbortedError("the engine was closed"))
        if self._cleanup is not None:
            self._cleanup.cancel()
            self._cleanup = None
        while self._idle:
            self._idle.pop().close()


def _lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if not value.isprintable():
            raise ValueError(f"the header {name} is not one line of text; remove its control characters")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
