"""Minimal capture proxy: forwards bytes, appends ids and log-probabilities to a file.

The baseline of the gateway benchmark: aiohttp on both sides and one line of JSON per call, without sessions,
prompts, turns, tokenisation or durability.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
from aiohttp import web

JSON = {"content-type": "application/json"}


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
        kept: list[bytes] = []
        url = self._upstream + request.path
        async with self._http.request(request.method, url, data=body, headers=JSON) as answer:
            kind = answer.headers.get("content-type", "application/json")
            response = web.StreamResponse(status=answer.status, headers={"content-type": kind})
            response.content_length = answer.content_length
            await response.prepare(request)
            async for part in answer.content.iter_any():
                kept.append(part)
                await response.write(part)
        if body:
            self._keep(b"".join(kept), "stream" in kind)
        await response.write_eof()
        return response

    def _keep(self, body: bytes, stream: bool) -> None:
        lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")] if stream else [body]
        ids: list[int] = []
        logprobs: list[float] = []
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            for choice in event.get("choices", ()):
                ids += choice.get("token_ids") or ()
                logprobs += [e["logprob"] for e in (choice.get("logprobs") or {}).get("content") or ()]
        self._file.write(json.dumps({"token_ids": ids, "logprobs": logprobs}).encode() + b"\n")


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
