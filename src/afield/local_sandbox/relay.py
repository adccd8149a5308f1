"""Byte relay between a sandbox and its allowed addresses.

It also forwards connections from this machine to the sandbox's port. Each direction closes on its own
(half-close). Buffers and the number of connections per sandbox are bounded; further connections are closed at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

MAX_CONNECTIONS = 512
CONNECT_S = 30.0
BUFFER = 128 * 1024


class _RelaySide(asyncio.Protocol):
    """Side of a connection; forwards received data to the other side."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _RelaySide | None = None
        self._ended = ended
        self._buffered = bytearray()
        self._eof = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=BUFFER)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
            return
        # Pause here rather than in connection_made, where older Python versions lose it.
        self._buffered += data
        if self.transport is not None:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Half-close the other side; close both sides once both have ended."""
        self._eof = True
        if self.other is None or self.other.transport is None:
            return True
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            self.other.transport.write_eof()
        if self.other._eof and self.transport is not None:
            self.transport.close()
            self.other.transport.close()
        return True

    def join(self, other: _RelaySide) -> None:
        """Connect the other side, and forward data that arrived before."""
        self.other = other
        if other.transport is not None and self._buffered:
            other.transport.write(bytes(self._buffered))
            self._buffered.clear()
        if self._eof:
            self.eof_received()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


_Connect = Callable[[Callable[[], _RelaySide]], Awaitable[None]]


class ConnectionRelay:
    """All connections of one sandbox."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._sides: set[_RelaySide] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = 0
        self._failed: dict[str, int] = {}

    def notes(self) -> tuple[str, ...]:
        """Messages about refused connections and unreachable addresses since the last call."""
        notes = [f"{problem}; {n} time(s)" for problem, n in self._failed.items()]
        if self._refused:
            notes.append(
                f"{MAX_CONNECTIONS} concurrent connections are allowed; {self._refused} more were closed"
            )
        self._refused, self._failed = 0, {}
        return tuple(notes)

    async def forward_out(self, listener: socket.socket, host: str, port: int) -> None:
        """Forward connections that the sandbox makes to `listener` to `host:port` outside."""

        async def out(side: Callable[[], _RelaySide]) -> None:
            await asyncio.get_running_loop().create_connection(side, host, port)

        await self._serve(out, f"{host}:{port}", sock=listener)

    async def forward_in(
        self, path: Path, open_socket: Callable[[], Awaitable[socket.socket]], port: int
    ) -> None:
        """Forward connections from the Unix socket `path` to the sandbox's `port`.

        `open_socket` creates a socket in the sandbox's network.
        """

        async def into(side: Callable[[], _RelaySide]) -> None:
            loop = asyncio.get_running_loop()
            sock = await open_socket()
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", port))
                await loop.create_connection(side, sock=sock)
            except OSError:
                sock.close()
                raise

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(128)
        await self._serve(into, f"port {port}", sock=listener)

    async def _serve(self, connect: _Connect, to: str, *, sock: socket.socket) -> None:
        def accepted() -> _RelaySide:
            near = _AcceptedSide(
                lambda: self._connect_out(near, connect, to), lambda: self._sides.discard(near)
            )
            return near

        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(accepted, sock=sock))
        else:
            self._servers.append(await loop.create_server(accepted, sock=sock))

    def _connect_out(self, near: _RelaySide, connect: _Connect, to: str) -> None:
        self._sides.add(near)
        if near.transport is None:
            return
        if len(self._sides) > MAX_CONNECTIONS:
            self._refused += 1
            near.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._join(near, connect, to))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, near: _RelaySide, connect: _Connect, to: str) -> None:
        far = _RelaySide(lambda: None)
        far.other = near
        try:
            async with asyncio.timeout(CONNECT_S):
                await connect(lambda: far)
        except OSError as error:
            problem = f"{to} is unreachable: {type(error).__name__}"
            self._failed[problem] = self._failed.get(problem, 0) + 1
            if near.transport is not None:
                near.transport.abort()
            return
        if near.transport is None or near.transport.is_closing():
            if far.transport is not None:
                far.transport.close()
            return
        near.join(far)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for side in list(self._sides):
            for transport in (side.transport, side.other.transport if side.other else None):
                if transport is not None:
                    transport.abort()


class _AcceptedSide(_RelaySide):
    """Accepted side of a connection; opens the other side."""

    def __init__(self, connect: Callable[[], None], ended: Callable[[], None]) -> None:
        super().__init__(ended)
        self._connect_out = connect

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connect_out()
