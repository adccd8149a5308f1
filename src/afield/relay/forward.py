"""ASGI application that forwards requests to an HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from afield.relay.streams import HOP_BY_HOP

CONNECT_S = 10.0
"""Timeout of a connection to the server, in seconds."""
BODILESS = ("GET", "HEAD")
"""Methods whose bodies are not forwarded."""


class HttpForwarder:
    """Forwards requests to the server at `url`; used in `async with`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._http = aiohttp.ClientSession(
            timeout=timeout,
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),  # cookies belong to the clients, which share this session
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Any],
        send: Callable[[MutableMapping[str, Any]], Any],
    ) -> None:
        body_read = asyncio.Event()
        if scope["method"] in BODILESS:
            body_read.set()
        forwarding = asyncio.create_task(self._forward(scope, _body(receive, body_read), send))
        watching = asyncio.create_task(_disconnected(body_read, receive))
        try:
            await asyncio.wait([forwarding, watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            if not forwarding.done():
                forwarding.cancel()
            await asyncio.gather(forwarding, watching, return_exceptions=True)
        if not forwarding.cancelled():
            forwarding.result()

    async def _forward(
        self, scope: MutableMapping[str, Any], body: AsyncIterator[bytes], send: Callable[..., Any]
    ) -> None:
        query = scope["query_string"].decode("latin-1")
        url = f"{self._url}{scope['raw_path'].decode('latin-1')}" + (f"?{query}" if query else "")
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        try:
            async with self._http.request(
                scope["method"],
                URL(url, encoded=True),  # as the client wrote it, also with dots
                headers=pairs,
                data=None if scope["method"] in BODILESS else body,
                allow_redirects=False,
            ) as response:
                headers = [(name.lower(), value) for name, value in response.raw_headers]
                headers = [(name, value) for name, value in headers if name not in HOP_BY_HOP]
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for data in response.content.iter_any():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientConnectorError:
            error = {"type": "server_down", "message": f"{self._url} does not accept connections; start it"}
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": msgspec.json.encode({"error": error})})


async def _body(receive: Callable[[], Any], read: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client disconnected")
        if message["body"]:
            yield message["body"]
        if not message.get("more_body"):
            read.set()
            return


async def _disconnected(read: asyncio.Event, receive: Callable[[], Any]) -> None:
    await read.wait()
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
