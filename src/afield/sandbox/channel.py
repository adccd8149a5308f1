"""A socket that keeps messages whole and carries descriptors, for an event loop and without one.

Descriptors that were sent are closed here afterwards; those that were received are the receiver's.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import MsgspecError, Struct

from afield.errors import Unavailable, UsageError
from afield.sandbox.messages import MAX_BYTES, MAX_FDS, Message, decode, encode

CREDENTIALS = struct.Struct("3i")
ANCILLARY = socket.CMSG_SPACE(4 * MAX_FDS) + socket.CMSG_SPACE(CREDENTIALS.size)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Received(Struct, frozen=True):
    """`pid` is the sender's as seen from here, where credentials were asked for."""

    message: Message
    fds: list[int]
    pid: int


def transmit(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    try:
        data = encode(message)
    except UnicodeEncodeError as error:
        # It would stay first in the queue, and keep all others from being sent.
        raise UsageError(f"a {type(message).__name__} with text that is not Unicode: {error}") from error
    if len(data) > MAX_BYTES:
        kind = type(message).__name__
        raise UsageError(f"a {kind} of {len(data)} bytes is over {MAX_BYTES}; send large data as a file")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def receive(sock: socket.socket) -> Received | None:
    """None when the other side is gone. Raises BlockingIOError where nothing is there yet."""
    data, ancillary, _, _ = sock.recvmsg(MAX_BYTES, ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    fds, pid = [], 0
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
            fds += received
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = CREDENTIALS.unpack(content[: CREDENTIALS.size])[0]
    return Received(decode(data), fds, pid) if data else None


class Channel:
    """One end in an event loop. `told` gets each message, `closed` is called once."""

    def __init__(
        self,
        sock: socket.socket,
        told: Callable[[Received], None],
        closed: Callable[[], None],
        *,
        credentials: bool = False,
    ) -> None:
        self._sock = sock
        self._told = told
        self._closed = closed
        self._waiting: deque[tuple[Message, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        sock.setblocking(False)
        if credentials:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add_reader(sock.fileno(), self._read)

    @property
    def open(self) -> bool:
        return self._open

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Takes over `fds`. Raises Unavailable when the other side is gone."""
        if not self._open:
            _close(fds)
            raise Unavailable("the other side of the channel is gone")
        self._waiting.append((message, list(fds)))
        if len(self._waiting) == 1:
            self._write()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._waiting:
            _close(fds)
        self._waiting.clear()

    def _write(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            try:
                transmit(self._sock, message, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError:
                self._end()
                return
            except UsageError:
                self._waiting.popleft()
                _close(fds)
                raise
            self._waiting.popleft()
            _close(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        # A few at a time: whoever talks much must not keep the loop from the others.
        for _ in range(16):
            try:
                received = receive(self._sock)
            except BlockingIOError:
                return
            except (OSError, MsgspecError):
                received = None  # Whoever does not speak our language is gone to us.
            if received is None:
                self._end()
                return
            self._told(received)
            if not self._open:
                return

    def _end(self) -> None:
        if self._open:
            self.close()
            self._closed()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
