"""Listening sockets, bound before slow start-up."""

from __future__ import annotations

import errno
import socket

from afield.errors import UsageError


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking listening TCP socket; raises UsageError if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP explicitly: asyncio sets TCP_NODELAY only on sockets with that protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use; choose another --port, or 0 for a free one"
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    listener.setblocking(False)
    return listener
