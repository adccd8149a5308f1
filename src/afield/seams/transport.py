"""Transport: how outcomes come back. A store that is the truth, and a queue that only hints.

An attempt is decided once, by whoever first writes its commit: the agent with an outcome, or the
collector with a fence.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from msgspec import Struct

from afield.types import Attempt
from afield.wire import Invocation, OutcomeRecord


class Fence(Struct, frozen=True):
    """The attempt was given up; an outcome of it that comes late is refused."""

    reason: str


class Transport(Protocol):
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def address(self) -> dict[str, Any]:
        """The fields of `_rollout` that tell an agent where to deliver."""
        ...

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        """Write data, commit and hint, in this order. False when the attempt was decided before.

        Delivering the same attempt again changes nothing.
        """
        ...

    async def decision(self, exp_id: str, attempt: Attempt) -> OutcomeRecord | Fence | None:
        """What the store says of an attempt; None while it is open."""
        ...

    async def fence(self, exp_id: str, attempt: Attempt, reason: str) -> OutcomeRecord | Fence:
        """Give an attempt up, unless it is decided already; answers with what stands."""
        ...

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        """Attempts that may have been decided; waits at most `wait_s`. May repeat, may miss some."""
        ...

    async def sweep(self, exp_id: str) -> list[Attempt]:
        """Every attempt the store holds a decision for, hints or not."""
        ...
