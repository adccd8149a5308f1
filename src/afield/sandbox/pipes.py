"""Reading and feeding the pipes of a command, within bounds, from an event loop."""

from __future__ import annotations

import asyncio
import os

KEPT = 1024 * 1024
CHUNK = 65_536


class bounded:  # noqa: N801 - reads as a function where it is used
    """The beginning and the end of what comes out of a pipe; it is closed when reading ends."""

    def __init__(self, fd: int, kept: int = KEPT) -> None:
        self._fd = fd
        self._half = kept // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.truncated = False

    async def read(self) -> None:
        reader, transport = await _reader(self._fd)
        try:
            while data := await reader.read(CHUNK):
                room = self._half - len(self._head)
                self._head += data[:room]
                self._tail += data[room:] if room > 0 else data
                if len(self._tail) > self._half:
                    del self._tail[: len(self._tail) - self._half]
                    self.truncated = True
        finally:
            transport.close()

    @property
    def text(self) -> str:
        between = b"\n[... left out ...]\n" if self.truncated else b""
        return bytes(self._head + between + self._tail).decode("utf-8", "replace")


async def read_all(fd: int, most: int) -> bytes | None:
    """None where there is more than that: what is read may have no end."""
    reader, transport = await _reader(fd)
    content = bytearray()
    try:
        while data := await reader.read(CHUNK):
            content += data
            if len(content) > most:
                return None
        return bytes(content)
    finally:
        transport.close()


async def feed(fd: int, data: bytes) -> None:
    """Write it all and close. Whoever does not read it to the end has had enough."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        writer.write(data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        transport.close()


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport
