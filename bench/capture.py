"""The floor: a proxy that passes bytes on and appends both directions to a file, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

Message = MutableMapping[str, Any]


class Capture:
    def __init__(self, upstream: str, path: Path) -> None:
        self._upstream = upstream
        self._file = path.open("ab", buffering=0)
        self._http: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self._http = self._http or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        kept = list(parts)
        async with self._http.request(
            scope["method"],
            self._upstream + scope["path"],
            data=b"".join(parts),
            headers={"content-type": "application/json"},
        ) as response:
            kind = response.headers.get("content-type", "application/json").encode()
            headers = [(b"content-type", kind)]
            if response.content_length is not None:
                headers.append((b"content-length", str(response.content_length).encode()))
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            async for part in response.content.iter_any():
                kept.append(part)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        self._file.write(b"".join(kept) + b"\n")
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = Capture(args.upstream, args.file)
    uvicorn.run(app, port=args.port, log_level="warning", access_log=False, lifespan="off", backlog=2048)


if __name__ == "__main__":
    main()
