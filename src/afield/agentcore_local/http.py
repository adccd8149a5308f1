"""HTTP of the local server: ASGI requests, program client, AWS event streams."""

from __future__ import annotations

import asyncio
import struct
import uuid
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from afield.agentcore_local.errors import ConnectionCut, ServiceError, invalid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[str, str]]
MAX_BODY = 100_000_000
MAX_READ = 1_000_000_000


class ApiRequest:
    """Request to the server, with its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"))
        self.query = dict(self.pairs)
        self.query_string: str = scope.get("query_string", b"").decode("latin-1")
        self.id = str(uuid.uuid4())
        self.status = 0
        self._receive, self._send = receive, send
        self._body: bytes | None = None

    async def body(self) -> bytes:
        if self._body is None:
            self._body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        declared = self.headers.get("content-length", "")
        size = int(declared) if declared.isdigit() else 0
        parts: list[bytes] = []
        received, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionCut
            part, more = message.get("body", b""), message.get("more_body", False)
            received += len(part)
            if max(size, received) <= MAX_BODY:
                parts.append(part)
                continue
            parts.clear()
            # Read the rest: answering early would show the client a broken connection instead of the answer.
            if received > MAX_READ:
                break
        if max(size, received) > MAX_BODY:
            problem = f"has {max(size, received)} bytes, {MAX_BODY} are allowed"
            raise invalid("payload", f"{problem}; put large inputs into a store and send their address")
        return b"".join(parts)

    async def answer(self, status: int, value: object, headers: Headers = ()) -> None:
        body = b"" if status == 204 else msgspec.json.encode(value)
        typed = [("content-type", "application/json"), *headers]
        await self.begin(status, [*typed, ("content-length", str(len(body)))])
        await self.end(body)

    async def refuse(self, problem: ServiceError) -> None:
        await self.answer(problem.status, problem.body(), [("x-amzn-errortype", problem.kind)])

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        pairs.append((b"x-amzn-requestid", self.id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def piece(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body})

    async def gone(self) -> None:
        """Wait until the client has disconnected; call it only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def cut(self) -> None:
        """Abort the connection, as a network failure would.

        ASGI cannot do that, so this uses uvicorn's transport.
        """
        cycle = getattr(self._send, "__self__", None)
        transport = getattr(cycle, "transport", None)
        if transport is not None:
            transport.abort()
            await self.gone()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PIECE = 64 * 1024
BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


class Reply:
    """Response of a program. `headers` have lower-case names; `pieces` can be read once."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers = status, headers
        self._reader = reader

    @property
    def whole(self) -> bool:
        """Whether the response has a content length, which makes it a plain response instead of a stream."""
        return "content-length" in self.headers

    async def pieces(self) -> AsyncGenerator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
        elif self.whole:
            left = int(self.headers["content-length"])
            while left:
                piece = await self._reader.read(min(left, PIECE))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(piece)
                yield piece
        else:
            while piece := await self._reader.read(PIECE):
                yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


@asynccontextmanager
async def ask(
    stream: Stream, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Reply]:
    """Send one HTTP/1.1 request on its own connection.

    Raises one of BROKEN if there is no readable response.
    """
    reader, writer = stream
    try:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost:8080", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + body)
        await writer.drain()
        status, reply_headers = _head((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
        yield Reply(status, reply_headers, reader)
    finally:
        writer.close()


def _head(text: str) -> tuple[int, dict[str, str]]:
    first, *lines = text.split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first!r} is not HTTP")
    pairs = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}


EVENT_STREAM = "application/vnd.amazon.eventstream"
STRING = 7


def event_frame(kind: str, body: object) -> bytes:
    headers = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    return _frame(headers, msgspec.json.encode(body))


def exception_frame(kind: str, body: object) -> bytes:
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    return _frame(headers, msgspec.json.encode(body))


def _frame(headers: dict[str, str], payload: bytes) -> bytes:
    head = b"".join(_header(name.encode(), value.encode()) for name, value in headers.items())
    prelude = struct.pack(">II", 12 + len(head) + len(payload) + 4, len(head))
    prelude += struct.pack(">I", zlib.crc32(prelude))
    message = prelude + head + payload
    return message + struct.pack(">I", zlib.crc32(message))


def _header(name: bytes, value: bytes) -> bytes:
    return struct.pack(">B", len(name)) + name + struct.pack(">BH", STRING, len(value)) + value
