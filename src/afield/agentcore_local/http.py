"""The little HTTP the server needs, straight on ASGI."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from afield.agentcore_local.errors import ConnectionCut, Problem, invalid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[str, str]]
MAX_BODY = 100_000_000
MAX_READ = 1_000_000_000


class Request:
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
            # Read to its end: a client that still sends would not see the answer, but a broken connection.
            if received > MAX_READ:
                break
        if max(size, received) > MAX_BODY:
            told = f"has {max(size, received)} bytes, {MAX_BODY} are allowed; put large inputs into a store"
            raise invalid("payload", f"{told} and send their address")
        return b"".join(parts)

    async def answer(self, status: int, value: object, headers: Headers = ()) -> None:
        body = b"" if status == 204 else msgspec.json.encode(value)
        typed = [("content-type", "application/json"), *headers]
        await self.begin(status, [*typed, ("content-length", str(len(body)))])
        await self.end(body)

    async def refuse(self, problem: Problem) -> None:
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
        """Until the client has gone. Only once the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def cut(self) -> None:
        """Break the connection off, as a network would. ASGI has no word for it: it is asked of uvicorn."""
        cycle = getattr(self._send, "__self__", None)
        transport = getattr(cycle, "transport", None)
        if transport is not None:
            transport.abort()
            await self.gone()
