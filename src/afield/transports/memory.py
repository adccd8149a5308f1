"""Outcomes in this process's memory, for tests and notebooks. Only code of this process can deliver."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from afield.seams.transport import Fence
from afield.types import Attempt
from afield.wire import Invocation, OutcomeRecord


class MemoryTransport:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._decided: dict[tuple[str, Attempt], OutcomeRecord | Fence] = {}
        self._hints: dict[str, list[Attempt]] = {}
        self._hinted = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    def address(self) -> dict[str, Any]:
        # A name that never resolves: an agent elsewhere fails loudly instead of posting to a stranger.
        return {"outcome_url": "http://memory.invalid"}

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        key = invocation.exp_id, Attempt(invocation.rollout_id, invocation.attempt)
        if key in self._decided:
            return False
        self._decided[key] = record
        self._hints.setdefault(invocation.exp_id, []).append(key[1])
        self._hinted.set()
        return True

    async def decision(self, exp_id: str, attempt: Attempt) -> OutcomeRecord | Fence | None:
        return self._decided.get((exp_id, attempt))

    async def fence(self, exp_id: str, attempt: Attempt, reason: str) -> OutcomeRecord | Fence:
        return self._decided.setdefault((exp_id, attempt), Fence(reason))

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        try:
            async with asyncio.timeout(wait_s):
                while not self._hints.get(exp_id):
                    self._hinted.clear()
                    await self._hinted.wait()
        except TimeoutError:
            pass
        return self._hints.pop(exp_id, [])

    async def sweep(self, exp_id: str) -> list[Attempt]:
        return [attempt for exp, attempt in self._decided if exp == exp_id]
