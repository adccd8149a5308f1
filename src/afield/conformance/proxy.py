"""Fault-injecting proxy between client and gateway, which also captures every request.

Bytes pass unchanged. The last marker in a request's body identifies it; each `NetworkFault` happens once:

1. refuse: the proxy responds with the dialect's own 500; the gateway never sees the request.
2. cut: the connection breaks in both directions after `CUT_S` seconds, during a slow response.
3. lose: the proxy reads the whole response, so that the gateway has delivered it. The client gets the first
   chunk of a streamed response (nothing of any other) and a broken connection. Only one chunk, because a
   client that has part of the text may send another request, for the rest of it.

With `clean`, a broken stream ends its HTTP body without the last events; some clients do not retry otherwise.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import islice
from urllib.parse import urlsplit

from msgspec import Struct

from afield.conformance.scenario import NetworkFault, last_marker

RETRY_COUNT = "x-stainless-retry-count"


class CapturedRequest(Struct, frozen=True, kw_only=True):
    """Raw HTTP request."""

    method: str
    """HTTP method."""
    target: str
    """Request target, with the query string."""
    headers: dict[str, str]
    """Header fields by lower-case name."""
    body: bytes
    """Body without transfer encoding, still with its content encoding."""
    fault: NetworkFault | None = None
    """Fault that the proxy injected; None without."""

    @property
    def path(self) -> str:
        """Request path without the query string."""
        return urlsplit(self.target).path

    @property
    def content(self) -> bytes:
        """Body without its content encoding."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding == "gzip":
            return gzip.decompress(self.body)
        if encoding != "identity":
            raise ValueError(f"content-encoding {encoding!r} is not one the judge reads")
        return self.body

    @property
    def repeats(self) -> bool:
        """Whether the client's SDK marks the request as a retry."""
        return self.headers.get(RETRY_COUNT, "0") not in ("", "0")


def parse_request(head: bytes, body: bytes, fault: NetworkFault | None) -> CapturedRequest:
    """Parse the head of a request."""
    line, _, fields = head.decode("latin-1").partition("\r\n")
    method, target, *_ = line.split(" ")
    pairs = (field.partition(":") for field in fields.split("\r\n") if field)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return CapturedRequest(method=method, target=target, headers=headers, body=body, fault=fault)


CUT_S = 2.0
LAST_CHUNK = b"0\r\n\r\n"
GONE = (ConnectionError, asyncio.IncompleteReadError)


class FaultPlan:
    """Pending faults by marker, injected faults (`fired`) and captured `requests` in order of arrival."""

    def __init__(self, faults: Mapping[str, NetworkFault], *, clean: bool = False) -> None:
        self._left = dict(faults)
        self.clean = clean
        self.injected: dict[str, NetworkFault] = {}
        self.requests: list[CapturedRequest] = []

    def take(self, body: bytes) -> NetworkFault | None:
        """Take the fault for a request body; None without."""
        where = last_marker(body.decode(errors="replace"))
        fault = self._left.pop(where, None) if where else None
        if where and fault:
            self.injected[where] = fault
        return fault


@asynccontextmanager
async def fault_proxy(upstream: tuple[str, int], faults: FaultPlan) -> AsyncIterator[int]:
    """Run the proxy on loopback; yields its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _Connection(reader, writer, faults).run(upstream)
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: FaultPlan) -> None:
        self._reader = reader
        self._writer = writer
        self._faults = faults
        self._losing = False

    async def run(self, upstream: tuple[str, int]) -> None:
        back, forth = await asyncio.open_connection(*upstream, limit=1 << 24)
        tasks = [asyncio.create_task(self._responses(back)), asyncio.create_task(self._requests(forth))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (self._writer, forth):
                end.close()
                with suppress(*GONE):
                    await end.wait_closed()

    async def _break(self, end: bytes) -> None:
        """Break the client's connection or, if `clean`, end the response with `end`."""
        if self._faults.clean:
            self._writer.write(end)
            await self._writer.drain()
        else:
            self._writer.transport.abort()

    async def _requests(self, forth: asyncio.StreamWriter) -> None:
        with suppress(*GONE):
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                wire, body = await _body(self._reader, head)
                fault = self._faults.take(body)
                self._faults.requests.append(parse_request(head, body, fault))
                if fault is NetworkFault.REFUSE:
                    self._writer.write(refusal(head))
                    await self._writer.drain()
                    continue
                self._losing = fault is NetworkFault.LOSE
                forth.write(head + wire)
                await forth.drain()
                if fault is NetworkFault.CUT:
                    await asyncio.sleep(CUT_S)
                    forth.transport.abort()
                    await self._break(LAST_CHUNK)
                    return

    async def _responses(self, back: asyncio.StreamReader) -> None:
        with suppress(*GONE):
            while True:
                data = await back.read(1 << 16)
                if not data:
                    return
                if self._losing:
                    await self._lose(data, back)
                    return
                self._writer.write(data)
                await self._writer.drain()

    async def _lose(self, begun: bytes, back: asyncio.StreamReader) -> None:
        """Read the response to its end; pass only the first chunk of a stream to the client."""
        answer = begun
        while b"\r\n\r\n" not in answer:
            answer += await back.read(1 << 16)
        head, _, body = answer.partition(b"\r\n\r\n")
        head += b"\r\n\r\n"
        while not _complete(head, body):
            more = await back.read(1 << 16)
            if not more:
                break
            body += more
        if b"text/event-stream" in head.lower():
            self._writer.write(head)
            for size, chunk in islice(_chunks(body), 1):
                self._writer.write(size + chunk)
            await self._writer.drain()
        await self._break(LAST_CHUNK)


def _headers(head: bytes) -> dict[bytes, bytes]:
    fields = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
    return {name.strip(): value.strip() for name, _, value in fields}


def _complete(head: bytes, body: bytes) -> bool:
    headers = _headers(head)
    if headers.get(b"transfer-encoding") == b"chunked":
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(headers.get(b"content-length", b"0"))


def _chunks(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Chunks of a body, each with its size line."""
    while body:
        line, _, rest = body.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        yield line + b"\r\n", rest[: size + 2]
        body = rest[size + 2 :]


async def _body(reader: asyncio.StreamReader, head: bytes) -> tuple[bytes, bytes]:
    """Body as sent, and body without its transfer encoding."""
    headers = _headers(head)
    if headers.get(b"transfer-encoding") != b"chunked":
        body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        return body, body
    wire, parts = [], []
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        wire += [line, data]
        parts.append(data[:-2])
        if size == 0:
            return b"".join(wire), b"".join(parts)


def refusal(head: bytes) -> bytes:
    """HTTP 500 response in the error format of the requested API."""
    error: dict[str, object] = {"message": "the server had an error", "type": "server_error"}
    body: dict[str, object] = {"error": {**error, "code": None, "param": None}}
    line = head.split(b"\r\n", 1)[0]
    if b"/messages" in line:
        body = {"type": "error", "error": {**error, "type": "api_error"}}
    elif b"enerateContent" in line:
        body = {"error": {"code": 500, "message": "the server had an error", "status": "INTERNAL"}}
    data = json.dumps(body).encode()
    lines = ("HTTP/1.1 500 Internal Server Error", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {len(data)}", "", "")).encode() + data
