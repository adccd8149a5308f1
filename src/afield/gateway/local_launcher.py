"""Launcher of a pool's gateways as processes of this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Self

from msgspec import Struct

from afield.interfaces import GatewayEndpoint
from afield.sdk.listen import listen
from afield.utils.gateway_process import GatewayProcess
from afield.utils.process_tree import start_time


class GatewayPlan(Struct, frozen=True, kw_only=True):
    """How one gateway of a pool is started."""

    settings: bytes
    """Settings as JSON, without a line break."""
    host: str
    """Address to listen on."""
    port: int
    """Port to listen on; 0 selects a free port."""


class ProcessLauncher:
    """Starts gateways as child processes. `make` makes the process of a number on a listening socket.

    The sockets stay open here, so that agents' connections wait while a gateway is replaced.
    """

    def __init__(
        self, plans: Sequence[GatewayPlan], make: Callable[[int, socket.socket], GatewayProcess]
    ) -> None:
        self._plans = plans
        self._make = make
        self._listeners: dict[int, socket.socket] = {}
        self._processes: dict[int, GatewayProcess] = {}

    async def __aenter__(self) -> Self:
        try:
            for number, plan in enumerate(self._plans):
                self._listeners[number] = listen(plan.host, plan.port)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        for listener in self._listeners.values():
            listener.close()

    async def start(self, number: int) -> GatewayEndpoint:
        if number in self._processes:
            await self._processes[number].stop(0.0)
        process = self._processes[number] = self._make(number, self._listeners[number])
        await process.start(self._plans[number].settings)
        address = await process.ready()
        return GatewayEndpoint(
            url=address["local_url"],
            admin_key=address["admin_key"],
            host=socket.gethostname(),
            pid=process.pid,
            started=start_time(process.pid),
        )

    async def ended(self, number: int) -> str:
        return await self._processes[number].ended()
