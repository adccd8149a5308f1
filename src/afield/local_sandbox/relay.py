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

AT_ONCE = 512
CONNECT_S = 30.0
BUFFER = 128 * 1024


class _Half(asyncio.Protocol):
    """Side of a connection; forwards received data to the other side."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Half | None = None
        self._ended = ended
        self._early = bytearray()
        self._eof = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=BUFFER)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)
            return
        # Pause here rather than in connection_made, where older Python versions lose it.
        self._early += data
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

    def join(self, other: _Half) -> None:
        """Connect the other side, and forward data that arrived before."""
        self.other = other
        if other.transport is not None and self._early:
            other.transport.write(bytes(self._early))
            self._early.clear()
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


class Relay:
    """All connections of one sandbox."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._halves: set[_Half] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused = 0
        self._failed: dict[str, int] = {}

    def notes(self) -> tuple[str, ...]:
        """Messages about refused connections and unreachable addresses since the last call."""
        notes = [f"{to}; {n} time(s)" for to, n in self._failed.items()]
        if self._refused:
            notes.append(f"{AT_ONCE} connections at once are allowed; {self._refused} more were closed")
        self._refused, self._failed = 0, {}
        return tuple(notes)

    async def door(self, listener: socket.socket, host: str, port: int) -> None:
        """Forward connections that the sandbox makes to `listener` to `host:port` outside."""

        async def out(half: Callable[[], _Half]) -> None:
            await asyncio.get_running_loop().create_connection(half, host, port)

        await self._serve(out, f"{host}:{port}", sock=listener)

    async def port(self, path: Path, made: Callable[[], Awaitable[socket.socket]], port: int) -> None:
        """Forward connections from the Unix socket `path` to the sandbox's `port`.

        `made` creates a socket in the sandbox's network.
        """

        async def into(half: Callable[[], _Half]) -> None:
            loop = asyncio.get_running_loop()
            sock = await made()
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", port))
                await loop.create_connection(half, sock=sock)
            except OSError:
                sock.close()
                raise

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(128)
        await self._serve(into, f"port {port}", sock=listener)

    async def _serve(
        self, onward: Callable[[Callable[[], _Half]], Awaitable[None]], to: str, *, sock: socket.socket
    ) -> None:
        def accepted() -> _Half:
            near = _Near(lambda: self._onward(near, onward, to), lambda: self._halves.discard(near))
            return near

        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(accepted, sock=sock))
        else:
            self._servers.append(await loop.create_server(accepted, sock=sock))

    def _onward(self, near: _Half, onward: Callable[[Callable[[], _Half]], Awaitable[None]], to: str) -> None:
        self._halves.add(near)
        if near.transport is None:
            return
        if len(self._halves) > AT_ONCE:
            self._refused += 1
            near.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._join(near, onward, to))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(
        self, near: _Half, onward: Callable[[Callable[[], _Half]], Awaitable[None]], to: str
    ) -> None:
        far = _Half(lambda: None)
        far.other = near
        try:
            async with asyncio.timeout(CONNECT_S):
                await onward(lambda: far)
        except OSError as error:
            said = f"{to} could not be reached: {type(error).__name__}"
            self._failed[said] = self._failed.get(said, 0) + 1
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
        for half in list(self._halves):
            for transport in (half.transport, half.other.transport if half.other else None):
                if transport is not None:
                    transport.abort()


class _Near(_Half):
    """Accepted side of a connection; opens the other side."""

    def __init__(self, onward: Callable[[], None], ended: Callable[[], None]) -> None:
        super().__init__(ended)
        self._onward = onward

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._onward()
