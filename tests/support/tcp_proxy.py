"""TCP proxy whose connections can be cut or frozen."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from afield.sdk.listen import listen


class TcpProxy:
    """Forwards connections to a port of this machine; `port` is known inside `async with`."""

    def __init__(self, target: int) -> None:
        self.target = target
        """Port that new connections lead to."""
        self.port = 0
        self.refuse = False
        """Whether new connections are reset."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listener)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset all connections; new ones are accepted."""
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Forward nothing more on the present connections, and leave them open."""
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, upstream}
        for source, sink in ((reader, upstream), (upstream_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)
