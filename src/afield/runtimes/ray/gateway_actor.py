"""Ray actor with one gateway process of a pool.

The actor keeps the listening socket, so that connections wait while the process is replaced. If the actor
dies, with its worker or node, the process's standard input closes and it exits.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from afield.errors import AfieldError, UsageError
from afield.interfaces import GatewayEndpoint
from afield.runtimes.ray.actor import DROPPED_ENV
from afield.runtimes.ray.cluster import ray_module
from afield.sdk.listen import listen
from afield.utils.gateway_process import GatewayProcess
from afield.utils.process_tree import start_time

WILDCARD = ("0.0.0.0", "::")
PORT_S = 5.0
"""Seconds to wait for the port of a gateway that is ending."""


class RayGatewayPlan(Struct, frozen=True, kw_only=True):
    """How a node starts one gateway of a pool."""

    arguments: tuple[str, ...]
    """Arguments of the Python interpreter that runs the gateway."""
    settings: dict[str, Any]
    """Settings of the gateway."""
    host: str = ""
    """Address to listen on; empty takes that of the node."""
    port: int = 0
    """Port to listen on; 0 selects a free port."""
    store: str = ""
    """Directory of its store that all nodes see; empty makes one on the node, which is lost with it."""
    log: str = ""
    """Log file that all nodes see; empty writes into the store's directory."""
    start_timeout_s: float
    """Seconds until the gateway has to serve."""


class GatewayHost:
    """Asyncio actor; all methods run on one event loop.

    `url` is the address of the gateway that this one replaces, which is taken over if it is one of this node.
    """

    def __init__(self, plan: RayGatewayPlan, url: str = "") -> None:
        self._plan = plan
        self._earlier = urlsplit(url) if url and plan.store else None
        self._folder = plan.store or tempfile.mkdtemp(prefix="afield-gateway-")
        self._node = ray_module().util.get_node_ip_address()
        self._host = plan.host or self._node
        self._listener: socket.socket | None = None
        self._process: GatewayProcess | None = None
        self._starts = 0

    async def start(self) -> GatewayEndpoint | str:
        """Start the gateway, in place of an earlier process; returns what failed, or its endpoint."""
        try:
            return await self._start()
        except AfieldError as error:
            return str(error)

    async def _start(self) -> GatewayEndpoint:
        if self._listener is None:
            self._listener = await self._listen()
        if self._process is not None:
            await self._process.stop(0.0)
        self._starts += 1
        host = self._node if self._host in WILDCARD else self._host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"
        settings = {**self._plan.settings, "host": self._host, "store": self._folder}
        settings["public_url"] = settings.get("public_url") or settings.get("relay") or url
        self._process = GatewayProcess(
            ["env", *(f"--unset={name}" for name in DROPPED_ENV), sys.executable, *self._plan.arguments],
            None,
            Path(self._plan.log) if self._plan.log else Path(self._folder) / "gateway.log",
            start_timeout_s=self._plan.start_timeout_s,
            listener=self._listener,
        )
        await self._process.start(msgspec.json.encode(settings))
        address = await self._process.ready()
        return GatewayEndpoint(
            url=url,
            admin_key=address["admin_key"],
            host=socket.gethostname(),
            pid=self._process.pid,
            started=start_time(self._process.pid),
            keeps_sessions=bool(self._plan.store) or self._starts > 1,
        )

    async def _listen(self) -> socket.socket:
        """Listen on the configured port, or on that of the gateway that this one replaces."""
        if self._plan.port or self._earlier is None or self._earlier.hostname != self._host:
            return listen(self._host, self._plan.port)
        end = asyncio.get_running_loop().time() + PORT_S
        while asyncio.get_running_loop().time() < end:
            try:
                return listen(self._host, self._earlier.port or 0)
            except UsageError:
                await asyncio.sleep(0.1)
        return listen(self._host, 0)

    async def ping(self) -> None:
        """Answer, which shows that the actor and its node are there."""

    async def ended(self) -> str:
        """Wait until the process has ended; returns why. A pending call also reveals the actor's death."""
        return await self._process.ended() if self._process else "it has not started"

    async def close(self) -> None:
        """End the gateway, and remove a store that no other node can see."""
        if self._process is not None:
            await self._process.stop()
        if not self._plan.store:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
