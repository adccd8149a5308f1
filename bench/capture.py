"""The floor: a proxy that passes bytes on and appends both directions to a file, and nothing else.

It is what one writes in an afternoon: aiohttp on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import aiohttp
from aiohttp import web


class Capture:
    def __init__(self, upstream: str, file: BinaryIO) -> None:
        self._upstream = upstream
        self._file = file

    async def client(self, app: web.Application) -> AsyncIterator[None]:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        yield
        await self._http.close()

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        kept = [body]
        headers = {"content-type": "application/json"}
        async with self._http.request(
            request.method, self._upstream + request.path, data=body, headers=headers
        ) as answer:
            kind = answer.headers.get("content-type", "application/json")
            response = web.StreamResponse(status=answer.status, headers={"content-type": kind})
            response.content_length = answer.content_length
            await response.prepare(request)
            async for part in answer.content.iter_any():
                kept.append(part)
                await response.write(part)
        self._file.write(b"".join(kept) + b"\n")
        await response.write_eof()
        return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = web.Application(client_max_size=1 << 28)
    with args.file.open("ab", buffering=0) as file:
        capture = Capture(args.upstream, file)
        app.cleanup_ctx.append(capture.client)
        app.router.add_route("*", "/{path:.*}", capture.pass_on)
        web.run_app(app, host="127.0.0.1", port=args.port, access_log=None, print=None, backlog=2048)


if __name__ == "__main__":
    main()
