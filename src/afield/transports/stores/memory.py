"""In-memory outcome store and notifier, for tests and notebooks; one event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from afield.errors import UsageError
from afield.transports.notifiers.base import LEASE_S, Leased
from afield.transports.stores.base import TransportSpec
from afield.transports.transport import StoreTransport

FORMS: tuple[str, ...] = ("memory",)
OPTIONS: tuple[str, ...] = ()


class MemoryStore:
    """Outcome store in a dict."""

    threads = 0
    page = 0
    foreign = False
    # A host name that never resolves, so that agents in other processes fail.
    address: Mapping[str, Any] = {"outcome_url": "http://memory.invalid"}

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key in self._objects:
            return False
        self._objects[key] = data
        return True

    def get(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self._objects if key.startswith(prefix))


class MemoryNotifier:
    """Hint queues within one event loop."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._queues: dict[str, dict[int, tuple[bytes, float, int]]] = {}
        self._numbers = itertools.count()
        self._sent = asyncio.Event()
        self.dead_letters: list[tuple[Leased, str]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def address(self, exp_id: str) -> dict[str, Any]:
        return {}

    async def send(self, exp_id: str, body: bytes) -> None:
        self._queues.setdefault(exp_id, {})[next(self._numbers)] = body, 0.0, 0
        self._sent.set()

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not (leased := self._lease(exp_id, loop.time())) and loop.time() < end:
            self._sent.clear()
            free = min((until for _, until, _ in self._queues.get(exp_id, {}).values()), default=end)
            try:
                async with asyncio.timeout_at(min(end, free)):
                    await self._sent.wait()
            except TimeoutError:
                pass
        return leased

    def _lease(self, exp_id: str, now: float) -> list[Leased]:
        queue = self._queues.get(exp_id, {})
        free = [(n, body, times + 1) for n, (body, until, times) in queue.items() if until <= now]
        queue.update({n: (body, now + self.lease_s, times) for n, body, times in free})
        return [Leased(exp_id=exp_id, body=body, receipt=n, times=times) for n, body, times in free]

    async def extend(self, leased: Leased, seconds: float) -> None:
        queue = self._queues[leased.exp_id]
        if leased.receipt in queue:
            queue[leased.receipt] = leased.body, asyncio.get_running_loop().time() + seconds, leased.times

    async def ack(self, leased: Sequence[Leased]) -> None:
        for lease in leased:
            self._queues[lease.exp_id].pop(lease.receipt, None)

    async def clear(self, exp_id: str, bodies: Sequence[bytes]) -> None:
        queue = self._queues.get(exp_id, {})
        for n in [n for n, (body, _, _) in queue.items() if body in bodies]:
            del queue[n]

    async def bodies(self, exp_id: str) -> list[bytes]:
        return [body for body, _, _ in self._queues.get(exp_id, {}).values()]

    async def dead(self, letter: Leased, reason: str) -> None:
        self.dead_letters.append((letter, reason))
        await self.ack([letter])


class MemoryTransport(StoreTransport):
    """Transport within one process."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), MemoryNotifier())


def from_spec(spec: TransportSpec, root: Path) -> tuple[MemoryStore, MemoryNotifier]:
    if spec.is_url:
        raise UsageError(f"transport {spec.text!r} must be plain memory; it takes no address")
    return MemoryStore(), MemoryNotifier()
