"""A small proxy between client and gateway, which lets chosen requests fail, each once.

Bytes pass as they are. A request is recognised by the last marker in its body. A refused one is
answered with the dialect's own 500 and never reaches the gateway; one that is cut loses its connection
in both directions after `CUT_S`, which is in the middle of what the script samples slowly for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from afield.conformance.scenario import Fault, last_marker

CUT_S = 2.0
GONE = (ConnectionError, asyncio.IncompleteReadError)


class Faults:
    """`fired` says what happened so far; `posts` counts requests with a marker."""

    def __init__(self, faults: Mapping[str, Fault]) -> None:
        self._left = dict(faults)
        self.fired: dict[str, Fault] = {}
        self.posts = 0

    def of(self, body: bytes) -> Fault | None:
        where = last_marker(body.decode(errors="replace"))
        self.posts += where is not None
        fault = self._left.pop(where, None) if where else None
        if where and fault:
            self.fired[where] = fault
        return fault


@asynccontextmanager
async def faulty(upstream: tuple[str, int], faults: Faults) -> AsyncIterator[int]:
    """The port the proxy listens on, on loopback."""
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
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults) -> None:
        self._reader = reader
        self._writer = writer
        self._faults = faults
        self._cut = False

    async def run(self, upstream: tuple[str, int]) -> None:
        back, forth = await asyncio.open_connection(*upstream)
        tasks = [asyncio.create_task(self._responses(back)), asyncio.create_task(self._requests(forth))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (self._writer, forth):
                if self._cut:
                    end.transport.abort()
                else:
                    end.close()
                with suppress(*GONE):
                    await end.wait_closed()

    async def _requests(self, forth: asyncio.StreamWriter) -> None:
        with suppress(*GONE):
            while True:
                head = await self._reader.readuntil(b"\r\n\r\n")
                body = await _body(self._reader, head)
                fault = self._faults.of(body)
                if fault is Fault.REFUSE:
                    self._writer.write(refusal(head))
                    await self._writer.drain()
                    continue
                forth.write(head + body)
                await forth.drain()
                if fault is Fault.CUT:
                    await asyncio.sleep(CUT_S)
                    self._cut = True
                    return

    async def _responses(self, back: asyncio.StreamReader) -> None:
        with suppress(*GONE):
            while data := await back.read(1 << 16):
                self._writer.write(data)
                await self._writer.drain()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    fields = [line.partition(b":") for line in head.lower().split(b"\r\n")[1:]]
    headers = {name.strip(): value.strip() for name, _, value in fields}
    if headers.get(b"transfer-encoding") != b"chunked":
        return await reader.readexactly(int(headers.get(b"content-length", b"0")))
    parts: list[bytes] = []
    while True:
        size = await reader.readuntil(b"\r\n")
        parts += [size, await reader.readexactly(int(size.partition(b";")[0], 16) + 2)]
        if int(size.partition(b";")[0], 16) == 0:
            return b"".join(parts)


def refusal(head: bytes) -> bytes:
    """A 500 as the API that was asked would give it."""
    error: dict[str, object] = {"message": "the server had an error", "type": "server_error"}
    body: dict[str, object] = {"error": {**error, "code": None, "param": None}}
    if b"/messages" in head.split(b"\r\n", 1)[0]:
        body = {"type": "error", "error": {**error, "type": "api_error"}}
    data = json.dumps(body).encode()
    lines = ("HTTP/1.1 500 Internal Server Error", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {len(data)}", "", "")).encode() + data
