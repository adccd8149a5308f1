"""Load generator: keep-alive HTTP/1.1 connections with one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

DEADLINE = 120.0


class Reply(Struct):
    status: int
    body: bytes
    first_s: float
    whole_s: float


class Load(Struct):
    """What a number of connections saw."""

    done: int = 0
    errors: int = 0
    wall_s: float = 0.0
    latencies: list[float] = []
    firsts: list[float] = []
    problems: list[str] = []

    def quantile(self, q: float, of: list[float] | None = None) -> float:
        values = sorted(self.latencies if of is None else of)
        return values[min(len(values) - 1, int(q * len(values)))] * 1000 if values else float("nan")


class Connection(asyncio.Protocol):
    """One connection. `ask` once at a time."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[Reply] | None = None
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._first = self._first or time.perf_counter()
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._waiting and not self._waiting.done():
            now = time.perf_counter()
            first = (self._first or now) - self._began
            status = self._parser.get_status_code()
            self._waiting.set_result(Reply(status, b"".join(self._parts), first, now - self._began))
            if not self._parser.should_keep_alive():
                self.close()

    async def ask(self, request: bytes) -> Reply:
        if not self._open:
            raise ConnectionResetError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._first = 0.0
        self._began = time.perf_counter()
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(DEADLINE):
            return await self._waiting

    @property
    def open(self) -> bool:
        return self._open

    def close(self) -> None:
        self._open = False
        self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._waiting and not self._waiting.done():
            self._waiting.set_exception(error)


async def connect(url: str) -> Connection:
    where = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, where.hostname or "", where.port or 80)
    return connection


def post(path: str, body: bytes, key: str = "none") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def drive(
    url: str,
    connections: int,
    job: Callable[[int, int], bytes],
    *,
    expect: bytes,
    seconds: float,
    at_least: int = 1,
) -> Load:
    """Every connection asks `job(connection, n)`, n from 0, until the time is up and it asked enough.

    A reply that does not contain what is expected is an error.
    """
    load = Load(latencies=[], firsts=[], problems=[])
    end = time.perf_counter() + seconds

    async def work(index: int) -> None:
        connection, n = await connect(url), 0
        while n < at_least or time.perf_counter() < end:
            try:
                if not connection.open:
                    connection = await connect(url)
                reply = await connection.ask(job(index, n))
                if reply.status != 200 or expect not in reply.body:
                    raise ConnectionError(f"{reply.status} {reply.body[:200]!r}")
                load.done += 1
                load.latencies.append(reply.whole_s)
                load.firsts.append(reply.first_s)
            except (OSError, TimeoutError, httptools.HttpParserError) as error:
                load.errors += 1
                load.problems.append(f"{type(error).__name__}: {error}"[:300])
                connection.close()
            n += 1
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(work(index) for index in range(connections)))
    load.wall_s = time.perf_counter() - began
    return load
