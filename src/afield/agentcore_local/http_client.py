"""One HTTP/1.1 request to a program, on a connection of its own; the answer's body as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PIECE = 64 * 1024
BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


class Reply:
    """`headers` have lower-case names; `pieces` can be read once."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers = status, headers
        self._reader = reader

    @property
    def whole(self) -> bool:
        """Whether its length was told, so that it is no stream."""
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
    """Raises one of BROKEN where there is no answer that can be read."""
    reader, writer = stream
    try:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost:8080", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + body)
        await writer.drain()
        status, found = _head((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
        yield Reply(status, found, reader)
    finally:
        writer.close()


def _head(text: str) -> tuple[int, dict[str, str]]:
    first, *lines = text.split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"{first!r} is not HTTP")
    pairs = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
