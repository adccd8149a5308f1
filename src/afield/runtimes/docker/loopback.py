"""Loopback relay: lets containers reach servers on this machine's 127.0.0.1.

1. Inside a container 127.0.0.1 is the container itself. `rewrite_addresses` replaces loopback hosts in
`_rollout` by the name or address of this machine there, with the same port; the task row stays unchanged.
2. If that address belongs to this machine (a Linux bridge), `LoopbackRelays` listens there and forwards
connections from the container subnet. A server that listens on all addresses needs no relay.
3. Relays end with this process. For agents that outlive it, the gateway must listen on all addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from afield import wire

log = logging.getLogger(__name__)

FIELDS = ("base_url", "outcome_url", "sqs_url", "hint_url")
CONNECT_S = 5.0
CHUNK = 2**16
DEFAULT_PORTS = {"http": 80, "https": 443, "redis": 6379, "nats": 4222}


def loopback_ports(payload: dict[str, Any]) -> set[int]:
    """Loopback ports in a payload's `_rollout` addresses."""
    ports: set[int] = set()
    for url in _addresses(payload).values():
        parts = urlsplit(url)
        if (port := parts.port or DEFAULT_PORTS.get(parts.scheme)) is not None:
            ports.add(port)
    return ports


def rewrite_addresses(payload: dict[str, Any], host: str) -> dict[str, Any]:
    """Return the payload with `host` in place of loopback hosts."""
    ours = _addresses(payload)
    if not ours:
        return payload
    changed = {field: _with_host(url, host) for field, url in ours.items()}
    return {**payload, wire.ROLLOUT_FIELD: {**payload[wire.ROLLOUT_FIELD], **changed}}


def _addresses(payload: dict[str, Any]) -> dict[str, str]:
    rollout = payload.get(wire.ROLLOUT_FIELD)
    if not isinstance(rollout, dict):
        return {}
    urls = {field: rollout.get(field) for field in FIELDS}
    return {field: url for field, url in urls.items() if isinstance(url, str) and _is_loopback(url)}


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _with_host(url: str, host: str) -> str:
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    port = f":{parts.port}" if parts.port is not None else ""
    name = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{user}{at}{name}{port}"))


class LoopbackRelays:
    """Relays by address and port, opened on demand. Use it with `async with`."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int], asyncio.Server | None] = {}
        self._opening = asyncio.Lock()
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LoopbackRelays:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers.values():
            if server is not None:
                server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def open(self, gateway: str, subnet: str, ports: set[int]) -> bool:
        """Listen on `gateway` for each of `ports`.

        Returns False if `gateway` is not an address of this machine.
        """
        async with self._opening:
            return all([await self._open(gateway, subnet, port) for port in sorted(ports)])

    async def _open(self, gateway: str, subnet: str, port: int) -> bool:
        if self._servers.get((gateway, port)) is not None:
            return True
        try:
            server = await asyncio.start_server(self._handler(port, subnet), gateway, port)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                # A server listens on all addresses, or another process already relays this port.
                return True
            if error.errno == errno.EADDRNOTAVAIL:
                return False
            raise
        log.info("containers reach 127.0.0.1:%d at %s:%d", port, gateway, port)
        self._servers[gateway, port] = server
        return True

    def _handler(
        self, port: int, subnet: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        inside = ipaddress.ip_network(subnet, strict=False)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._links.add(task)
            try:
                peer = ipaddress.ip_address(writer.get_extra_info("peername")[0])
                if peer in inside:
                    await _relay(reader, writer, port)
            finally:
                self._links.discard(task)
                writer.close()

        return carry


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    try:
        async with asyncio.timeout(CONNECT_S):
            theirs, ours = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return
    try:
        await asyncio.gather(_pump(reader, ours), _pump(theirs, writer))
    finally:
        ours.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until the source ends, then half-close; the other direction may continue."""
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
